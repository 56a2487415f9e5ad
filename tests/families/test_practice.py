"""Practice rows: public, deterministic, and refused with a reason."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ai_trains_ai.errors import ConfigurationError, UnknownName
from ai_trains_ai.families import BUILT_IN, load
from ai_trains_ai.families.hidden import reserved
from ai_trains_ai.families.practice import practice

every_family = pytest.mark.parametrize("name", sorted(BUILT_IN))


@every_family
@given(seed=st.integers())
def test_no_seed_ever_yields_a_hidden_item(name: str, seed: int) -> None:
    family = load(name)
    for row in practice(name, family.shallowest, family.deepest, 16, seed):
        item = family.item(row["prompt"])
        assert item is not None
        assert not reserved(item.key)
        assert row == {"prompt": item.prompt, "answer": item.answer, "steps": list(item.steps)}


@every_family
def test_rows_depend_on_the_arguments_alone(name: str) -> None:
    depth = load(name).deepest
    assert practice(name, depth, depth) == practice(name, depth, depth)
    assert practice(name, depth, depth) != practice(name, depth, depth, seed=1)
    assert len(practice(name, depth, depth)) == 128


def test_a_space_smaller_than_the_order_repeats() -> None:
    rows = practice("chained-arithmetic", 1, 1, 400)
    assert len(rows) == 400
    assert 150 < len({row["prompt"] for row in rows}) < 220


def test_depths_are_those_asked_for() -> None:
    assert {len(row["steps"]) for row in practice("multi-hop", 2, 4)} == {2, 3, 4}


def test_unknown_family_suggests_one() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'chained-arithmetic'"):
        practice("chained_arithmetic", 2, 3)


@pytest.mark.parametrize(("low", "high"), [(0, 3), (2, 7), (3, 2)])
def test_depths_outside_of_the_family_name_the_allowed_range(low: int, high: int) -> None:
    with pytest.raises(ConfigurationError, match=f"1 <= low <= high <= 6, got low={low}, high={high}"):
        practice("chained-arithmetic", low, high)


def test_import_is_light() -> None:
    """A practice call in an agent's sandbox must not pay for NumPy, nor `import ai_trains_ai.pico`."""
    code = (
        "import sys; from ai_trains_ai.families.practice import practice; practice('triage', 2, 2, 1);"
        "import ai_trains_ai.pico; print('numpy' in sys.modules or 'tokenizers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
