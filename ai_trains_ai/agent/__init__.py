"""What the outer model sees and does: the brief, the tools, the turn loop."""

from __future__ import annotations

from ai_trains_ai.agent.brief import open_workspace, opening
from ai_trains_ai.agent.rollout import Rollout, play

__all__ = ["Rollout", "open_workspace", "opening", "play"]
