"""The supervisor with prime-rl's own launcher and env server, where a checkout with its environment is at hand.

As in ``test_dry_run``, ``AI_TRAINS_AI_PRIME_RL`` names the checkout, with ``.venv/bin/{rl,env-server,python}``. A job
goes as far as it can without a GPU: the launcher's checks, and the rollouts of the pre-flight through the real env
server behind its wall.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from inner.prime_rl.jobs import A40, SMALL, config, free_ports, job

from ai_trains_ai.families.practice import practice
from ai_trains_ai.inner.prime_rl.profiles import DEFAULT, profile
from ai_trains_ai.inner.prime_rl.shipment import Engine, shipment
from ai_trains_ai.testing.fakes import environment

CHECKOUT = os.environ.get("AI_TRAINS_AI_PRIME_RL", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="AI_TRAINS_AI_PRIME_RL names no checkout of prime-rl"),
]


def programs(folder: Path) -> Path:
    """The checkout's programs; a GPU that nobody uses, and an inference server that can't start."""
    folder.mkdir()
    for name in ("rl", "env-server", "python"):
        (folder / name).symlink_to(f"{CHECKOUT}/.venv/bin/{name}")
    for name, script in (("nvidia-smi", "echo 0, 4"), ("inference", "echo no GPU here; exit 1")):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def supervised(tmp_path: Path, source: str) -> tuple[dict[str, Any], str]:
    """The verdict on a submission, and the env server's log."""
    chosen = profile(os.environ.get("AI_TRAINS_AI_PRIME_RL_VERSION", DEFAULT))
    engine = Engine(
        chosen, str(programs(tmp_path / "bin")), str(tmp_path / "models"), own_user=False, poll=0.2, ports=free_ports()
    )
    rows = tuple(json.dumps(row) for row in practice("chained-arithmetic", 2, 3, 32))
    submitted = evolve(job(config()), files={"environment.py": source.encode()}, rows=rows)
    folder = tmp_path / "files"
    for path, data in shipment(submitted, engine, A40, SMALL, str(folder)).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = ["sh", "-c", engine.command("supervisor", "order.json")]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    verdict: dict[str, Any] = json.loads((folder / "out/verdict.json").read_text())
    return verdict, (folder / "out/logs/env.log").read_text()


def test_a_good_environment_comes_as_far_as_the_gpu(tmp_path: Path) -> None:
    verdict, log = supervised(tmp_path, environment())
    assert (verdict["phase"], verdict["exits"]) == ("inference", {"inference": 1}), (verdict, log[-2000:])
    assert (verdict["preflight"]["rollouts"], verdict["preflight"]["errors"]) == (8, 0)
    assert verdict["guarantee"].startswith("env server: ")


def test_an_environment_that_can_not_be_imported_ends_before_it(tmp_path: Path) -> None:
    verdict, log = supervised(tmp_path, environment() + "\nimport no_such_module\n")
    assert (verdict["phase"], list(verdict["exits"])) == ("environment", ["env"])
    assert "No module named 'no_such_module' (environment.py:" in log


def test_a_reward_that_raises_ends_before_it(tmp_path: Path) -> None:
    source = environment().replace("return float(", "raise ValueError('broken') or float(")
    verdict, _ = supervised(tmp_path, source)
    assert (verdict["phase"], verdict["found"]) == ("environment", "rollout-errors")
    assert "broken" in verdict["detail"]
