"""Hidden evaluation: our own items, our own metric, and nothing of a job but its weights."""

from __future__ import annotations

from ai_trains_ai.evaluation.hidden import HiddenEvaluation, paired_stderr

__all__ = ["HiddenEvaluation", "paired_stderr"]
