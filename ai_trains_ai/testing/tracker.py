"""What every tracker promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ai_trains_ai.interfaces import Tracker


class TrackerContract:
    """Subclass it, give your tracker, and say how to read what it logged.

    >>> class TestMyTracker(TrackerContract):
    ...     @pytest.fixture
    ...     def tracker(self):
    ...         return MyTracker()
    ...
    ...     def logged(self, tracker, folder):
    ...         return [json.loads(line) for line in (folder / "my.jsonl").read_text().splitlines()]

    Override ``another`` where a second tracker like the first isn't made by ``type(tracker)()``.
    """

    @pytest.fixture
    def tracker(self) -> Tracker:
        """A new tracker, not opened."""
        raise NotImplementedError("override the fixture 'tracker' and return your Tracker, not opened")

    @pytest.fixture
    def another(self, tracker: Tracker) -> Tracker:
        """A second new one: of a later session on the same run, or of another run."""
        return type(tracker)()

    def logged(self, tracker: Tracker, folder: Path) -> list[dict[str, Any]] | None:
        """What was logged to the run in ``folder``, in order: ``{"step": 0, "outer/kl": 0.1, …}`` each.

        ``None`` where that can't be read here; what a tracker keeps is then not tested.
        """
        return None

    # -------------------------------------------------------------------------------------- what is kept

    def test_names_and_values_are_kept(self, tracker: Tracker, tmp_path: Path) -> None:
        metrics = {"reward/mean": 0.123456789, "outer/kl/per_token": -2.5e-7, "time/step": 1e9, "outer/skipped": 0.0}
        rows = self._log(tracker, tmp_path, [dict(metrics)])
        assert [_metrics(row) for row in rows] == [metrics], "slash-named keys and their values are kept as they are"

    def test_every_step_is_kept_in_order(self, tracker: Tracker, tmp_path: Path) -> None:
        rows = self._log(tracker, tmp_path, [{"reward/mean": float(step)} for step in range(25)])
        assert [(row["step"], row["reward/mean"]) for row in rows] == [(step, step) for step in range(25)], (
            "each step is kept, under its own number, and none is lost at close()"
        )

    def test_steps_that_come_again_on_resume_are_kept_once(
        self, tracker: Tracker, another: Tracker, tmp_path: Path
    ) -> None:
        self._log(tracker, tmp_path, [{"reward/mean": float(step)} for step in range(3)])
        rows = self._log(another, tmp_path, [{"reward/mean": float(step)} for step in range(5)])
        assert [row["step"] for row in rows] == list(range(5)), (
            "a resumed run logs its earlier steps again to a new tracker of the same run; each is kept once"
        )

    def test_runs_do_not_mix(self, tracker: Tracker, another: Tracker, tmp_path: Path) -> None:
        folders = [_folder(tmp_path / name) for name in ("one", "two")]
        pairs = list(zip((tracker, another), folders, strict=True))
        for part, folder in pairs:
            part.open(folder, folder.name, _config())
        for step in range(3):
            for value, (part, _) in enumerate(pairs):
                part.log(step, {"reward/mean": float(value)})
        for part, _ in pairs:
            part.close()
        kept = [[row["reward/mean"] for row in self._rows(part, folder)] for part, folder in pairs]
        assert kept == [[0.0] * 3, [1.0] * 3], "two runs may go on at once in one process, each with its own tracker"

    # -------------------------------------------------------------------------------------- what is taken

    def test_keys_may_change_from_step_to_step(self, tracker: Tracker, tmp_path: Path) -> None:
        tracker.open(tmp_path, "run", _config())
        for step, metrics in enumerate([{"reward/mean": 0.5}, {}, {"reward/mean": 0.5, "eval/held_out": 0.25}]):
            tracker.log(step, metrics)
        tracker.close()

    def test_many_keys_are_taken(self, tracker: Tracker, tmp_path: Path) -> None:
        tracker.open(tmp_path, "run", _config())
        tracker.log(0, {f"family/number-{number}/score": 0.5 for number in range(500)})
        tracker.close()

    def test_whole_numbers_are_taken(self, tracker: Tracker, tmp_path: Path) -> None:
        tracker.open(tmp_path, "run", _config())
        tracker.log(0, {"outer/tokens": 12_345_678, "outer/skipped": 0})
        tracker.close()

    def test_any_mapping_is_taken(self, tracker: Tracker, tmp_path: Path) -> None:
        tracker.open(tmp_path, "run", MappingProxyType({"steps": 4}))
        tracker.log(0, MappingProxyType({"reward/mean": 0.5}))
        tracker.close()

    def test_any_plain_config_is_taken(self, tracker: Tracker, tmp_path: Path) -> None:
        for part in ({}, _config()):
            tracker.open(tmp_path, "run", part)
            tracker.close()

    # -------------------------------------------------------------------------------------- what is left alone

    def test_metrics_are_left_as_they_are(self, tracker: Tracker, tmp_path: Path) -> None:
        metrics = {"reward/mean": 0.5, "outer/kl": 0.1}
        tracker.open(tmp_path, "run", _config())
        tracker.log(0, metrics)
        tracker.close()
        assert metrics == {"reward/mean": 0.5, "outer/kl": 0.1}, "copy metrics before you change them: others get them"

    def test_the_config_is_left_as_it_is(self, tracker: Tracker, tmp_path: Path) -> None:
        config = _config()
        tracker.open(tmp_path, "run", config)
        tracker.log(0, {"reward/mean": 0.5})
        tracker.close()
        assert config == _config(), "copy the config before you change it"

    def test_the_rest_of_the_run_folder_is_left_alone(self, tracker: Tracker, tmp_path: Path) -> None:
        theirs = {_folder(tmp_path / "artifacts") / "weights": b"weights", tmp_path / "run.db": b"SQLite"}
        for path, data in theirs.items():
            path.write_bytes(data)
        tracker.open(tmp_path, "run", _config())
        tracker.log(0, {"reward/mean": 0.5})
        tracker.close()
        kept = {path: path.read_bytes() if path.exists() else None for path in theirs}
        assert kept == theirs, "the run folder holds the run; add files of your own, and touch no others"

    # -------------------------------------------------------------------------------------- the end

    def test_close_may_be_repeated(self, tracker: Tracker, tmp_path: Path) -> None:
        tracker.open(tmp_path, "run", _config())
        tracker.log(0, {"reward/mean": 0.5})
        tracker.close()
        tracker.close()

    def test_a_tracker_that_was_never_opened_can_be_closed(self, tracker: Tracker) -> None:
        tracker.close()  # the run failed before, or while another tracker was opened

    def test_a_run_that_failed_before_its_first_step_can_be_closed(self, tracker: Tracker, tmp_path: Path) -> None:
        tracker.open(tmp_path, "run", _config())
        tracker.close()

    def _log(self, tracker: Tracker, folder: Path, steps: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
        """A whole session; what the run then holds."""
        tracker.open(folder, "run", _config())
        for step, metrics in enumerate(steps):
            tracker.log(step, metrics)
        tracker.close()
        return self._rows(tracker, folder)

    def _rows(self, tracker: Tracker, folder: Path) -> list[dict[str, Any]]:
        rows = self.logged(tracker, folder)
        if rows is None:
            pytest.skip("override 'logged' to test what the tracker keeps")
        return rows


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if "/" in key}


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _config() -> dict[str, Any]:
    """A new one each time, so that who changes it fails the test about that alone."""
    return {
        "steps": 4,
        "settings": {"lr": 1e-3, "families": ["sums"], "notes": None, "resume": False},
        "runner": "embedded",
    }
