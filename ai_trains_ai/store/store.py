"""All reads and writes of ``run.db``. Each method is one transaction."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import evolve

from ai_trains_ai.convert import from_json, to_data, to_json
from ai_trains_ai.errors import RunFolderError, StorageError
from ai_trains_ai.events import Event
from ai_trains_ai.records import (
    Baseline,
    Charge,
    Checkpoint,
    Episode,
    Evaluation,
    JobHandle,
    JobResult,
    Lease,
    Placement,
    Rental,
    Submission,
    TrainingJob,
    TrainStep,
    ValidationReport,
)
from ai_trains_ai.store.schema import MIGRATIONS, SCHEMA, VERSION

logger = logging.getLogger(__name__)

EvaluationKind = Literal["baseline", "job"]
_SAVE_EPISODE = "INSERT OR REPLACE INTO episodes VALUES (?,?,?,?,?,?,?,?,?)"


class Store:
    """One connection to a run's database. Use it from one thread."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path

    @classmethod
    def create(cls, path: Path) -> Store:
        """A new database with the current schema."""
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        try:
            with contextlib.closing(sqlite3.connect(partial)) as db:
                db.executescript(f"BEGIN;{SCHEMA}PRAGMA user_version={VERSION};COMMIT;")
            os.replace(partial, path)  # a run folder has a whole database or none
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"Can't create {path}: {error}. Free space or choose another folder.") from error
        store = cls(_connect(path), path)
        store.set_meta(run_id=uuid.uuid4().hex[:12])
        return store

    @classmethod
    def open(cls, path: Path, *, write: bool = True) -> Store:
        """An existing database; migrates an older one when ``write``. Raises `RunFolderError` for other versions."""
        if not path.is_file():
            raise RunFolderError(f"There is no run database at {path}.")
        db = _connect(path, write=write)
        try:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            known = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type='table'")}
        except sqlite3.OperationalError as error:
            db.close()
            raise StorageError(f"Can't read {path}: {error}.") from error
        except sqlite3.DatabaseError as error:
            db.close()
            raise RunFolderError(f"{path} is not a run database: {error}.") from error
        while write and found in MIGRATIONS:
            db.executescript(f"BEGIN;{MIGRATIONS[found]};PRAGMA user_version={found + 1};COMMIT;")
            found += 1
        if found != VERSION or "episodes" not in known:
            db.close()
            newer = "a newer" if found > VERSION else "another"
            raise RunFolderError(
                f"{path} was written by {newer} version of ai-trains-ai "
                f"(run format {found}, this one reads {VERSION}). "
                "Open it with that version."
            )
        return cls(db, path)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._db:
                yield self._db
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"Can't write {self.path}: {error}. What was stored before is intact; free space and resume the run."
            ) from error

    # ------------------------------------------------------------------------------------------ meta

    def set_meta(self, **values: Any) -> None:
        with self._transaction() as db:
            rows = [(k, json.dumps(v)) for k, v in values.items()]
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def meta(self, key: str, default: Any = None) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return default if row is None else json.loads(row[0])

    # ------------------------------------------------------------------------------------------ groups and episodes

    def save_group(self, group_id: str, phase: str, step: int, position: int, task_id: str) -> None:
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO groups VALUES (?,?,?,?,?)", (group_id, phase, step, position, task_id))

    def save_episode(self, episode: Episode, stage: Literal["submitted", "finished"]) -> None:
        """Keep an episode the moment it has something to lose: a job in flight, or its end."""
        with self._transaction() as db:
            db.execute(_SAVE_EPISODE, _episode_row(episode, stage))

    def episodes(self, phase: str | None = None, step: int | None = None, stage: str = "finished") -> list[Episode]:
        """Episodes of a stage in step, group and position order."""
        query = (
            "SELECT e.record FROM episodes e JOIN groups g ON g.id = e.group_id WHERE e.stage = ?"
            " AND (? IS NULL OR g.phase = ?) AND (? IS NULL OR g.step = ?)"
            " ORDER BY g.step, g.position, e.position"
        )
        rows = self._db.execute(query, (stage, phase, phase, step, step))
        return [from_json(row[0], Episode) for row in rows]

    def probe(self, phase: str) -> list[Episode]:
        """Episodes of the newest probe of a phase: a resumed run may have several."""
        step = self._db.execute("SELECT MAX(step) FROM groups WHERE phase=?", (phase,)).fetchone()[0]
        return [] if step is None else self.episodes(phase=phase, step=step)

    def forget_submissions(self, episode_id: str) -> None:
        """Drop what an episode handed in before it was cut off and played anew."""
        with self._transaction() as db:
            db.execute("DELETE FROM submissions WHERE episode_id=?", (episode_id,))

    def save_submission(self, submission: Submission, report: ValidationReport) -> None:
        files = json.dumps({path: data.decode("utf-8", "backslashreplace") for path, data in submission.files.items()})
        row = (submission.episode_id, submission.attempt, report.valid, submission.content_hash, files)
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO submissions VALUES (?,?,?,?,?,?)", (*row, to_json(evolve(report, rows=())))
            )

    def submissions(self) -> list[dict[str, Any]]:
        """Every submission: episode, attempt, valid, content hash, files as text, report."""
        rows = self._db.execute("SELECT * FROM submissions ORDER BY rowid")
        names = ("episode_id", "attempt", "valid", "content_hash", "files", "report")
        out = [dict(zip(names, row, strict=True)) for row in rows]
        for row in out:
            row["valid"] = bool(row["valid"])
            row["files"], row["report"] = json.loads(row["files"]), from_json(row["report"], ValidationReport)
        return out

    # ------------------------------------------------------------------------------------------ jobs and evaluations

    def save_intent(self, episode: Episode, job: TrainingJob, handle: JobHandle) -> None:
        """The intent to run ``job``, stored with its episode before the runner is called."""
        blob = zlib.compress(to_json(job).encode())
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO jobs VALUES (?,?,?,?,?,NULL)",
                (job.id, job.episode_id, "submitted", to_json(handle), blob),
            )
            db.execute(_SAVE_EPISODE, _episode_row(episode, "submitted"))

    def save_handle(self, handle: JobHandle) -> None:
        with self._transaction() as db:
            db.execute("UPDATE jobs SET handle=? WHERE id=?", (to_json(handle), handle.job_id))

    def save_result(self, result: JobResult) -> None:
        with self._transaction() as db:
            db.execute("UPDATE jobs SET status=?, result=? WHERE id=?", (result.status, to_json(result), result.job_id))

    def job(self, job_id: str) -> tuple[TrainingJob, JobHandle, JobResult | None]:
        row = self._db.execute("SELECT job, handle, result FROM jobs WHERE id=?", (job_id,)).fetchone()
        if row is None:
            raise RunFolderError(f"{self.path} has no job {job_id!r}.")
        job = from_json(zlib.decompress(row[0]).decode(), TrainingJob)
        return job, from_json(row[1], JobHandle), None if row[2] is None else from_json(row[2], JobResult)

    def results(self) -> list[JobResult]:
        rows = self._db.execute("SELECT result FROM jobs WHERE result IS NOT NULL ORDER BY rowid")
        return [from_json(row[0], JobResult) for row in rows]

    def save_evaluation(self, kind: EvaluationKind, evaluation: Evaluation, job_id: str = "") -> None:
        row = (kind, evaluation.task_id, evaluation.model, job_id, evaluation.n, evaluation.mean, evaluation.stderr)
        with self._transaction() as db:
            db.execute(
                "INSERT INTO evaluations (kind, task_id, model, job_id, n, mean, stderr, record)"
                " VALUES (?,?,?,?,?,?,?,?)",
                (*row, to_json(evaluation)),
            )

    def evaluation_of(self, job_id: str) -> Evaluation | None:
        """The hidden evaluation of a job's weights, if it was made."""
        query = "SELECT record FROM evaluations WHERE kind='job' AND job_id=? ORDER BY id DESC LIMIT 1"
        row = self._db.execute(query, (job_id,)).fetchone()
        return None if row is None else from_json(row[0], Evaluation)

    def evaluations(self, kind: EvaluationKind) -> list[tuple[str, Evaluation]]:
        """Job id and evaluation, in the order in which they were made."""
        rows = self._db.execute("SELECT job_id, record FROM evaluations WHERE kind=? ORDER BY id", (kind,))
        return [(row[0], from_json(row[1], Evaluation)) for row in rows]

    def baselines(self) -> list[Baseline]:
        return [Baseline(evaluation.model, evaluation) for _, evaluation in self.evaluations("baseline")]

    # ------------------------------------------------------------------------------------------ steps, money, events

    def save_step(
        self, step: int, train: TrainStep, checkpoint: Checkpoint, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """A finished step and its checkpoint, together: a resume sees both or neither."""
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO steps VALUES (?,?,?,?)",
                (step, train.version, seconds, json.dumps(dict(metrics))),
            )
            db.execute(
                "INSERT OR REPLACE INTO checkpoints VALUES (?,?,?)",
                (checkpoint.name, checkpoint.version, checkpoint.path),
            )

    def steps(self) -> list[dict[str, float]]:
        """One mapping a step: ``step``, ``version``, ``seconds`` and the slash-named metrics."""
        rows = self._db.execute("SELECT step, version, seconds, metrics FROM steps ORDER BY step")
        return [{"step": r[0], "version": r[1], "seconds": r[2], **json.loads(r[3])} for r in rows]

    def checkpoints(self) -> list[Checkpoint]:
        """Oldest first."""
        rows = self._db.execute("SELECT name, path, version FROM checkpoints ORDER BY version")
        return [Checkpoint(*row) for row in rows]

    def save_charges(
        self, charges: Sequence[tuple[float, Charge]], *, rental: Rental | None = None, ended_lease: str = ""
    ) -> None:
        """Book charges, and in the same transaction what they settle: a pod's new state, or a lease's end."""
        rows = [(t, c.kind, c.subject, c.quantity, c.unit, c.usd, c.pod) for t, c in charges]
        with self._transaction() as db:
            if rental is not None:
                db.execute(_SAVE_RENTAL, _rental_row(rental))
                if rental.state == "ended":
                    db.execute("DELETE FROM leases WHERE pod = ?", (rental.marker,))
            db.execute("DELETE FROM leases WHERE id = ?", (ended_lease,))
            db.executemany(
                "INSERT INTO charges (time, kind, subject, quantity, unit, usd, pod) VALUES (?,?,?,?,?,?,?)", rows
            )

    def charges(self) -> list[tuple[float, Charge]]:
        rows = self._db.execute("SELECT time, kind, subject, quantity, unit, usd, pod FROM charges ORDER BY id")
        return [(row[0], Charge(*row[1:])) for row in rows]

    def charged_to_pod(self, marker: str) -> float:
        """US dollars booked on a pod so far."""
        row = self._db.execute("SELECT COALESCE(SUM(usd), 0) FROM charges WHERE pod=?", (marker,)).fetchone()
        return float(row[0])

    def save_rentals(self, *rentals: Rental) -> None:
        """Keep what is known of pods: the intent before one is created, too."""
        with self._transaction() as db:
            db.executemany(_SAVE_RENTAL, map(_rental_row, rentals))

    def rentals(self, provider: str | None = None) -> list[Rental]:
        """Every pod that the run ever rented (of one provider), in order."""
        query = "SELECT record FROM rentals WHERE ? IS NULL OR provider = ? ORDER BY rowid"
        return [from_json(row[0], Rental) for row in self._db.execute(query, (provider, provider))]

    def save_lease(self, lease: Lease) -> None:
        """Keep a lease that a restarted controller takes up again. `save_charges` ends it."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO leases VALUES (?,?,?)", (lease.id, lease.pod.marker, to_json(lease)))

    def leases(self) -> list[Lease]:
        """Those that were kept and have not ended."""
        return [from_json(row[0], Lease) for row in self._db.execute("SELECT record FROM leases ORDER BY rowid")]

    def place(self, placement: Placement) -> None:
        """Keep where a job's next attempt runs. A job that has ended, or has a later one, stays as it is."""
        row = (placement.job_id, placement.attempt, placement.state, to_json(placement))
        with self._transaction() as db:
            db.execute(
                "INSERT INTO placements VALUES (?,?,?,?) ON CONFLICT (job_id) DO UPDATE SET "
                "attempt = excluded.attempt, record = excluded.record "
                "WHERE state = 'running' AND excluded.attempt >= attempt",
                row,
            )

    def end_placement(self, placement: Placement) -> bool:
        """Keep how an attempt ended. False: another attempt is the valid one, or the job had ended; nothing changed."""
        row = (placement.state, to_json(placement), placement.job_id, placement.attempt)
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE placements SET state = ?, record = ? WHERE job_id = ? AND attempt = ? AND state = 'running'",
                row,
            )
            return changed.rowcount == 1

    def placements(self) -> list[Placement]:
        """Every job that ever was on a rented machine, in order of its first attempt."""
        rows = self._db.execute("SELECT record FROM placements ORDER BY rowid")
        return [from_json(row[0], Placement) for row in rows]

    def placement(self, job_id: str) -> Placement | None:
        row = self._db.execute("SELECT record FROM placements WHERE job_id = ?", (job_id,)).fetchone()
        return None if row is None else from_json(row[0], Placement)

    def next_epoch(self, at_least: int) -> int:
        """A number higher than every earlier one of this run; of copies of the run, too, if it begins with a time."""
        with self._transaction() as db:
            row = db.execute("SELECT value FROM meta WHERE key = 'fleet_epoch'").fetchone()
            epoch = max(at_least, json.loads(row[0]) + 1 if row else 0)
            db.execute("INSERT OR REPLACE INTO meta VALUES ('fleet_epoch', ?)", (json.dumps(epoch),))
            return epoch

    def save_event(self, event: Event) -> None:
        row = (event.time, type(event).__name__, json.dumps(to_data(event)))
        with self._transaction() as db:
            db.execute("INSERT INTO events (time, type, data) VALUES (?,?,?)", row)

    def events(self) -> list[tuple[float, str, dict[str, Any]]]:
        rows = self._db.execute("SELECT time, type, data FROM events ORDER BY id")
        return [(row[0], row[1], json.loads(row[2])) for row in rows]


