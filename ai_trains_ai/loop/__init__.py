"""The outer loop: the only room that knows the whole way from a task to an update of the outer policy."""

from __future__ import annotations

from ai_trains_ai.loop.outer import OuterLoop
from ai_trains_ai.loop.settings import LoopSettings, Parts

__all__ = ["LoopSettings", "OuterLoop", "Parts"]
