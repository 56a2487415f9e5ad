from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ai_trains_ai.interfaces import Tracker
from ai_trains_ai.testing import TrackerContract
from ai_trains_ai.trackers.jsonl import JsonlTracker


class TestJsonlTracker(TrackerContract):
    @pytest.fixture
    def tracker(self) -> Tracker:
        return JsonlTracker()

    def logged(self, tracker: Tracker, folder: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_a_line_that_was_torn_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n{"step": 1, "rew', "utf-8")
    tracker = JsonlTracker()
    tracker.open(tmp_path, "run", {})
    for step in range(2):
        tracker.log(step, {"reward/mean": 0.5})
    lines = (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
