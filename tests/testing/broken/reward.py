"""Rewards with one fault each."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from attrs import evolve

from ai_trains_ai.interfaces import RewardFn
from ai_trains_ai.records import EpisodeOutcome, Reward, Scenario
from ai_trains_ai.rewards.hybrid import HybridReward
from ai_trains_ai.testing import RewardFnContract

PURITY = {
    "test_the_same_outcome_gives_the_same_reward",
    "test_the_order_of_outcomes_changes_nothing",
    "test_an_equal_outcome_gives_an_equal_reward",
}
# `HybridReward.scenarios` sorts by what the reward pays, so that it fails with it
SCENARIOS = {"test_scenarios_go_from_worst_to_best", "test_scenarios_are_the_same_every_time"}


class TestWhole(RewardFnContract):
    fails: set[str] = set()

    @pytest.fixture
    def reward(self) -> RewardFn:
        return HybridReward()


class PerSecond(HybridReward):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        paid = super().__call__(outcome)
        return evolve(paid, total=paid.total / outcome.job.train_seconds)  # type: ignore[union-attr]


class TestThinksThatThereIsAlwaysAJob(RewardFnContract):
    fails = {"test_it_raises_on_no_kind_of_outcome", *SCENARIOS}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return PerSecond()


class Relative(HybridReward):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        paid = super().__call__(outcome)
        post = outcome.evaluation.mean if outcome.evaluation else 0.0
        return evolve(paid, total=post / outcome.best_baseline)


class TestDividesByABaselineThatNobodyMeasured(RewardFnContract):
    fails = {"test_it_raises_on_no_kind_of_outcome"}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Relative()


class Number(HybridReward):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        return super().__call__(outcome).total  # type: ignore[return-value]


class TestGivesANumber(RewardFnContract):
    fails = {"test_it_returns_a_reward", *SCENARIOS}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Number()


class Significant(HybridReward):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        paid = super().__call__(outcome)
        z = outcome.paired_uplift / outcome.uplift_stderr if outcome.uplift_stderr else math.nan
        return evolve(paid, components={**paid.components, "z": z})


class TestRecordsNaN(RewardFnContract):
    """A job that never ran has a standard error of 0."""

    fails = {"test_every_number_of_a_reward_is_finite"}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Significant()


class Sparse(HybridReward):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        paid = super().__call__(outcome)
        components = {name: value for name, value in paid.components.items() if value or name not in ("post", "uplift")}
        return evolve(paid, components=components)


class TestRecordsOnlyWhatEarned(RewardFnContract):
    fails = {"test_every_component_is_recorded_for_every_outcome"}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Sparse()


class Misspelt(HybridReward):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        paid = super().__call__(outcome)
        return evolve(paid, weights={**paid.weights, "trainspeed": 0.05})


class TestWeighsWhatItDoesNotRecord(RewardFnContract):
    fails = {"test_every_weight_is_of_a_recorded_component"}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Misspelt()


class Excusing(HybridReward):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        paid = super().__call__(outcome)
        return evolve(paid, zeros={"train_speed": "slow", **paid.zeros})


class TestExcusesWhatIsNotZero(RewardFnContract):
    fails = {"test_reasons_are_given_for_components_that_are_zero_alone"}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Excusing()


class Counting(HybridReward):
    calls = 0

    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        self.calls += 1
        paid = super().__call__(outcome)
        return evolve(paid, total=paid.total + 1e-6 * self.calls)


class TestCountsItsCalls(RewardFnContract):
    """The bonus grows, so that even the scenarios stay in order."""

    fails = PURITY

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Counting()


class Noisy(HybridReward):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        paid = super().__call__(outcome)
        return evolve(paid, noise_band=random.random())


class TestDrawsItsNoiseBand(RewardFnContract):
    fails = PURITY

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Noisy()


class BestSoFar(HybridReward):
    best = 0.0

    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        paid = super().__call__(outcome)
        self.best = max(self.best, paid.total)
        return evolve(paid, components={**paid.components, "regret": self.best - paid.total})


class TestRemembersTheBestSoFar(RewardFnContract):
    fails = {"test_the_order_of_outcomes_changes_nothing"}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return BestSoFar()


class Jittered(HybridReward):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        paid = super().__call__(outcome)
        return evolve(paid, noise_band=random.Random(id(outcome)).random())


class TestBreaksTiesByIdentity(RewardFnContract):
    fails = {"test_an_equal_outcome_gives_an_equal_reward"}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Jittered()


class Tidying(HybridReward):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        for metrics in outcome.job.metrics if outcome.job else ():
            metrics.pop("loss", None)  # type: ignore[attr-defined]
        return super().__call__(outcome)


class TestTidiesTheOutcome(RewardFnContract):
    fails = {"test_the_outcome_is_left_as_it_was"}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Tidying()


class Reversed(HybridReward):
    def scenarios(self) -> Sequence[Scenario]:
        return super().scenarios()[::-1]


class TestShowsTheBestFirst(RewardFnContract):
    fails = {"test_scenarios_go_from_worst_to_best"}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Reversed()


class Sampled(HybridReward):
    shown = 0

    def scenarios(self) -> Sequence[Scenario]:
        self.shown += 1
        return super().scenarios()[self.shown :]


class TestShowsOtherScenariosEachTime(RewardFnContract):
    fails = {"test_scenarios_are_the_same_every_time"}

    @pytest.fixture
    def reward(self) -> RewardFn:
        return Sampled()
