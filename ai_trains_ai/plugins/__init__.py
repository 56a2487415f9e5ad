"""Plugins: typed hooks over pluggy, an isolating loader, and registries from names to implementations."""

from __future__ import annotations

from ai_trains_ai.plugins.handler import EventHandler
from ai_trains_ai.plugins.hooks import Hooks
from ai_trains_ai.plugins.hookspecs import Register, hookimpl
from ai_trains_ai.plugins.manager import PluginManager, PluginRecord, Plugins
from ai_trains_ai.plugins.manifest import differences, manifest
from ai_trains_ai.plugins.registry import Registry, Spec

__all__ = [
    "EventHandler",
    "Hooks",
    "PluginManager",
    "PluginRecord",
    "Plugins",
    "Register",
    "Registry",
    "Spec",
    "differences",
    "hookimpl",
    "manifest",
]
