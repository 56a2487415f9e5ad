"""What goes wrong on a pod, through the supervisor there to the verdict here, with the stand-in engine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from fakes import engine
from fakes.pods import path_of_a_pod
from inner.prime_rl.failure_logs import CASES, Case
from inner.prime_rl.jobs import free_ports
from inner.prime_rl.standing import QUICK, job, runner, with_limit

from ai_trains_ai.inner.prime_rl import rules
from ai_trains_ai.inner.prime_rl.rules import V080
from ai_trains_ai.interfaces import RunContext
from ai_trains_ai.records import JobResult
from ai_trains_ai.testing.fakes import run_context

AGENT, INFRASTRUCTURE = "agent", "infrastructure"
EXPECTED = {
    "config-unknown-key": ("config-unknown-key", AGENT),
    "vllm-memory": ("vllm-memory", INFRASTRUCTURE),
    "vllm-never-ready": ("vllm-not-ready", INFRASTRUCTURE),
    "vllm-exits-0": ("vllm-dead", INFRASTRUCTURE),
    "environment-import": ("environment-import", AGENT),
    "environment-killed": ("host-memory", AGENT),
    "zero-signal": ("zero-signal", AGENT),
    "trainer-memory": ("trainer-memory", AGENT),
    "broadcast": ("broadcast", INFRASTRUCTURE),
    "disk-full": ("disk-full", INFRASTRUCTURE),
    "stands-still": ("environment-hang", AGENT),
    "host-memory": ("host-memory", INFRASTRUCTURE),
    "no-weights": ("no-weights", INFRASTRUCTURE),
    "not-finite": ("not-finite", AGENT),
    "untrained": ("did-not-train", AGENT),
    "launcher-hangs": ("launch-slow", INFRASTRUCTURE),
    "configs-elsewhere": ("no-configs", INFRASTRUCTURE),
    "reward-raises": ("reward-raises", AGENT),
    "gpu-lost": ("pod-lost", INFRASTRUCTURE),
    "first-step-late": ("over-time", AGENT),
    "other-shapes": ("bad-weights", INFRASTRUCTURE),
}
"""What goes wrong -> code and side of the failure."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunContext]:
    monkeypatch.setenv("PATH", path_of_a_pod(engine.install(tmp_path / "driver")))
    with run_context(tmp_path / "run") as run:
        yield run


PATIENCE = {
    "vllm-never-ready": {"inference": 2.0},
    "stands-still": {"step": 2.0},
    "launcher-hangs": {"launch": 2.0},
    "orchestrator-lingers": {"shutdown": 1.0},
}
"""Deadlines that pass; all others are longer than a slow machine needs."""


async def result_of(run: RunContext, tmp_path: Path, fault: str, steps: int = 60) -> JobResult:
    made = runner(tmp_path, fault=fault, deadlines=evolve(QUICK, **PATIENCE.get(fault, {})))
    await made.start(run)
    wanted = job(max_steps=steps)
    if fault == "first-step-late":
        wanted = with_limit(wanted, 2.0)
    try:
        return await asyncio.wait_for(made.wait(await made.submit(wanted)), 120)
    finally:
        await made.close(drain=False)


@pytest.mark.parametrize("fault", EXPECTED)
async def test_a_fault_is_named_and_blamed(run: RunContext, tmp_path: Path, fault: str) -> None:
    result = await result_of(run, tmp_path, fault)
    assert result.failure is not None, result.status
    assert (result.failure.code, result.failure.side) == EXPECTED[fault], result.failure.evidence
    assert result.status == ("failed" if result.failure.side == AGENT else "lost")


@pytest.mark.parametrize("fault", ["orchestrator-lingers", "orchestrator-fails-at-the-end"])
async def test_once_the_trainer_is_done_the_job_is(run: RunContext, tmp_path: Path, fault: str) -> None:
    result = await result_of(run, tmp_path, fault, steps=3)
    assert (result.status, result.steps) == ("succeeded", 3)


FINE = {"rollouts": 8, "errors": 0, "error": "", "truncated": 0, "rewards": [[0.0, 1.0]], "seconds": 0.1}
SAID = {
    "rewards that differ": (FINE, None),
    "equal rewards": ({**FINE, "rewards": [[0.5, 0.5], [0.0, 0.0]]}, ("zero-signal", AGENT)),
    "equal within tasks": ({**FINE, "rewards": [[1.0, 1.0], [0.0, None]]}, ("zero-signal", AGENT)),
    "half in error": ({**FINE, "errors": 4, "error": "TaskError: broken"}, ("rollout-errors", AGENT)),
    "fewer in error": ({**FINE, "errors": 3, "error": "TaskError: broken"}, None),
    "no answer": ({"unhealthy": True}, ("environment-start", AGENT)),
    "no report": ("Traceback (most recent call last):", ("pre-flight", INFRASTRUCTURE)),
}
"""What a pre-flight's client prints -> code and side of the failure, if it is one."""


