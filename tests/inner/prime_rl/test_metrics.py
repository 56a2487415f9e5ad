"""Progress from the engine's metrics files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ai_trains_ai.inner.prime_rl.pod.metrics import ORCHESTRATOR, TRAINER, Rows, progress

TRAINED = {"step": 3, "time": 1.0, "loss/mean": 0.5, "entropy/all/mean": 1.5, "perf/throughput": 900, "other": 1}
SAMPLED = {"step": 3, "time": 1.0, "train/agg/all/agent/reward/mean": 0.25, "train/agg/all/agent/has_error/mean": 0.0}


def line(row: dict[str, object]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def test_a_row_of_the_trainer() -> None:
    values = {"loss": 0.5, "entropy": 1.5, "tokens_per_second": 900.0}
    assert progress(line(TRAINED)) == (TRAINER, 3, values)


def test_a_row_of_the_orchestrator() -> None:
    assert progress(line(SAMPLED)) == (ORCHESTRATOR, 3, {"reward": 0.25, "errors": 0.0})


@pytest.mark.parametrize(
    "row",
    [
        b"",
        b"{",
        b"[1]",
        b'{"step": "x"}',
        b'{"loss/mean": 1}',
        b'{"step": 1, "eval/x": 1}',
        b'{"step": 1, "loss/mean": "1"}',
        b'{"step": Infinity, "loss/mean": 1}',
        b'{"step": 1, "loss/mean": 1' + b"0" * 400 + b"}",
        b"[" * 100_000,
    ],
)
def test_anything_else_is_left_out(row: bytes) -> None:
    assert progress(row) is None


def test_values_that_are_no_finite_numbers_are_left_out() -> None:
    assert progress(b'{"step": 1, "loss/mean": NaN, "optim/lr": 0.1}') == (TRAINER, 1, {"lr": 0.1})


def test_rows_come_once_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = Rows([path])
    assert list(rows.new()) == []
    whole = line(TRAINED) + line(SAMPLED)
    path.write_bytes(whole[:-10])
    assert [writer for writer, _, _ in rows.new()] == [TRAINER]
    path.write_bytes(whole)
    assert [writer for writer, _, _ in rows.new()] == [ORCHESTRATOR]
    assert list(rows.new()) == []


def test_both_writers_may_have_a_file_each(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(line(TRAINED))
    second.write_bytes(line(SAMPLED))
    assert {writer for writer, _, _ in Rows([first, second]).new()} == {TRAINER, ORCHESTRATOR}
