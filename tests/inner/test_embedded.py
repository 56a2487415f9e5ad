"""Real jobs in the real sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import environment

import ai_trains_ai as ata
from ai_trains_ai.convert import from_json, to_json
from ai_trains_ai.errors import ConfigurationError, JobError, UntrustedDataError
from ai_trains_ai.families.practice import practice
from ai_trains_ai.inner.embedded import EmbeddedJobRunner, check_weights
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.plugins import Hooks
from ai_trains_ai.records import (
    BaseModel,
    Budget,
    JobHandle,
    JobResult,
    SamplingParams,
    SandboxResult,
    TaskLimits,
    TrainingJob,
)
from ai_trains_ai.session import open_context
from ai_trains_ai.store import RunFolder, Store

ROWS = tuple(json.dumps(row) for row in practice("chained-arithmetic", 2, 3, 64))
SURFACE = EmbeddedJobRunner().config_surface()
SMALL = {"max_steps": 3, "batch_size": 16, "optim.lr": 1e-3}


def job(job_id: str = "j", source: str | None = None, limits: TaskLimits | None = None, **config: Any) -> TrainingJob:
    settings = {**SURFACE.defaults(), **SMALL, **{k.replace("__", "."): v for k, v in config.items()}}
    files = {"environment.py": (source or environment()).encode(), "job.toml": b""}
    return TrainingJob(job_id, "e", "t", "pico-m", files, settings, {}, ROWS, 7, limits or TaskLimits(), "h")


async def test_a_fleet_of_a_spec(tmp_path: Path, sandbox: Sandbox) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create({})
    context = open_context(folder, Store.create(folder.database), sandbox, Budget(), 0, Hooks())
    with pytest.raises(ConfigurationError, match=r"run.fleet\(\) takes a GPUProvider, not .*local"):
        context.fleet(ata.gpu_provider("local"))  # type: ignore[arg-type]


@pytest.fixture
async def runner(tmp_path: Path, sandbox: Sandbox) -> AsyncIterator[EmbeddedJobRunner]:
    folder = RunFolder(tmp_path / "run")
    folder.create({})
    store = Store.create(folder.database)
    made = EmbeddedJobRunner(slots=2)
    await made.start(open_context(folder, store, sandbox, Budget(), 0, Hooks()))
    yield made
    await made.close(drain=False)


async def finished(runner: EmbeddedJobRunner, order: TrainingJob) -> JobResult:
    return await runner.wait(await runner.submit(order))


async def weights(sandbox: Sandbox, config: Mapping[str, Any]) -> bytes:
    order = {"base_model": "pico-m", "config": config, "environment": {}, "rows": list(ROWS), "seed": 7}
    result = await sandbox.run(
        "ai_trains_ai.inner.embedded_job:train",
        json.dumps(order).encode(),
        files={"environment.py": environment().encode()},
    )
    assert (result.outcome, result.code) == ("exited", 0), result.output.decode()
    return dict(result.frames)["weights"]


OTHER = {
    "max_steps": 12,
    "batch_size": 24,
    "group_size": 4,
    "optim.type": "muon",
    "optim.lr": 2e-3,
    "optim.weight_decay": 0.5,
    "optim.max_norm": 0.01,
    "scheduler.type": "cosine",
    "scheduler.warmup_steps": 2,
    "sampling.temperature": 0.7,
    "sampling.max_completion_tokens": 6,
    "loss.ratio_clip": 0.01,
    "updates_per_batch": 2,
    "advantage.normalize_std": False,
}


async def test_every_exposed_key_changes_the_run(sandbox: Sandbox) -> None:
    assert set(OTHER) == {key.path for key in SURFACE.keys}
    # several updates a batch, so that ratios leave 1 and the clip has something to do
    default = {**SURFACE.defaults(), "max_steps": 8, "batch_size": 32, "updates_per_batch": 3, "optim.lr": 3e-3}
    base = await weights(sandbox, default)
    assert await weights(sandbox, default) == base, "the same job twice must give the same weights"
    for path, value in OTHER.items():
        assert default[path] != value
        assert await weights(sandbox, {**default, path: value}) != base, f"{path} = {value} changes nothing"


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon", "sign_sgd"])
async def test_every_optimizer_trains(sandbox: Sandbox, kind: str) -> None:
    untrained = await weights(sandbox, {**SURFACE.defaults(), **SMALL, "optim.lr": 0.0, "optim.type": kind})
    assert await weights(sandbox, {**SURFACE.defaults(), **SMALL, "optim.type": kind}) != untrained


async def test_a_job_from_submit_to_release(runner: EmbeddedJobRunner) -> None:
    steps: list[int] = []
    order = job()
    handle = await runner.submit(order)
    assert await runner.submit(order) == handle  # idempotent
    result = await runner.wait(handle, lambda step, metrics: steps.append(step))
    assert (result.status, result.steps, steps) == ("succeeded", 3, [0, 1, 2])
    assert 0 < result.train_seconds <= result.wall_seconds * 1.5
    assert [m["step"] for m in result.metrics] == [0, 1, 2]
    assert "bubblewrap" in result.guarantees
    prompts = ["start 1 add 2 ->", "start 3 times 2 ->"] * 4
    params = SamplingParams(max_tokens=8, seed=3)
    async with runner.serve(handle) as trained, runner.serve(BaseModel("pico-m", 0)) as base:
        replies = await trained.sample(prompts, params)
        assert replies == await trained.sample(prompts, params)
        assert replies != await base.sample(prompts, params)
    await runner.release(handle, keep_weights=True)
    assert (runner._run.folder / "artifacts/j/model.safetensors").stat().st_size > 100_000
    with pytest.raises(JobError, match="no job 'j'"):
        await runner.wait(handle)
    await runner.release(handle)  # idempotent
    assert await runner.attach(handle) is None


def fault(code: str) -> str:
    """An environment whose reward does something else on its hundredth call: the validator never sees it."""
    body = f"        Row.calls = getattr(Row, 'calls', 0) + 1\n        if Row.calls > 20:\n            {code}\n"
    return environment().replace("        return float", body + "        return float")


@pytest.mark.parametrize(
    ("code", "expected", "message"),
    [
        ("raise ValueError('my bug')", "job-crashed", "my bug"),
        ("return float('nan')", "job-crashed", "finite"),
        ("import os; os._exit(0)", "no-weights", "0 sets of weights"),
        ("import ctypes; ctypes.string_at(0)", "job-crashed", "signalled"),
        ("x = bytearray(4 << 30); x[::4096] = b'x' * len(x[::4096])", None, ""),
    ],
    ids=["raises", "nan", "exits", "segfault", "memory"],
)
async def test_a_fault_in_agent_code_is_a_failed_job_of_the_agent(
    runner: EmbeddedJobRunner, code: str, expected: str | None, message: str
) -> None:
    result = await finished(runner, job(source=fault(code)))
    assert result.status == "failed"
    assert result.failure is not None
    assert result.failure.side == "agent"
    assert expected is None or result.failure.code == expected
    assert message in result.failure.message
    with pytest.raises(JobError, match="no weights"):
        async with runner.serve(JobHandle("j")):
            pass
    assert (await finished(runner, job("next"))).status == "succeeded"  # and nothing else is harmed


async def test_a_busy_loop_ends_at_the_deadline(runner: EmbeddedJobRunner) -> None:
    result = await finished(runner, job(source=fault("[0 for _ in iter(int, 1)]"), limits=TaskLimits(seconds=1.0)))
    assert result.failure is not None
    assert result.failure.code in ("cpu-limit", "timeout")
    assert result.wall_seconds < 12


FORGE = """import gc
            from ai_trains_ai.sandbox.channel import Channel
            [c.send("weights", b"forged") for c in gc.get_objects() if isinstance(c, Channel)]"""


async def test_forged_weights_are_refused(runner: EmbeddedJobRunner) -> None:
    result = await finished(runner, job(source=fault(FORGE)))
    assert result.status == "failed"
    assert result.failure is not None
    assert result.failure.side == "agent"


def test_weights_are_checked_tensor_by_tensor() -> None:
    from ai_trains_ai.pico import model_folder

    data = (model_folder("pico-m") / "model.safetensors").read_bytes()
    check_weights("pico-m", data)
    with pytest.raises(UntrustedDataError, match="shape"):
        check_weights("pico-s", data)
    with pytest.raises(UntrustedDataError, match="not a readable"):
        check_weights("pico-m", data[:-1000])


@pytest.mark.parametrize("config", [{"optim__lr": 0.0}, {"sampling__temperature": 0.0}], ids=["lr", "greedy"])
async def test_a_job_that_changes_nothing_did_not_train(runner: EmbeddedJobRunner, config: dict[str, Any]) -> None:
    result = await finished(runner, job(**config))
    assert result.failure is not None
    assert (result.failure.side, result.failure.code) == ("agent", "did-not-train")


NOISY = """import gc
            from ai_trains_ai.sandbox.channel import Channel
            for c in [c for c in gc.get_objects() if isinstance(c, Channel)]:
                for data in (b'{"step": NaN}', b'{"step": 1e999}', b'{"step": ' + b'9' * 400 + b'}', b'[' * 4000,
                             b'{"step": 1, "x": "y"}', b'[]', b'null', b'"step"', b'{"step": 1, "\\ud800": 2}'):
                    c.send("progress", data)"""


async def test_frames_of_agent_code_can_not_harm_the_controller(runner: EmbeddedJobRunner) -> None:
    seen: list[int] = []
    handle = await runner.submit(job(source=fault(NOISY)))
    result = await runner.wait(handle, lambda step, metrics: seen.append(step))
    assert result.status == "succeeded", result.failure
    assert set(seen) <= {0, 1, 2}
    assert from_json(to_json(result), JobResult) == result


async def test_cancel(runner: EmbeddedJobRunner) -> None:
    handle = await runner.submit(job(source=fault("import time; time.sleep(60)")))
    waiting = asyncio.create_task(runner.wait(handle))
    await asyncio.sleep(0.3)
    await runner.cancel(handle)
    await runner.cancel(handle)
    assert (await asyncio.wait_for(waiting, 5)).status == "cancelled"


async def test_infrastructure_is_retried_and_then_lost(runner: EmbeddedJobRunner) -> None:
    class Broken:
        guarantees = runner._run.sandbox.guarantees
        runs = 0

        async def run(self, *arguments: Any, **options: Any) -> SandboxResult:
            Broken.runs += 1
            return SandboxResult("sandbox_error", detail="the server died")

    runner._run.sandbox = Broken()  # type: ignore[assignment]
    result = await finished(runner, job())
    assert (Broken.runs, result.status) == (3, "lost")
    assert result.failure is not None
    assert (result.failure.side, result.failure.evidence) == ("infrastructure", "the server died")


MULTI_TURN = (
    environment().replace('__all__ = ["Rows"]', '__all__ = ["Rows", "TwoTurns"]')
    + """

