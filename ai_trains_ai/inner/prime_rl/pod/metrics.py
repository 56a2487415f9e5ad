"""Progress from the rows that trainer and orchestrator append to ``metrics.jsonl``, into one file or one each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TRAINER = "trainer"
ORCHESTRATOR = "orchestrator"
_AGENT = "train/agg/all/agent"

NAMES = {
    TRAINER: {
        "loss/mean": "loss",
        "entropy/all/mean": "entropy",
        "mismatch_kl/all/mean": "mismatch_kl",
        "optim/grad_norm": "grad_norm",
        "optim/lr": "lr",
        "perf/throughput": "tokens_per_second",
        "perf/peak_memory": "peak_memory_gib",
        "time/step": "step_seconds",
    },
    ORCHESTRATOR: {
        f"{_AGENT}/reward/mean": "reward",
        f"{_AGENT}/is_truncated/mean": "truncated",
        f"{_AGENT}/has_error/mean": "errors",
        f"{_AGENT}/num_output_tokens/mean": "reply_tokens",
        "time/wait_for_policy": "policy_wait_seconds",
    },
}
"""By writer: the engine's key -> ours. Shares (truncated, errors) are in [0, 1]."""


class Rows:
    """New rows of metrics files, by byte offset; half a line waits for its rest."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._offsets = dict.fromkeys(paths, 0)

    def new(self) -> Iterator[tuple[str, int, dict[str, float]]]:
        """Writer, step and progress of every row since the last call. Rows of neither kind are left out."""
        for path, offset in self._offsets.items():
            try:
                with path.open("rb") as file:
                    file.seek(offset)
                    data = file.read()
            except FileNotFoundError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            for line in whole.splitlines():
                if (found := progress(line)) is not None:
                    yield found


def progress(line: bytes) -> tuple[str, int, dict[str, float]] | None:
    """One row: whose it is, its step, and what we show of it; ``None`` for anything else."""
    try:
        row: dict[str, Any] = json.loads(line)
        step = int(row["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    for writer, names in NAMES.items():
        values = {ours: row[theirs] for theirs, ours in names.items() if isinstance(row.get(theirs), int | float)}
        finite = {name: float(value) for name, value in values.items() if abs(value) < 1e300}  # NaN isn't
        if finite:
            return writer, step, finite
    return None