_SAVE_RENTAL = (
    "INSERT INTO rentals VALUES (?,?,?,?) ON CONFLICT (marker) DO UPDATE SET state = excluded.state, "
    "record = excluded.record"
)


def _rental_row(rental: Rental) -> tuple[str, str, str, str]:
    return rental.marker, rental.provider, rental.state, to_json(rental)


def _episode_row(episode: Episode, stage: str) -> tuple[Any, ...]:
    bare = evolve(episode, reports=tuple(evolve(report, rows=()) for report in episode.reports))
    total = None if episode.reward is None else episode.reward.total
    head = (episode.id, episode.group_id, episode.index, episode.task_id, stage)
    return (*head, total, episode.valid_attempt, episode.base_model, to_json(bare))


def _connect(path: Path, write: bool = True) -> sqlite3.Connection:
    try:
        if write:
            db = sqlite3.connect(path, timeout=10)
            mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            if mode != "wal":
                logger.warning(
                    "%s can't use a write-ahead log here (%s journal): watching it will be slower.", path, mode
                )
            # every commit survives a power loss: it may be a money record
            db.execute("PRAGMA synchronous=FULL")
        else:
            db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
    except sqlite3.OperationalError as error:
        raise StorageError(f"Can't open {path}: {error}.") from error
    except sqlite3.DatabaseError as error:
        raise RunFolderError(f"{path} is not a run database: {error}.") from error
    return db
