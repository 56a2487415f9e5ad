from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from ai_trains_ai.convert import from_json, to_json
from ai_trains_ai.errors import RunFolderError, StorageError
from ai_trains_ai.events import RunStarted
from ai_trains_ai.records import (
    Charge,
    Checkpoint,
    Episode,
    Evaluation,
    Finding,
    ItemResult,
    JobFailure,
    JobHandle,
    JobResult,
    Message,
    Offer,
    Rental,
    Reward,
    Segment,
    Submission,
    TaskLimits,
    ToolCall,
    TrainingJob,
    TrainStep,
    Turn,
    ValidationReport,
)
from ai_trains_ai.store import RunFolder, Store
from ai_trains_ai.store.schema import VERSION

TURN = Turn("hi", (ToolCall("submit"), ToolCall("", {}, "broken")), "stop", 3, (1, 2), (3, 4), (-0.5, -0.25))
REPORT = ValidationReport(
    True, (Finding("x", "parse", "m"),), "freeze", 0.1, "pico-m", {"max_steps": 4}, ("max_steps",), {}, ("{}",)
)
EPISODE = Episode(
    "e1", "g1", "task", 0, "finished", "submitted", (Message("user", "go"), Message("assistant", "hi", TURN)),
    (Segment((1, 2, 3, 4), (False, False, True, True), (0.0, 0.0, -0.5, -0.25)),), (3,), 1, 1, (REPORT,), "j1",
    "pico-m", 0.4, 0.2, Reward(0.5, {"post": 0.4}, {"post": 1.0}, 0.01, {"x": "y"}), 1.5, "no note",
)  # fmt: skip
JOB = TrainingJob(
    "j1", "e1", "task", "pico-m", {"job.toml": b"\x00\xff"}, {"optim.lr": 1e-3}, {}, ("{}",), 7, TaskLimits(), "h"
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "run.db")


@pytest.mark.parametrize("record", [EPISODE, JOB, REPORT, TURN], ids=lambda r: type(r).__name__)
def test_records_survive_json(record: object) -> None:
    assert from_json(to_json(record), type(record)) == record


def test_an_episode_is_kept_without_its_rows(store: Store) -> None:
    store.save_group("g1", "train", 0, 0, "task")
    store.save_intent(EPISODE, JOB, JobHandle("j1"))
    assert store.episodes() == []
    (waiting,) = store.episodes(stage="submitted")
    assert waiting.reports[0].rows == ()
    store.save_episode(EPISODE, "finished")
    (kept,) = store.episodes(phase="train", step=0)
    assert kept.segments == EPISODE.segments
    assert kept.reward == EPISODE.reward
    assert store.episodes(phase="train", step=1) == []
    assert store.episodes(phase="probe-before") == []


def test_text_that_no_utf8_file_takes_is_kept(store: Store) -> None:
    store.save_group("g1", "train", 0, 0, "task")
    odd = evolve(EPISODE, messages=(Message("assistant", "\ud83d", None),))
    store.save_episode(odd, "finished")
    assert store.episodes()[0].messages == odd.messages


def test_the_newest_probe_counts(store: Store) -> None:
    for step in (2, 4):
        store.save_group(f"p{step}", "probe-after", step, 0, "task")
        store.save_episode(evolve(EPISODE, id=f"e{step}", group_id=f"p{step}"), "finished")
    assert [episode.id for episode in store.probe("probe-after")] == ["e4"]
    assert store.probe("probe-before") == []


def test_an_evaluation_is_found_by_its_job(store: Store) -> None:
    assert store.evaluation_of("j1") is None
    evaluation = Evaluation("task", "pico-m", 2, 0.5, 0.5)
    store.save_evaluation("job", evaluation, "j1")
    assert store.evaluation_of("j1") == evaluation


def test_a_half_made_database_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run.db.partial").write_bytes(b"half")
    store = Store.create(tmp_path / "run.db")
    assert len(store.meta("run_id")) == 12
    assert not (tmp_path / "run.db.partial").exists()


def test_a_job_is_found_again_with_its_bytes(store: Store) -> None:
    store.save_group("g1", "train", 0, 0, "task")
    store.save_intent(EPISODE, JOB, JobHandle("j1"))
    assert store.job("j1") == (JOB, JobHandle("j1"), None)
    result = JobResult("j1", "failed", JobFailure("agent", "job-crashed", "boom"), metrics=({"reward": 0.5},))
    store.save_result(result)
    store.save_handle(JobHandle("j1", 2, "here"))
    assert store.job("j1") == (JOB, JobHandle("j1", 2, "here"), result)
    assert store.results() == [result]
    with pytest.raises(RunFolderError, match="no job 'j2'"):
        store.job("j2")


