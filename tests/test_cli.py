"""The command line, as a user types it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ai_trains_ai as ata
from ai_trains_ai.report.progress import Progress, sparkline
from ai_trains_ai.store.schema import VERSION

DEMO = ("demo", "--steps", "2", "--seed", "3")


def cli(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ai_trains_ai.cli", *arguments], capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("verb", ["", "demo", "resume", "check", "train", "evaluate", "export"])
def test_help(verb: str) -> None:
    done = cli(*filter(None, [verb, "--help"]))
    assert done.returncode == 0
    assert "Example:" in done.stdout or not verb


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("demo", "--steps", "0"), 2, "for '--steps'"),
        (("demo", "--workers", "0"), 2, "for '--workers'"),
        (("resume", "no/such/run"), 1, "error: There is no folder no/such/run"),
        (("resume", "."), 1, "is not a run folder"),
        (("check", "no/such/folder"), 1, "is no folder"),
        (("train", ".", "--task", "triag"), 1, "Did you mean 'triage'"),
        (("fly",), 2, "No such command"),
        (("evaluate", "--model", "m", "--episodes", "0"), 2, "for '--episodes'"),
        (("evaluate", "--model", "m", "--family", "triag"), 1, "Did you mean 'triage'"),
        (("evaluate", "--model", "m", "--base-url", "nowhere"), 1, "base_url"),
        (("evaluate", "--model", "m", "--prices", "prefil=1"), 1, "prefil"),
        (("evaluate", "--model", "m", "--base-url", "http://x/v1", "--usd", "1"), 1, "prices"),
        (("evaluate", "--model", "m", "--inner", "embeded"), 1, "Did you mean 'embedded'"),
        (("export", "no/such/run", "folder"), 1, "There is no folder no/such/run"),
        (("export", ".", "folder"), 1, "is not a run folder"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = cli(*arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_folder_of_another_version(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "run.db") as db:
        db.execute(f"PRAGMA user_version={VERSION + 7}")
    done = cli("resume", str(tmp_path))
    assert done.returncode == 1
    assert f"run format {VERSION + 7}" in done.stderr


def test_a_misspelt_family_in_a_script() -> None:
    code = "import ai_trains_ai as ata; ata.Experiment.embedded(families=['multihop'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "There is no task family named 'multihop'. Did you mean 'multi-hop'?" in done.stderr


def test_the_version_of_verifiers_is_checked_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n_v = m.version\n"
        "m.version = lambda name: '0.2.0' if name == 'verifiers' else _v(name)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = cli("demo", "--steps", "1", "--out", str(tmp_path / "run"), env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1
    assert "0.2.0" in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_and_train_one_job(job_folder: Path) -> None:
    done = cli("train", str(job_folder))
    assert done.returncode == 0, done.stderr
    assert "untrained pico-m" in done.stdout
    assert "reward 0." in done.stdout
    (job_folder / "environment.py").write_text("import verifiers.v1 as vf\n")
    done = cli("check", str(job_folder))
    assert done.returncode == 1
    assert "[no-all]" in done.stdout


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 0.99, 1.0]) == "▁▅██"


def test_progress_is_plain_lines_outside_a_terminal(tmp_path: Path) -> None:
    import io

    stream = io.StringIO()
    with Progress(3, stream) as progress:
        progress(ata_event())
    assert stream.getvalue() == "run x: jail\n"


def ata_event():  # type: ignore[no-untyped-def]
    from ai_trains_ai.events import RunStarted

    return RunStarted("x", "jail")


@pytest.mark.slow
def test_demo_in_json_killed_and_resumed(tmp_path: Path) -> None:
    """The main job in small: killed with SIGKILL half-way, resumed, and read by a program."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "ai_trains_ai.cli", *DEMO, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("step "):
                break
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = {e.id: e for e in ata.open_run(out).episodes}
    assert len(before) >= 24
    done = cli("resume", str(out), "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert [step["step"] for step in summary["steps"]] == [0, 1]
    assert set(summary["steps"][0]) >= {"reward", "validation", "job_quality", "post", "uplift", "base_models", "jobs"}
    assert set(summary["totals"]) >= {"jobs", "wall_seconds", "held_out_before", "held_out_after"}
    assert all(Path(path).stat().st_size > 5_000 for path in summary["figures"])
    run = ata.open_run(out)
    after = {e.id: e for e in run.episodes}
    assert all(after[name] == episode for name, episode in before.items())
    assert len({job.job_id for job in run.jobs}) == len(run.jobs)


@pytest.mark.slow
def test_ctrl_c_drains_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "ai_trains_ai.cli", "demo", "--steps", "30", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    rest = process.stderr.read()
    assert process.wait(60) == 130
    assert time.monotonic() - begin < 60
    assert f"Go on with: ai-trains-ai resume {out}" in rest
    run = ata.open_run(out)
    assert not run._read("episodes", stage="submitted")
    assert 1 <= len(run.steps) < 30


def test_ctrl_c_before_the_run_began(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ai_trains_ai.cli", "demo", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server = f"/proc/{process.pid}/task/{process.pid}/children"
    try:
        while not Path(server).read_text():
            time.sleep(0.02)  # its sandbox starts
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert said == "Stopped before the run began.\n"
    assert process.returncode == 130
    assert not (tmp_path / "run").exists()
