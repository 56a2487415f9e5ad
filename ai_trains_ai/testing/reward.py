"""What every reward promises."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ai_trains_ai.convert import from_json, to_json
from ai_trains_ai.interfaces import RewardFn
from ai_trains_ai.records import EpisodeOutcome, Reward
from ai_trains_ai.testing.cases import outcomes

Kinds = Sequence[tuple[str, EpisodeOutcome]]


class RewardFnContract:
    """Subclass it and give your reward.

    >>> class TestMyReward(RewardFnContract):
    ...     @pytest.fixture
    ...     def reward(self):
    ...         return MyReward()

    Override ``kinds`` to add outcomes of your own; they are ``(name, outcome)`` pairs as of `outcomes`.
    """

    @pytest.fixture
    def reward(self) -> RewardFn:
        raise NotImplementedError("override the fixture 'reward' and return your RewardFn")

    @pytest.fixture
    def kinds(self) -> Kinds:
        """The outcomes to pay."""
        return outcomes()

    def test_it_raises_on_no_kind_of_outcome(self, reward: RewardFn, kinds: Kinds) -> None:
        raised = {}
        for name, outcome in kinds:
            try:
                reward(outcome)
            except Exception as error:
                raised[name] = repr(error)
        assert not raised, "a reward gets every kind of outcome, and what it raises ends the run"

    def test_it_returns_a_reward(self, reward: RewardFn, kinds: Kinds) -> None:
        other: dict[str, object] = {}
        for name, outcome in kinds:
            try:
                paid = reward(outcome)
            except Exception:
                continue  # said by the test above
            if not isinstance(paid, Reward):
                other[name] = paid
        assert not other, "return ai_trains_ai.Reward(total, components, weights)"

    def test_every_number_of_a_reward_is_finite(self, reward: RewardFn, kinds: Kinds) -> None:
        for name, outcome in kinds:
            if paid := _pay(reward, outcome):
                numbers = {"total": paid.total, "noise_band": paid.noise_band, **paid.components, **paid.weights}
                odd = {key: number for key, number in numbers.items() if not _finite(number)}
                assert not odd, f"{name}: total, components, weights and noise band are finite numbers"

    def test_every_component_is_recorded_for_every_outcome(self, reward: RewardFn, kinds: Kinds) -> None:
        names = {name: sorted(paid.components) for name, outcome in kinds if (paid := _pay(reward, outcome))}
        for name, components in names.items():
            assert components == next(iter(names.values())), (
                f"{name}: a component that earned nothing is recorded as 0; the names are the same for every outcome"
            )

    def test_every_weight_is_of_a_recorded_component(self, reward: RewardFn, kinds: Kinds) -> None:
        for name, outcome in kinds:
            if paid := _pay(reward, outcome):
                unknown = set(paid.weights) - set(paid.components)
                assert not unknown, f"{name}: a weight without its component in Reward.components explains nothing"

    def test_reasons_are_given_for_components_that_are_zero_alone(self, reward: RewardFn, kinds: Kinds) -> None:
        for name, outcome in kinds:
            if paid := _pay(reward, outcome):
                odd = {key: why for key, why in paid.zeros.items() if paid.components.get(key) != 0}
                assert not odd, f"{name}: Reward.zeros says why a component is zero; these are none, or not zero"

    def test_the_same_outcome_gives_the_same_reward(self, reward: RewardFn, kinds: Kinds) -> None:
        for name, outcome in kinds:
            assert _same(_pay(reward, outcome), _pay(reward, outcome)), f"{name}: a reward is pure: no state, no chance"

    def test_the_order_of_outcomes_changes_nothing(self, reward: RewardFn, kinds: Kinds) -> None:
        first = {name: _pay(reward, outcome) for name, outcome in kinds}
        again = {name: _pay(reward, outcome) for name, outcome in reversed(kinds)}
        differ = [name for name in first if not _same(first[name], again[name])]
        assert not differ, "a reward is pure: what it paid before must not matter"

    def test_an_equal_outcome_gives_an_equal_reward(self, reward: RewardFn, kinds: Kinds) -> None:
        for name, outcome in kinds:
            stored = from_json(to_json(outcome), EpisodeOutcome)
            assert _same(_pay(reward, outcome), _pay(reward, stored)), (
                f"{name}: an outcome that is read back from a run is paid the same"
            )

    def test_the_outcome_is_left_as_it_was(self, reward: RewardFn, kinds: Kinds) -> None:
        for name, outcome in kinds:
            before = to_json(outcome)
            _pay(reward, outcome)
            assert to_json(outcome) == before, f"{name}: copy a mapping of the outcome before you change it"

    def test_scenarios_go_from_worst_to_best(self, reward: RewardFn) -> None:
        paid = [(_total(reward, scenario.outcome), scenario.name) for scenario in reward.scenarios()]
        totals = [total for total, _ in paid if total is not None]
        assert totals == sorted(totals), f"scenarios() are sorted by what this reward pays for them, not {paid}"

    def test_scenarios_are_the_same_every_time(self, reward: RewardFn) -> None:
        assert list(reward.scenarios()) == list(reward.scenarios()), "scenarios() are shown in docs: don't draw them"


def _pay(reward: RewardFn, outcome: EpisodeOutcome) -> Reward | None:
    """The reward, where it is one: that it always is, is said by tests of its own."""
    try:
        paid = reward(outcome)
    except Exception:
        return None
    return paid if isinstance(paid, Reward) else None


def _total(reward: RewardFn, outcome: EpisodeOutcome) -> float | None:
    paid = _pay(reward, outcome)
    return paid.total if paid else None


def _same(one: Reward | None, other: Reward | None) -> bool:
    """Equal; by text, so that NaN, which a test of its own refuses, equals itself."""
    return repr(one) == repr(other)


def _finite(number: object) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)
