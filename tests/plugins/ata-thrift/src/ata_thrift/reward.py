"""A reward that pays for uplift and takes back what it cost in time."""

from __future__ import annotations

from ai_trains_ai import EpisodeOutcome, Reward, RewardFn


class ThriftReward(RewardFn):
    """``uplift - price * share``, where ``share`` is the part of the task's time limit that training took."""

    def __init__(self, price: float = 0.1) -> None:
        self.price = price

    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        post = outcome.evaluation.mean if outcome.evaluation else 0.0
        uplift = max(0.0, post - outcome.best_baseline)
        seconds = outcome.job.train_seconds if outcome.job else 0.0
        share = min(1.0, seconds / outcome.task.limits.seconds)
        weights = {"uplift": 1.0, "share": -self.price}
        zeros = {} if uplift else {"uplift": "no better than the best untrained model"}
        return Reward(uplift - self.price * share, {"uplift": uplift, "share": share}, weights, 0.0, zeros)
