"""Programs of the engine: started apart, and ended with all that they started."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ai_trains_ai.inner.prime_rl.pod.process import Process, alive, tree


def shell(tmp_path: Path, script: str) -> Process:
    return Process(["sh", "-c", script], {"PATH": os.environ["PATH"]}, tmp_path, tmp_path / "logs/log")


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline, f"{path.name} never comes"
        time.sleep(0.01)
    return path.read_text()


def test_its_output_is_in_a_file_and_its_exit_status_is_known(tmp_path: Path) -> None:
    process = shell(tmp_path, "echo out; echo err >&2; exit 3")
    assert process.wait(20) == 3
    assert (tmp_path / "logs/log").read_text() == "out\nerr\n"


def test_a_signal_is_a_negative_status(tmp_path: Path) -> None:
    assert shell(tmp_path, "kill -9 $$").wait(20) == -9


def test_it_is_asked_before_it_is_killed(tmp_path: Path) -> None:
    process = shell(tmp_path, "trap 'echo asked; exit 0' TERM; echo ready >ready; while :; do sleep 0.05; done")
    wait_for(tmp_path / "ready")
    process.kill(grace=10.0)
    assert (tmp_path / "logs/log").read_text().splitlines()[-1] == "asked"


def test_all_that_it_started_ends_with_it(tmp_path: Path) -> None:
    process = shell(tmp_path, "sleep 600 & echo $! >one; setsid sleep 600 & sleep 0.1; echo yes >two; wait")
    wait_for(tmp_path / "two")
    family = tree(process.pid)
    assert len(family) == 3
    process.kill()
    assert [pid for pid in family if alive(pid)] == []


@pytest.mark.parametrize("grace", [0.0, 0.2])
def test_one_that_does_not_listen_is_killed(tmp_path: Path, grace: float) -> None:
    process = shell(tmp_path, "trap '' TERM; echo ready >ready; while :; do sleep 0.05; done")
    wait_for(tmp_path / "ready")
    process.kill(grace)
    assert process.poll() == -9


def test_one_that_has_ended_can_be_killed(tmp_path: Path) -> None:
    process = shell(tmp_path, "true")
    process.wait(20)
    process.kill(grace=1.0)
    assert process.poll() == 0
