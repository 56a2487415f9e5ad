"""Hidden evaluation: our own items, our own metric, and nothing of a job but its weights."""

from __future__ import annotations

from ai_trains_ai.evaluation.hidden import HiddenEvaluation, paired_difference

__all__ = ["HiddenEvaluation", "paired_difference"]