async def preflown(run: RunContext, tmp_path: Path, said: object, **options: object) -> JobResult:
    text = said if isinstance(said, str) else json.dumps(said)
    made = runner(tmp_path, said=text, **options)
    await made.start(run)
    try:
        return await asyncio.wait_for(made.wait(await made.submit(job())), 120)
    finally:
        await made.close(drain=False)


@pytest.mark.parametrize("name", SAID)
async def test_a_pre_flight_ends_what_can_not_learn(run: RunContext, tmp_path: Path, name: str) -> None:
    said, expected = SAID[name]
    result = await preflown(run, tmp_path, said)
    found = (result.failure.code, result.failure.side) if result.failure else None
    assert (found, result.train_seconds > 0) == (expected, expected is None), result


async def test_on_a_gpu_that_somebody_uses_nothing_is_started(run: RunContext, tmp_path: Path) -> None:
    busy = engine.install(tmp_path / "engine") / f"gpu-0-{os.getpid()}"
    busy.touch()
    result = await preflown(run, tmp_path, FINE, deadlines=evolve(QUICK, gpu=0.5))
    assert result.failure is not None
    assert (result.status, result.failure.code) == ("lost", "vllm-memory")


async def test_agent_code_without_a_user_of_its_own_is_not_run(run: RunContext, tmp_path: Path) -> None:
    await asyncio.to_thread(tmp_path.chmod, 0o700)  # nobody else can run the engine's interpreter
    result = await preflown(run, tmp_path, FINE, own_user=True)
    assert result.failure is not None
    assert (result.status, result.failure.code) == ("lost", "no-user")


async def test_on_ports_that_somebody_uses_nothing_is_started(run: RunContext, tmp_path: Path) -> None:
    ports = free_ports()
    with socket.create_server(("127.0.0.1", ports[2])):
        result = await preflown(run, tmp_path, FINE, ports=ports)
    assert result.failure is not None
    assert (result.status, result.failure.code) == ("lost", "ports")
    assert str(ports[2]) in result.failure.evidence


async def test_a_pre_flight_without_its_model(run: RunContext, tmp_path: Path) -> None:
    result = await preflown(run, tmp_path, FINE, fault="replies-dead")
    assert result.failure is not None
    assert (result.failure.code, result.failure.side) == ("pre-flight", INFRASTRUCTURE)


# ------------------------------------------------------------------------------------------------ what is written

PROGRAMS = {"launcher": "rl", "inference": "inference", "orchestrator": "orchestrator", "trainer": "torchrun"}
WRITTEN = list({(case.code, case.process): case for case in reversed(CASES) if V080 in case.versions}.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: f"{case.code}-{case.process}")
async def test_what_a_program_writes_before_its_end_names_the_failure(
    run: RunContext, tmp_path: Path, case: Case
) -> None:
    status = case.ending.get("exits", {case.process: 1}).get(case.process)
    told = engine.Told(PROGRAMS[case.process], case.text, status)
    made = runner(tmp_path, told=told, deadlines=evolve(QUICK, step=2.0 if status is None else 60.0))
    await made.start(run)
    try:
        result = await asyncio.wait_for(made.wait(await made.submit(job(max_steps=60))), 120)
    finally:
        await made.close(drain=False)
    assert result.failure is not None, result.status
    assert result.failure.code == case.code, result.failure.evidence


@pytest.mark.slow
async def test_an_end_that_no_rule_knows_shows_its_last_lines(run: RunContext, tmp_path: Path) -> None:
    made = runner(tmp_path, told=engine.Told("torchrun", "RuntimeError: never heard of\n", 1))
    await made.start(run)
    try:
        result = await asyncio.wait_for(made.wait(await made.submit(job(max_steps=60))), 120)
    finally:
        await made.close(drain=False)
    assert result.failure is not None
    assert (result.failure.code, result.failure.side) == ("unknown", INFRASTRUCTURE)
    assert "never heard of" in result.failure.evidence


# ------------------------------------------------------------------------------------------------ coverage


def test_every_fault_of_the_stand_in_is_tried_somewhere() -> None:
    elsewhere = {"slow-steps", "orchestrator-lingers", "orchestrator-fails-at-the-end", "replies-dead"}
    assert set(engine.FAULTS) == set(EXPECTED) | elsewhere


NOT_SHOWN = {
    "vllm-arguments": "of the later version alone; its log is in the corpus",
    "evaluation-hang": "the harness leaves evaluations out of the run",
}
"""Codes that no run of the stand-in ends with, and why."""


def test_every_code_is_the_end_of_some_run() -> None:
    known = {rule.code for rule in (*rules.RULES, *rules.EXPLANATIONS, *rules.FOUND.values())}
    known |= {value.code for value in vars(rules).values() if isinstance(value, rules.Rule)}
    shown = {code for code, _ in EXPECTED.values()} | {case.code for case in WRITTEN}
    shown |= {expected[0] for _, expected in SAID.values() if expected}
    shown |= {"ports", "no-user", "unknown"}  # tests of their own, above
    assert known - shown == set(NOT_SHOWN)
