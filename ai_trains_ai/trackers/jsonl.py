"""Metrics as one JSON object a line, in the run folder. Always on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ai_trains_ai.errors import StorageError
from ai_trains_ai.interfaces import Tracker


class JsonlTracker(Tracker):
    """Appends to ``metrics.jsonl``; steps that a resume repeats are written once."""

    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        self._path = folder / "metrics.jsonl"
        self._last = -1
        if not self._path.exists():
            return
        whole = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                self._last = max(self._last, json.loads(line)["step"])
                whole.append(line + "\n")
            except (json.JSONDecodeError, KeyError):
                continue  # torn: the run was killed while it wrote
        self._path.write_text("".join(whole), encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._last:
            return
        self._last = step
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        except OSError as error:
            raise StorageError(f"Can't write {self._path}: {error.strerror}. Free space and resume the run.") from error
