"""Thresholds of a step's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from ai_trains_ai.errors import ConfigurationError, RunUnhealthy
from ai_trains_ai.loop.health import IDENTICAL, THRESHOLDS, Health

SOUND = {"outer/kl_v2": 0.001, "outer/entropy": 0.3, "outer/parse_failures": 0.1, "outer/masked_share": 0.0}


def test_a_sound_step_says_nothing() -> None:
    assert Health({}).check(3, SOUND) == []


@pytest.mark.parametrize("key", [key for key, threshold in THRESHOLDS.items() if threshold.warn is not None])
def test_what_crosses_its_threshold_is_said_with_a_remedy(key: str) -> None:
    threshold = THRESHOLDS[key]
    assert threshold.warn is not None
    beyond = threshold.warn / 2 if threshold.below else threshold.warn * 2
    (said,) = Health({}).check(3, {key: beyond})
    assert said.startswith(f"step 3: {key} is")
    assert threshold.remedy in said


def test_a_threshold_that_ends_the_run() -> None:
    health = Health({"outer/kl_v2": {"stop": 0.5}})
    assert health.check(1, {"outer/kl_v2": 0.4})
    with pytest.raises(RunUnhealthy, match="step 2"):
        health.check(2, {"outer/kl_v2": 0.6})


def test_the_same_loss_twice_is_an_alarm() -> None:
    health = Health({})
    steps = [{"outer/loss": 0.25, "outer/tokens": 9.0}, {"outer/loss": 0.5, "outer/tokens": 9.0}]
    found = [health.derived(step)[IDENTICAL] for step in (*steps, steps[1])]
    assert found == [0.0, 0.0, 1.0]


def test_a_step_that_trained_nothing_has_no_loss_to_compare() -> None:
    health = Health({})
    found = [health.derived({"outer/loss": 0.0, "outer/tokens": tokens}) for tokens in (5.0, 0.0, 0.0)]
    assert [step[IDENTICAL] for step in found] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("changes", [{"outer/kl_v3": {"warn": 1.0}}, {"outer/kl_v2": {"wran": 1.0}}])
def test_a_misspelt_threshold(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Health(changes)
