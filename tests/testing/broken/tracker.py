"""Trackers with one fault each: lines of JSON, written a little worse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ai_trains_ai.interfaces import Tracker
from ai_trains_ai.testing import TrackerContract
from ai_trains_ai.trackers.jsonl import JsonlTracker


class Contract(TrackerContract):
    def logged(self, tracker: Tracker, folder: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


class TestWhole(Contract):
    fails: set[str] = set()

    @pytest.fixture
    def tracker(self) -> Tracker:
        return JsonlTracker()


class Rounded(JsonlTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, {key: round(value, 4) for key, value in metrics.items()})


class TestRoundsItsValues(Contract):
    fails = {"test_names_and_values_are_kept"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Rounded()


class Flat(JsonlTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, {"/".join(key.split("/")[:2]): value for key, value in metrics.items()})


class TestLeavesSubgroupsOut(Contract):
    fails = {"test_names_and_values_are_kept"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Flat()


class Buffered(JsonlTracker):
    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        super().open(folder, run, config)
        self._buffer: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._buffer.append((step, dict(metrics)))
        if len(self._buffer) == 3:
            for entry in self._buffer:
                super().log(*entry)
            self._buffer.clear()


class TestLosesItsBufferAtTheEnd(Contract):
    fails = {
        "test_names_and_values_are_kept",
        "test_every_step_is_kept_in_order",
        "test_steps_that_come_again_on_resume_are_kept_once",
    }

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Buffered()


class Thinned(JsonlTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % 2 == 0:
            super().log(step, metrics)


class TestKeepsEveryOtherStep(Contract):
    fails = {
        "test_every_step_is_kept_in_order",
        "test_steps_that_come_again_on_resume_are_kept_once",
        "test_runs_do_not_mix",
    }

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Thinned()


class Forgetful(JsonlTracker):
    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        super().open(folder, run, config)
        self._last = -1


class TestLogsStepsAgainOnResume(Contract):
    fails = {"test_steps_that_come_again_on_resume_are_kept_once"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Forgetful()


class Global(JsonlTracker):
    _path: ClassVar[Path]  # type: ignore[misc]

    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        super().open(folder, run, config)
        type(self)._path = self.__dict__.pop("_path")


class TestKeepsItsPathOnTheClass(Contract):
    fails = {"test_runs_do_not_mix"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Global()


class Tabular(JsonlTracker):
    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        super().open(folder, run, config)
        self._columns: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._columns = self._columns or set(metrics)
        if set(metrics) != self._columns:
            raise ValueError(f"no columns {set(metrics) ^ self._columns}")
        super().log(step, metrics)


class TestFixesItsColumnsAtTheFirstStep(Contract):
    fails = {"test_keys_may_change_from_step_to_step"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Tabular()


class Narrow(JsonlTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if len(metrics) > 100:
            raise ValueError("too many columns")
        super().log(step, metrics)


class TestHasAHundredColumns(Contract):
    fails = {"test_many_keys_are_taken"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Narrow()


class Exact(JsonlTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, {key: float.fromhex(value.hex()) for key, value in metrics.items()})


class TestTakesFloatsAlone(Contract):
    fails = {"test_whole_numbers_are_taken"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Exact()


class Direct(JsonlTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        json.dumps(metrics)
        super().log(step, metrics)


class TestTakesDictsAlone(Contract):
    fails = {"test_any_mapping_is_taken"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Direct()


class Needy(JsonlTracker):
    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        self._steps = config["steps"]
        super().open(folder, run, config)


class TestWantsASeedInTheConfig(Contract):
    fails = {"test_any_plain_config_is_taken"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Needy()


class Stamping(JsonlTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if isinstance(metrics, dict):
            metrics["step"] = step
        super().log(step, metrics)


class TestPutsTheStepIntoTheMetrics(Contract):
    fails = {"test_metrics_are_left_as_they_are"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Stamping()


class Popping(JsonlTracker):
    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        if isinstance(config, dict):
            config.pop("settings", None)
        super().open(folder, run, config)


class TestTakesTheSettingsOutOfTheConfig(Contract):
    fails = {"test_the_config_is_left_as_it_is"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Popping()


class Clearing(JsonlTracker):
    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        super().open(folder, run, config)


class TestStartsWithACleanFolder(Contract):
    fails = {"test_the_rest_of_the_run_folder_is_left_alone"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Clearing()


class Once(JsonlTracker):
    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        super().open(folder, run, config)
        self._file = self._path.open("a")

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.flush()
            self._file.close()


class TestCanBeClosedOnce(Contract):
    fails = {"test_close_may_be_repeated"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Once()


class Opened(JsonlTracker):
    def close(self) -> None:
        self._path.touch()


class TestClosesWhatItMustHaveOpened(Contract):
    fails = {"test_a_tracker_that_was_never_opened_can_be_closed"}

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Opened()


class Summing(JsonlTracker):
    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        super().open(folder, run, config)
        self._best: list[float] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._best.append(max(metrics.values(), default=0.0))
        super().log(step, metrics)

    def close(self) -> None:
        if hasattr(self, "_best"):
            self.best = max(self._best)


class TestSumsUpAtTheEnd(Contract):
    fails = {
        "test_a_run_that_failed_before_its_first_step_can_be_closed",
        "test_any_plain_config_is_taken",
    }

    @pytest.fixture
    def tracker(self) -> Tracker:
        return Summing()
