"""Prices of tokens, and what is booked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ai_trains_ai.errors import ConfigurationError, Transient
from ai_trains_ai.outer.prices import Prices, fetch_tinker
from ai_trains_ai.records import Usage

MODEL = "Qwen/Qwen3.6-35B-A3B"
ENTRY = {
    "tinker_id": MODEL,
    "prefill": "$0.54",
    "cached_prefill": "$0.108",
    "sample": "$1.335",
    "train": "$1.20",
}


def table(folder: Path, content: Any) -> str:
    path = folder / "models.json"
    path.write_text(json.dumps(content))
    return path.as_uri()


@pytest.mark.parametrize("content", [[ENTRY], {"models": [{"tinker_id": "other"}, ENTRY]}])
def test_the_table_is_read(tmp_path: Path, content: Any) -> None:
    assert fetch_tinker(MODEL, table(tmp_path, content)) == Prices(0.54, 0.108, 1.335, 1.2)


@pytest.mark.parametrize("content", [[], {}, 7, [{"tinker_id": MODEL}], [{**ENTRY, "train": "ask us"}]])
def test_a_table_that_says_nothing_is_not_guessed(tmp_path: Path, content: Any) -> None:
    with pytest.raises(Transient, match="Pass it"):
        fetch_tinker(MODEL, table(tmp_path, content))


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Transient, match="Pass it"):
        fetch_tinker(MODEL, (tmp_path / "nowhere.json").as_uri())


def test_a_turn_costs_by_what_was_read_and_sampled() -> None:
    prices = Prices(1.0, 0.1, 10.0, 5.0)
    assert prices.turn(Usage(1_000_000, 200_000, 900_000)) == pytest.approx(0.1 + 0.09 + 2.0)
    assert prices.training(1_000_000) == pytest.approx(5.0)


def test_without_a_cache_price_the_cache_saves_nothing() -> None:
    assert Prices.of({"prefill": 2.0, "sampled": 3.0}).cached == 2.0


@pytest.mark.parametrize(
    "given",
    [{}, {"prefill": 1.0}, {"prefill": -1.0, "sampled": 1.0}, {"prefill": "1", "sampled": 1.0},
     {"prefill": float("nan"), "sampled": 1.0}, {"prefill": 1.0, "sampled": 1.0, "output": 1.0}],
)  # fmt: skip
def test_prices_that_are_none(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="prices"):
        Prices.of(given)
