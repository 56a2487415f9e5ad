"""The outer trainer on Tinker, and on servers that speak its protocol."""

from __future__ import annotations

from ai_trains_ai.outer.tinker.trainer import TinkerOuterTrainer

__all__ = ["TinkerOuterTrainer"]
