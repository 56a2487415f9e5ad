"""The hybrid reward: validation, job quality, train speed."""

from __future__ import annotations

from collections.abc import Sequence

from ai_trains_ai.interfaces import RewardFn
from ai_trains_ai.records import (
    Baseline,
    EpisodeOutcome,
    Evaluation,
    JobFailure,
    JobResult,
    Reward,
    Scenario,
    Task,
)

WEIGHTS = {"validation": 0.35, "job_quality": 0.60, "train_speed": 0.05}
ATTEMPT_CREDIT = {1: 1.0, 2: 0.6, 3: 0.3}
POST_WEIGHT, UPLIFT_WEIGHT = 0.25, 0.75


class HybridReward(RewardFn):
    """``0.35 validation + 0.60 job_quality + 0.05 train_speed``, each component in [0, 1].

    * validation: 1.0, 0.6, 0.3 when the first, second, third submission is valid, else 0;
    * job_quality: ``0.25 post + 0.75 max(0, post - best untrained baseline)``;
    * train_speed: ``1 - min(1, training seconds / the task's time limit)``.

    Hardened (the default): the validation credit is kept only when the job then really trains (an infrastructure
    failure excepted), speed counts only when the uplift exceeds the noise band, and a tamper finding zeroes all.
    `HybridReward.published()` is the published arithmetic without these gates.
    """

    def __init__(self, *, hardened: bool = True) -> None:
        self.hardened = hardened

    @classmethod
    def published(cls) -> HybridReward:
        """The arithmetic as published, for faithful reproduction."""
        return cls(hardened=False)

    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        zeros: dict[str, str] = {}
        quality = self._job_quality(outcome, zeros)
        components = {
            "validation": self._validation(outcome, zeros),
            "job_quality": quality,
            "train_speed": self._train_speed(outcome, zeros),
            "post": outcome.evaluation.mean if outcome.evaluation else 0.0,
            "uplift": _uplift(outcome),
        }
        if self.hardened and outcome.tampered:
            components = dict.fromkeys(components, 0.0)
            zeros = dict.fromkeys(WEIGHTS, f"tampering: {outcome.tampered}")
        total = sum(weight * components[name] for name, weight in WEIGHTS.items())
        return Reward(total, components, WEIGHTS, outcome.noise_band, zeros)

    def _validation(self, outcome: EpisodeOutcome, zeros: dict[str, str]) -> float:
        if outcome.valid_attempt is None:
            zeros["validation"] = "no valid submission" if outcome.attempts else "nothing was submitted"
            return 0.0
        failure = outcome.job.failure if outcome.job else None
        if self.hardened and (failure is None or failure.side == "agent") and not _trained(outcome):
            zeros["validation"] = f"the job did not train: {failure.message if failure else 'it never ran'}"
            return 0.0
        if outcome.valid_attempt not in ATTEMPT_CREDIT:
            zeros["validation"] = f"attempt {outcome.valid_attempt} earns nothing"
        return ATTEMPT_CREDIT.get(outcome.valid_attempt, 0.0)

    def _job_quality(self, outcome: EpisodeOutcome, zeros: dict[str, str]) -> float:
        if outcome.evaluation is None or not _trained(outcome):
            zeros["job_quality"] = "no trained model was evaluated"
            return 0.0
        return POST_WEIGHT * outcome.evaluation.mean + UPLIFT_WEIGHT * _uplift(outcome)

    def _train_speed(self, outcome: EpisodeOutcome, zeros: dict[str, str]) -> float:
        if not _trained(outcome) or outcome.job is None:
            zeros["train_speed"] = "nothing was trained"
            return 0.0
        if self.hardened and outcome.paired_uplift <= outcome.noise_band:
            zeros["train_speed"] = f"the uplift is within the noise band of {outcome.noise_band:.3f}"
            return 0.0
        if outcome.job.train_seconds >= outcome.task.limits.seconds:
            zeros["train_speed"] = f"the time limit of {outcome.task.limits.seconds:g} s was used up"
        return 1.0 - min(1.0, outcome.job.train_seconds / outcome.task.limits.seconds)

    def scenarios(self) -> Sequence[Scenario]:
        return sorted(scenarios(), key=lambda scenario: self(scenario.outcome).total)


def _trained(outcome: EpisodeOutcome) -> bool:
    return outcome.job is not None and outcome.job.status == "succeeded" and outcome.job.steps > 0


def _uplift(outcome: EpisodeOutcome) -> float:
    if outcome.evaluation is None or not _trained(outcome):
        return 0.0
    return max(0.0, outcome.evaluation.mean - outcome.best_baseline)


def scenarios() -> tuple[Scenario, ...]:
    """What would score what, from worst to best for a reward that pays for trained models."""
    task = Task("example", "example", "Example", "", {})
    baselines = (Baseline("small", _score(0.15)), Baseline("large", _score(0.17)))

    def outcome(attempt: int | None, job: JobResult | None = None, post: float | None = None) -> EpisodeOutcome:
        evaluation = None if post is None else _score(post)
        paired = 0.0 if post is None else post - 0.17
        return EpisodeOutcome(task, attempt or 3, attempt, None, job, evaluation, baselines, paired, 0.02)

    crash = JobFailure("agent", "job-crashed", "the reward function raised")
    done = JobResult("job", "succeeded", steps=16, train_seconds=2.0)
    return (
        Scenario("nothing valid in three attempts", outcome(None)),
        Scenario("valid, but the job crashes", outcome(1, JobResult("job", "failed", crash))),
        Scenario("valid at the third attempt, a flat job", outcome(3, done, 0.17)),
        Scenario("valid at once, a job that makes the model worse", outcome(1, done, 0.05)),
        Scenario("valid at once, a flat job", outcome(1, done, 0.17)),
        Scenario("valid at the second attempt, a fair job", outcome(2, done, 0.50)),
        Scenario("valid at once, a fair job", outcome(1, done, 0.50)),
        Scenario("valid at once, a very good job", outcome(1, done, 0.95)),
    )


def _score(mean: float) -> Evaluation:
    return Evaluation("example", "example", 256, mean, 0.02)
