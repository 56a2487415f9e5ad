"""Plugins: typed hooks over pluggy, and registries from names to implementations."""

from __future__ import annotations

from ai_trains_ai.plugins.hookspecs import hookimpl
from ai_trains_ai.plugins.registry import Registry, Spec

__all__ = ["Registry", "Spec", "hookimpl"]
