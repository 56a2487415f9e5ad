"""``thrift.jsonl``: one line a step, with the reward and the dollars since the step before."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "thrift.jsonl"


class Journal:
    """Writes into a run folder; without one it only counts."""

    def __init__(self, folder: str = "") -> None:
        self.path = Path(folder) / NAME if folder else None
        self.usd = 0.0

    def charge(self, usd: float) -> None:
        self.usd += usd

    def write(self, step: int, reward: float) -> None:
        line = {"step": step, "reward": reward, "usd": self.usd}
        self.usd = 0.0
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def read(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's journal."""
    path = folder / NAME
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
