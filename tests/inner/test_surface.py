from __future__ import annotations

import re
from pathlib import Path

import pytest

from ai_trains_ai.inner import embedded_job
from ai_trains_ai.inner.embedded import EmbeddedJobRunner
from ai_trains_ai.inner.surface import DIVISIBLE, VOCABULARY, WARMUP_FITS, surface

SURFACE = EmbeddedJobRunner().config_surface()


def test_the_embedded_surface_is_taken_from_the_vocabulary() -> None:
    for key in SURFACE.keys:
        known = VOCABULARY[key.path]
        assert (key.type, key.help, key.choices) == (known.type, known.help, known.choices)


def test_defaults_are_within_bounds_and_keep_the_rules() -> None:
    for key in SURFACE.keys:
        if key.choices:
            assert key.default in key.choices
        if key.low is not None:
            assert key.default >= key.low
        if key.high is not None:
            assert key.default <= key.high
    assert all(rule.holds(SURFACE.defaults()) for rule in SURFACE.rules)


@pytest.mark.parametrize(
    ("rule", "config"),
    [
        (DIVISIBLE, {"batch_size": 20, "group_size": 8}),
        (WARMUP_FITS, {"scheduler.warmup_steps": 4, "max_steps": 4}),
    ],
    ids=lambda value: getattr(value, "code", ""),
)
def test_rules_refuse(rule, config) -> None:  # type: ignore[no-untyped-def]
    assert not rule.holds(config)


def test_every_key_is_read_by_the_trainer() -> None:
    source = Path(embedded_job.__file__).read_text("utf-8")
    read = set(re.findall(r'onfig\["([a-z_.]+)"\]', source))
    assert read == {key.path for key in SURFACE.keys}


def test_an_unknown_key_is_no_surface() -> None:
    with pytest.raises(KeyError):
        surface({"no.such": {}}, ())