class TwoTurns(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as chat:
            segment = await chat.turn()
            if not segment.terminated:
                await chat.turn(" again ->")
"""
)


async def test_a_multi_turn_environment_trains(runner: EmbeddedJobRunner) -> None:
    result = await finished(runner, job(source=MULTI_TURN))
    assert result.status == "succeeded", result.failure
    single = await finished(runner, job("single"))
    assert result.metrics[0]["tokens"] > 1.3 * single.metrics[0]["tokens"]


def test_a_provider_or_slots() -> None:
    from ai_trains_ai.providers.local import LocalProvider

    with pytest.raises(ConfigurationError, match="not both"):
        EmbeddedJobRunner(provider=LocalProvider(), slots=2)


SHY = MULTI_TURN.replace(
    "segment = await chat.turn()",
    "Row.calls = getattr(Row, 'calls', 0) + 1\n"
    "            if Row.calls % 6 == 0:\n                return\n"
    "            segment = await chat.turn()",
)


async def test_a_rollout_in_which_the_model_never_speaks_is_left_out(runner: EmbeddedJobRunner) -> None:
    result = await finished(runner, job(source=SHY))
    assert result.status == "succeeded", result.failure


def test_later_turns_extend_the_sampled_ids() -> None:
    from ai_trains_ai.inner.embedded_job import Sampler, _tokens, base

    model, tokenizer = base("pico-m")
    sampler = Sampler(model, tokenizer, 1.0, 6, 0)
    opening = {"role": "user", "content": "start 1 add 2 ->"}
    first = sampler.generate([[opening]] * 4)
    again = [
        [opening, {"role": "assistant", "content": f.text}, {"role": "user", "content": " again ->"}] for f in first
    ]
    second = sampler.generate(again)
    for before, after in zip(first, second, strict=True):
        assert list(after.prompt_ids)[: len(before.prompt_ids) + len(before.ids)] == [*before.prompt_ids, *before.ids]

    class Rollout:
        turns = (first[0], second[0])

    ids, sampled, logprobs = _tokens(Rollout())  # type: ignore[arg-type]
    assert ids == [*second[0].prompt_ids[len(first[0].prompt_ids) :], *second[0].ids]
    assert sum(sampled) == len(first[0].ids) + len(second[0].ids)
    Rollout.turns = (first[0], first[1])  # a prompt that is no extension: only the first turn can train
    assert _tokens(Rollout())[0] == list(first[0].ids)  # type: ignore[arg-type]
    assert len(logprobs) == len(ids)


def test_a_failed_rollout_moves_nobody_elses_advantage() -> None:
    import numpy as np

    from ai_trains_ai.inner import embedded_job

    class Turn:
        prompt_ids, ids, logprobs = (5, 6), (7, 1), (-0.1, -0.1)

    class Rollout:
        turns = (Turn,)

        def __init__(self, error: str) -> None:
            self.error = error

    model, tokenizer = embedded_job.base("pico-m")
    config = {**SURFACE.defaults(), "batch_size": 4, "group_size": 4}
    trainer = embedded_job.Trainer(model.clone(), tokenizer, None, [0], config, 0)
    rollouts: list[Any] = [Rollout(""), Rollout(""), Rollout(""), Rollout("boom")]
    stats = trainer._update(0, rollouts, np.array([1.0, 1.0, 1.0, 0.0]))
    assert stats.tokens == 0, "three equal rewards teach nothing, whatever happened to the fourth"