def test_everything_else_comes_back(store: Store) -> None:
    evaluation = Evaluation("task", "pico-m", 2, 0.5, 0.5, (ItemResult(0, 1.0, "a"), ItemResult(1, 0.0, "")))
    store.save_evaluation("baseline", evaluation)
    store.save_evaluation("job", evaluation, "j1")
    store.save_charges([(1.0, Charge("busy", "j1", 2.0, "seconds", 0.25))])
    store.save_step(0, TrainStep(1, {}), Checkpoint("step-0", "checkpoints/step-0", 1), 2.0, {"outer/reward/mean": 0.5})
    store.save_submission(Submission.of("e1", 1, {"job.toml": b"x = 1"}), REPORT)
    store.save_event(RunStarted("run", "jail", time=1.0))
    store.set_meta(wall_seconds=1.5)
    assert store.baselines()[0].evaluation == evaluation
    assert store.evaluations("job") == [("j1", evaluation)]
    assert store.charges()[0][1].usd == 0.25
    assert store.steps() == [{"step": 0, "version": 1, "seconds": 2.0, "outer/reward/mean": 0.5}]
    assert store.checkpoints() == [Checkpoint("step-0", "checkpoints/step-0", 1)]
    assert store.submissions()[0]["files"] == {"job.toml": "x = 1"}
    assert store.events()[0][1] == "RunStarted"
    assert store.meta("wall_seconds") == 1.5


def test_a_watcher_reads_while_the_run_writes(store: Store) -> None:
    store.set_meta(a=1)
    watcher = Store.open(store.path, write=False)
    store.set_meta(a=2)
    assert watcher.meta("a") == 2
    with pytest.raises(StorageError, match="readonly"):
        watcher.set_meta(a=3)


def test_a_folder_of_another_version_is_refused(store: Store) -> None:
    store.close()
    with sqlite3.connect(store.path) as db:
        db.execute(f"PRAGMA user_version={VERSION + 1}")
    with pytest.raises(RunFolderError, match=f"newer version.*run format {VERSION + 1}"):
        Store.open(store.path)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_text("hello " * 1000)
    with pytest.raises(RunFolderError, match="is not a run database"):
        Store.open(tmp_path / "run.db")
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE t (x)")
    with pytest.raises(RunFolderError, match="another version"):
        Store.open(tmp_path / "other.db")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="There is no folder"):
        RunFolder(tmp_path / "nothing").require()
    with pytest.raises(RunFolderError, match=r"has no run\.db"):
        RunFolder(tmp_path).require()


def test_the_secret_is_private_and_not_in_the_database(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create({"steps": 3})
    store = Store.create(folder.database)
    store.close()
    assert stat.S_IMODE(os.stat(folder.path / "secret").st_mode) == 0o600
    assert len(folder.secret()) == 32
    assert folder.secret() not in folder.database.read_bytes() + folder.config.read_bytes()
    assert folder.read_config() == {"steps": 3}
    with pytest.raises(RunFolderError, match="already holds a run"):
        folder.create({})


def test_one_process_writes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create({})
    code = (
        "import sys; from pathlib import Path; from ai_trains_ai.store import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).writer(): pass"
    )
    with folder.writer():
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True, check=False
        )
    assert "Another process is running" in done.stderr
    assert subprocess.run([sys.executable, "-c", code, str(folder.path)], check=False).returncode == 0


def test_a_full_disk_is_a_clear_error_and_keeps_what_was_there(store: Store) -> None:
    store.set_meta(before=1)
    page_count = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={page_count}")  # SQLite then reports SQLITE_FULL, as a full disk does
    with pytest.raises(StorageError, match=r"full.*What was stored before is intact"):
        store.set_meta(big="x" * 100_000)
    assert store.meta("before") == 1


def test_a_database_of_the_first_format_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    Store.create(path).close()
    with sqlite3.connect(path) as db:  # as version 1 had it
        db.executescript(
            "DROP TABLE rentals; DROP TABLE leases; DROP TABLE placements; DROP TABLE charges;"
            " CREATE TABLE charges (id INTEGER PRIMARY KEY, time REAL NOT NULL,"
            " kind TEXT NOT NULL, subject TEXT NOT NULL, quantity REAL NOT NULL, unit TEXT NOT NULL,"
            " usd REAL NOT NULL);"
            "INSERT INTO charges (time, kind, subject, quantity, unit, usd) VALUES (1, 'busy', 'job', 2, 'seconds', 3);"
            "PRAGMA user_version=1"
        )
    store = Store.open(path)
    assert store.charges() == [(1.0, Charge("busy", "job", 2.0, "seconds", 3.0))]
    rental = Rental("m", "P", Offer("o", "cpu", 0, 1.0), "intent", 1.0, 1.0)
    store.save_rentals(rental)
    assert store.rentals("P") == [rental]
    assert store.rentals("Q") == []
    store.close()
