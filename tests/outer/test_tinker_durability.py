"""Whole runs on the local Tinker that are killed, interrupted, or met by faults: nothing finished is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.tinker import MODEL, Fault, TinkerServer, tinker_server

import ai_trains_ai as ata
from ai_trains_ai.records import Episode

SHORT = {"open": 30.0, "sample": 10.0, "train": 5.0, "save": 5.0, "close": 2.0}
SETTINGS: dict[str, Any] = {
    "groups_per_step": 1,
    "group_size": 4,
    "eval_items": 32,
    "probe_episodes": 0,
    "seed": 5,
    "stall_seconds": 20.0,
}
STEPS = 4
SCRIPT = """
import sys
import ai_trains_ai as ata
from ai_trains_ai.errors import RunInterrupted
url, out, model = sys.argv[1:]
outer = ata.outer_trainer("tinker", model=model, renderer="embedded", base_url=url, lr=2e-3)
experiment = ata.Experiment.embedded(outer=outer, **{settings!r})
try:
    experiment.run_sync({steps}, out=out)
except RunInterrupted as error:
    sys.exit(f"interrupted: {{error}}")
"""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("key")]


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local-key")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def begin(server: TinkerServer, out: Path) -> subprocess.Popen[str]:
    """The run in a process of its own; resumed where its folder is there."""
    code = SCRIPT.format(settings=SETTINGS, steps=STEPS)
    if out.exists():
        code = f"import ai_trains_ai as ata\nata.resume({str(out)!r}).run_sync()"
    command = [sys.executable, "-X", "faulthandler", "-c", code, server.url, str(out), MODEL]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))


def until(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() > end:
            process.send_signal(signal.SIGABRT)  # with where each thread stands; the run itself says what it waits for
            raise AssertionError(f"{what} does not come to pass:\n{process.communicate()[0]}")
        time.sleep(0.02)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def finished(out: Path) -> dict[str, Episode]:
    return {episode.id: episode for episode in ata.open_run(out).episodes if episode.status == "finished"}


def stage(out: Path, name: str) -> Callable[[], bool]:
    def there() -> bool:
        return (out / "run.db").exists() and bool(ata.open_run(out)._read("episodes", stage=name))

    return there


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """In turn: while it samples, while jobs run, at the update, and at each of the two saves."""
    out = tmp_path / "run"
    kept: dict[str, Episode] = {}
    moments = ("asample", "", "optim_step", "save_weights", "save_weights_for_sampler")
    with tinker_server(tmp_path / "tinker") as server:
        for moment in moments:
            # the first saves of a new run are those of the version to begin with
            fault = Fault(moment, hang=True) if moment else None
            server.faults[:] = [fault] if fault else []
            process = begin(server, out)
            try:
                until((lambda fault=fault: fault.times == 0) if fault else stage(out, "submitted"), process)
            finally:
                end(process)
            now = finished(out)
            assert kept.items() <= now.items(), f"killed at {moment or 'jobs'}, a finished episode changed"
            kept = now
        assert len(kept) >= 4
        server.faults.clear()
        process = begin(server, out)
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
    run = ata.open_run(out)
    assert [step["version"] for step in run.steps] == [1, 2, 3, 4]
    assert kept.items() <= finished(out).items()
    assert len(run.episodes) == STEPS * SETTINGS["group_size"]
    assert len({result.job_id for result in run.jobs}) == len(run.jobs)
    assert [step["outer/retries"] for step in run.steps if "outer/retries" in step].count(0.0) >= 1


def test_ctrl_c_drains_and_closes_its_sessions(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with tinker_server(tmp_path / "tinker") as server:
        process = begin(server, out)
        try:
            until(stage(out, "finished"), process)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=90)
        finally:
            end(process)
        assert "interrupted: Stopped after" in said
        assert not server.live
        assert not ata.open_run(out)._read("episodes", stage="submitted")


def test_no_fault_loses_an_episode(tmp_path: Path) -> None:
    """A run through faults of every kind, each of which some part of it meets."""
    faults = [
        Fault("forward_backward", status=400),
        Fault("optim_step", hang=True, skip=3),
        Fault("save_weights_for_sampler", error="server", skip=2),
        Fault("asample", drop="after", skip=3),
        Fault("asample", status=429, skip=5, times=2),
        Fault("retrieve_future", status=503, skip=10),
        Fault("session_heartbeat", status=410),
    ]
    outer = {"model": MODEL, "renderer": "embedded", "lr": 2e-3, "deadlines": SHORT}
    with tinker_server(tmp_path / "tinker") as server:
        server.faults[:] = faults
        made = ata.outer_trainer("tinker", base_url=server.url, **outer)
        run = ata.Experiment.embedded(outer=made, **SETTINGS).run_sync(STEPS, out=tmp_path / "run")
        assert [fault.path for fault in faults if fault.times and "heartbeat" not in fault.path] == []
        assert not server.live
    assert len(run.episodes) == STEPS * SETTINGS["group_size"]
    assert all(episode.status == "finished" for episode in run.episodes)
    assert [step["version"] for step in run.steps] == [1, 2, 3, 4]
    assert sum(step.get("outer/retries", 0.0) for step in run.steps) >= 2
