from __future__ import annotations

import pytest
from attrs import evolve

from ai_trains_ai.records import Baseline, EpisodeOutcome, Evaluation, JobFailure, JobResult, Task, TaskLimits
from ai_trains_ai.rewards.hybrid import HybridReward, scenarios

TASK = Task("t", "f", "T", "", {}, limits=TaskLimits(seconds=20.0))
BASELINES = (Baseline("s", Evaluation("t", "s", 512, 0.10, 0.01)), Baseline("m", Evaluation("t", "m", 512, 0.20, 0.01)))
DONE = JobResult("j", "succeeded", steps=8, train_seconds=5.0)


def outcome(post: float = 0.8, attempt: int = 1, job: JobResult = DONE, stderr: float = 0.02) -> EpisodeOutcome:
    evaluation = Evaluation("t", "m", 256, post, 0.02)
    return EpisodeOutcome(TASK, attempt, attempt, None, job, evaluation, BASELINES, post - 0.2, stderr)


def test_the_published_arithmetic() -> None:
    reward = HybridReward()(outcome())
    quality = 0.25 * 0.8 + 0.75 * (0.8 - 0.2)
    assert reward.components["job_quality"] == pytest.approx(quality)
    assert reward.components["train_speed"] == pytest.approx(0.75)
    assert reward.total == pytest.approx(0.35 + 0.60 * quality + 0.05 * 0.75)
    assert reward.noise_band == pytest.approx(1.64 * 0.02)
    assert not reward.zeros


@pytest.mark.parametrize(("attempt", "credit"), [(1, 1.0), (2, 0.6), (3, 0.3)])
def test_later_attempts_earn_less(attempt: int, credit: float) -> None:
    assert HybridReward()(outcome(attempt=attempt)).components["validation"] == credit


def test_uplift_is_over_the_best_untrained_model() -> None:
    assert HybridReward()(outcome(post=0.15)).components["uplift"] == 0.0


def test_speed_never_pays_a_flat_job() -> None:
    flat = outcome(post=0.22)
    assert HybridReward()(flat).components["train_speed"] == 0.0
    assert "noise band" in HybridReward()(flat).zeros["train_speed"]
    assert HybridReward.published()(flat).components["train_speed"] == pytest.approx(0.75)


def test_a_lucky_set_of_items_buys_no_speed() -> None:
    """Post and baseline are means over different items; what counts is the difference on the shared ones."""
    lucky = evolve(outcome(post=0.26), paired_uplift=0.0, uplift_stderr=0.0)
    assert HybridReward()(lucky).components["train_speed"] == 0.0


def test_a_crashed_job_keeps_no_validation_credit() -> None:
    crashed = JobResult("j", "failed", JobFailure("agent", "job-crashed", "boom"))
    outcome_ = EpisodeOutcome(TASK, 1, 1, None, crashed, None, BASELINES)
    assert HybridReward()(outcome_).total == 0.0
    assert "boom" in HybridReward()(outcome_).zeros["validation"]
    assert HybridReward.published()(outcome_).total == pytest.approx(0.35)


def test_an_infrastructure_failure_is_not_the_agents() -> None:
    lost = JobResult("j", "lost", JobFailure("infrastructure", "sandbox-error", "gone"))
    assert HybridReward()(EpisodeOutcome(TASK, 1, 1, None, lost, None, BASELINES)).components["validation"] == 1.0


def test_tampering_zeroes_the_episode() -> None:
    reward = HybridReward()(evolve(outcome(), tampered="forged frame"))
    assert reward.total == 0.0
    assert set(reward.components.values()) == {0.0}
    assert "forged frame" in reward.zeros["validation"]


def test_nothing_valid_is_zero_with_its_reason() -> None:
    reward = HybridReward()(EpisodeOutcome(TASK, 3, None, baselines=BASELINES))
    assert (reward.total, reward.zeros["validation"]) == (0.0, "no valid submission")
    assert HybridReward()(EpisodeOutcome(TASK, 0, None)).zeros["validation"] == "nothing was submitted"


def test_the_hardened_reward_orders_the_scenarios_as_they_are_written() -> None:
    assert [s.name for s in HybridReward().scenarios()] == [s.name for s in scenarios()]


def test_the_published_reward_pays_a_crash_more_than_a_late_flat_job() -> None:
    names = [s.name for s in HybridReward.published().scenarios()]
    assert names.index("valid, but the job crashes") > names.index("valid at the third attempt, a flat job")


@pytest.mark.parametrize("reward", [HybridReward(), HybridReward.published()], ids=["hardened", "published"])
def test_totals_are_in_the_unit_interval(reward: HybridReward) -> None:
    assert all(0.0 <= reward(scenario.outcome).total <= 1.0 for scenario in reward.scenarios())
