"""The prime-rl runner on stand-ins of the engine: real fleet, job protocol, supervisor, wall and servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from fakes import engine
from fakes.pods import path_of_a_pod
from fakes.sshd import QUICK, SSHD, Server
from inner.prime_rl.jobs import free_ports
from inner.prime_rl.standing import SHAPES, job, runner, with_limit

from ai_trains_ai.errors import ConfigurationError, JobError, ProviderError, UnknownName
from ai_trains_ai.inner.prime_rl.profiles import PROFILES
from ai_trains_ai.inner.prime_rl.runner import PrimeRLRunner
from ai_trains_ai.interfaces import InnerJobRunner, RunContext
from ai_trains_ai.providers.local import LocalProvider
from ai_trains_ai.providers.ssh import SSHHost, SSHProvider
from ai_trains_ai.records import BaseModel, JobHandle, JobResult, SamplingParams, TaskLimits, TrainingJob
from ai_trains_ai.testing import InnerJobRunnerContract
from ai_trains_ai.testing.fakes import run_context

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
BROKEN = b'raise ValueError("broken on purpose")\n'
BASE = BaseModel(SHAPES[0].name, 1)


@pytest.fixture(autouse=True)
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has two GPUs, as its driver says."""
    programs = engine.install(tmp_path / "driver", gpus=2)
    monkeypatch.setenv("PATH", path_of_a_pod(programs))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunContext]:
    with run_context(tmp_path / "run") as run:
        yield run


@contextlib.asynccontextmanager
async def started(run: RunContext, tmp_path: Path, **options: Any) -> AsyncIterator[PrimeRLRunner]:
    made = runner(tmp_path, **options)
    await made.start(run)
    try:
        yield made
    finally:
        await made.close(drain=False)


def on_machine(tmp_path: Path) -> list[Path]:
    """Jobs that are on the machine, and have been started."""
    return list(tmp_path.glob("machine/pods/*/jobs/jobs/*/pid"))


async def finished(made: PrimeRLRunner, one: TrainingJob) -> JobResult:
    return await asyncio.wait_for(made.wait(await made.submit(one)), 120)


class TestContract(InnerJobRunnerContract):
    @pytest.fixture
    def runner(self, tmp_path: Path) -> InnerJobRunner:
        return runner(tmp_path)

    @pytest.fixture
    def job(self, runner: InnerJobRunner) -> TrainingJob:
        return job()

    @pytest.fixture
    def failing_job(self, runner: InnerJobRunner) -> TrainingJob:
        return job("failing", BROKEN)


async def test_a_job_from_its_submission_to_its_result(run: RunContext, tmp_path: Path) -> None:
    async with started(run, tmp_path) as made:
        seen: list[tuple[int, dict[str, float]]] = []
        handle = await made.submit(job())
        result = await made.wait(handle, lambda step, metrics: seen.append((step, dict(metrics))))
    assert (result.status, result.steps, len(result.metrics)) == ("succeeded", 3, 3)
    assert {"reward", "loss", "entropy", "mismatch_kl", "truncated", "errors", "tokens_per_second"} <= set(
        result.metrics[0]
    )
    assert [step for step, _ in seen] == [metrics["step"] for metrics in result.metrics]
    assert "env server: " in result.guarantees
    assert 0 < result.train_seconds <= result.wall_seconds


async def test_trained_weights_answer_otherwise_than_the_base_model(run: RunContext, tmp_path: Path) -> None:
    async with started(run, tmp_path) as made:
        await finished(made, job())
        async with made.serve(JobHandle("job")) as trained:
            mine = await trained.sample(["start 3 add 2 ->", "start 4 add 2 ->"], GREEDY)
        async with made.serve(BASE) as base:
            theirs = await base.sample(["start 3 add 2 ->", "start 4 add 2 ->"], GREEDY)
    assert len(mine) == len(theirs) == 2
    assert mine != theirs


@pytest.mark.parametrize("version", PROFILES)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("rank", [0, 4])
async def test_versions_machines_and_kinds_of_training_are_one_path(
    run: RunContext, tmp_path: Path, version: str, devices: int, rank: int
) -> None:
    """Trained, served, answering otherwise than the base model, and kept."""
    changes = {"lora__rank": rank} if rank else {}
    async with started(run, tmp_path, version=version, gpus=devices) as made:
        result = await finished(made, job(**changes))
        assert (result.status, result.steps, len(result.metrics)) == ("succeeded", 3, 3), result.failure
        assert {"reward", "loss"} <= set(result.metrics[-1])
        async with made.serve(JobHandle("job")) as trained:
            mine = await trained.sample(["start 3 add 2 ->"], GREEDY)
        await made.release(JobHandle("job"), keep_weights=True)
        async with made.serve(BASE) as base:
            assert mine != await base.sample(["start 3 add 2 ->"], GREEDY)
    merged = not rank or PROFILES[version].layout.merged
    kept = {path.name for path in (run.folder / "artifacts/job").glob("*.safetensors")}
    assert kept == {"model.safetensors" if merged else "adapter_model.safetensors"}
    if not merged:
        config = json.loads((run.folder / "artifacts/job/adapter_config.json").read_text())
        assert (config["r"], config["base_model_name_or_path"]) == (rank, SHAPES[0].name)


async def test_replies_of_a_base_model_are_kept_with_the_run_and_show_no_prompt(
    run: RunContext, tmp_path: Path
) -> None:
    async with started(run, tmp_path) as made:
        async with made.serve(BASE) as base:
            first = await base.sample(["a secret prompt"], GREEDY)
    [kept] = (run.folder / "artifacts/base-replies").iterdir()
    assert (json.loads(kept.read_text()), kept.stat().st_mode & 0o777) == (first, 0o600)
    assert b"secret" not in kept.read_bytes()
    async with started(run, tmp_path, fault="vllm-memory") as made:  # nothing is served any more
        async with made.serve(BASE) as base:
            assert await base.sample(["a secret prompt"], GREEDY) == first


async def test_kept_weights_are_those_of_the_job(run: RunContext, tmp_path: Path) -> None:
    async with started(run, tmp_path) as made:
        await finished(made, job())
        await made.release(JobHandle("job"), keep_weights=True)
        kept = (run.folder / "artifacts/job/model.safetensors").read_bytes()
        base = (tmp_path / "models" / SHAPES[0].name / "model.safetensors").read_bytes()
    assert len(kept) == len(base)
    assert kept != base


async def test_a_job_leaves_nothing_on_its_machine(run: RunContext, tmp_path: Path) -> None:
    async with started(run, tmp_path) as made:
        await finished(made, job())
        assert on_machine(tmp_path)
        await made.release(JobHandle("job"))
        assert not on_machine(tmp_path)


async def test_a_broken_environment_is_the_agents_and_not_tried_again(run: RunContext, tmp_path: Path) -> None:
    async with started(run, tmp_path) as made:
        result = await finished(made, job(source=BROKEN))
    assert result.status == "failed"
    assert result.failure is not None
    assert result.failure.side == "agent"
    assert run.store.placement("job.2") is None


async def test_a_failure_of_the_engine_is_tried_once_more_and_then_lost(run: RunContext, tmp_path: Path) -> None:
    async with started(run, tmp_path, fault="vllm-memory") as made:
        result = await finished(made, job())
    assert (result.status, result.failure.code if result.failure else "") == ("lost", "vllm-memory")
    assert run.store.placement("job.2") is not None
    assert run.store.placement("job.3") is None


async def test_when_the_time_is_over_the_newest_weights_count(run: RunContext, tmp_path: Path) -> None:
    async with started(run, tmp_path, fault="slow-steps") as made:
        result = await finished(made, with_limit(job(max_steps=500), 6.0))
        assert result.status == "succeeded"
        assert 0 < result.steps < 500
        async with made.serve(JobHandle("job")) as trained:
            assert len(await trained.sample(["x"], GREEDY)) == 1


async def test_a_restarted_controller_goes_on_with_a_job(run: RunContext, tmp_path: Path) -> None:
    made = runner(tmp_path, fault="slow-steps")
    await made.start(run)
    one = with_limit(job(max_steps=500), 6.0)
    run.store.save_intent(_episode(), one, JobHandle("job"))
    waiting = asyncio.ensure_future(made.wait(await made.submit(one)))
    for _ in range(400):
        if on_machine(tmp_path):
            break
        await asyncio.sleep(0.05)
    assert run.store.placement("job.1") is not None
    await _die(made, run, waiting)
    with run_context(tmp_path / "run") as again:
        async with started(again, tmp_path, fault="slow-steps", provider=made.provider) as second:
            handle = await second.attach(JobHandle("job"))
            assert handle is not None
            result = await asyncio.wait_for(second.wait(handle), 60)
            assert result.status == "succeeded"
            assert again.store.placement("job.2") is None


async def test_a_restarted_controller_serves_again_what_was_served(run: RunContext, tmp_path: Path) -> None:
    ports = free_ports()
    made = runner(tmp_path, ports=ports)
    await made.start(run)
    run.store.save_intent(_episode(), job(), JobHandle("job"))
    await finished(made, job())
    serving = asyncio.Event()

    async def serve(what: BaseModel | JobHandle) -> None:
        async with made.serve(what) as served:
            await served.sample(["x"], GREEDY)
            serving.set()
            await asyncio.sleep(600)

    tasks = [asyncio.ensure_future(serve(what)) for what in (JobHandle("job"), BASE)]
    await asyncio.wait_for(serving.wait(), 60)
    await _die(made, run, *tasks)
    with run_context(tmp_path / "run") as again:
        async with started(again, tmp_path, provider=made.provider, ports=ports) as second:
            assert await second.attach(JobHandle("job")) is not None
            await asyncio.wait_for(second.wait(JobHandle("job")), 60)
            async with second.serve(JobHandle("job")) as trained:
                assert len(await trained.sample(["x"], GREEDY)) == 1
            # the slot on which the base model was served is free again
            assert (await finished(second, job("other"))).status == "succeeded"


async def test_a_listener_that_raises_harms_no_job(run: RunContext, tmp_path: Path) -> None:
    def listener(step: int, metrics: object) -> None:
        raise RuntimeError("a notebook's")

    async with started(run, tmp_path) as made:
        handle = await made.submit(job())
        assert (await made.wait(handle, listener)).status == "succeeded"


async def test_a_job_that_is_nowhere_can_not_be_attached(run: RunContext, tmp_path: Path) -> None:
    async with started(run, tmp_path) as made:
        assert await made.attach(JobHandle("never")) is None
        await finished(made, job())
        await made.release(JobHandle("job"))
        assert await made.attach(JobHandle("job")) is None


async def test_a_job_is_not_served_twice_at_a_time_on_its_machine(run: RunContext, tmp_path: Path) -> None:
    async with started(run, tmp_path) as made:
        await finished(made, job())
        order: list[str] = []

        async def serve(name: str) -> None:
            async with made.serve(JobHandle("job")) as trained:
                order.append(f"{name} in")
                await trained.sample(["x"], GREEDY)
                order.append(f"{name} out")

        await asyncio.gather(serve("a"), serve("b"))
    assert [step.split()[1] for step in order] == ["in", "out", "in", "out"]


async def test_weights_that_are_gone_mask_the_episode(
    run: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ai_trains_ai.inner.prime_rl.runner.HELD", 0.2)
    async with started(run, tmp_path) as made:
        await finished(made, job())
        while on_machine(tmp_path):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        with pytest.raises(ProviderError, match="machine was given up"):
            async with made.serve(JobHandle("job")):
                pass


async def test_an_error_of_the_caller_comes_out_as_itself(run: RunContext, tmp_path: Path) -> None:
    async with started(run, tmp_path) as made:
        await finished(made, job())
        with pytest.raises(TimeoutError, match="mine"):
            async with made.serve(JobHandle("job")):
                raise TimeoutError("mine")


async def test_without_a_provider_it_does_not_start(run: RunContext) -> None:
    with pytest.raises(ConfigurationError, match=r"provider=ata\.gpu_provider"):
        await PrimeRLRunner().start(run)


@pytest.mark.skipif(not SSHD, reason="sshd is not installed")
async def test_a_job_on_a_machine_behind_ssh(run: RunContext, tmp_path: Path) -> None:
    server = Server(tmp_path / "host")
    server.session["PATH"] = os.environ["PATH"]
    server.start()
    host = SSHHost(
        server.host.address, "NVIDIA A40", 2, 2, 3.6, server.host.user, server.port, server.host.key,
        root=str(server.home / "ata"),
    )  # fmt: skip
    try:
        async with started(run, tmp_path, provider=SSHProvider([host], QUICK)) as made:
            result = await finished(made, job())
            async with made.serve(JobHandle("job")) as trained:
                replies = await trained.sample([f"start {n}" for n in range(100)], GREEDY)
            await made.release(JobHandle("job"), keep_weights=True)
    finally:
        server.stop()
    assert (result.status, result.steps, len(set(replies))) == ("succeeded", 3, 100)
    assert result.cost_usd > 0
    assert (run.folder / "artifacts/job/model.safetensors").stat().st_size > 0


class TestArguments:
    def test_a_provider_must_be_one(self) -> None:
        with pytest.raises(ConfigurationError, match="is no GPUProvider"):
            PrimeRLRunner(provider="runpod")  # type: ignore[arg-type]

    def test_unknown_names_get_a_hint(self) -> None:
        with pytest.raises(UnknownName, match=r"Qwen/Qwen3-1\.7B"):
            PrimeRLRunner(models=["Qwen/Qwen3-17B"])
        with pytest.raises(UnknownName, match=r"v0\.8\.0"):
            PrimeRLRunner(version="v0.8")
        with pytest.raises(UnknownName, match="NVIDIA A40"):
            PrimeRLRunner(gpu_types=["A40"])

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("ports", (8000, 8000, 8001)),
            ("ports", "abc"),
            ("ports", (1, 2)),
            ("engine", "relative/bin"),
            ("engine", None),
            ("models_folder", "/a b"),
            ("models", "Qwen/Qwen3-0.6B"),
            ("minutes", float("inf")),
            ("gpus", True),
            ("deadlines", {}),
        ],
    )
    def test_what_can_not_be_is_refused_by_name(self, name: str, value: object) -> None:
        with pytest.raises(ConfigurationError, match="GPU" if name == "gpus" else name):
            PrimeRLRunner(**{name: value})

    def test_numbers_must_make_sense(self) -> None:
        with pytest.raises(ConfigurationError, match="one GPU or two"):
            PrimeRLRunner(gpus=3)
        with pytest.raises(ConfigurationError, match="positive number"):
            PrimeRLRunner(minutes=0)
        with pytest.raises(ConfigurationError, match="rollouts must be a positive number"):
            PrimeRLRunner(rollouts="many")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="names no GPU"):
            PrimeRLRunner(gpu_types=[])

    def test_limits_are_those_of_a_gpu(self) -> None:
        found = PrimeRLRunner(minutes=10, rollouts=640).limits(TaskLimits(attempts=5))
        assert found == TaskLimits(seconds=600.0, rollouts=640, attempts=5)

    def test_what_it_rents_is_known_before_it_starts(self) -> None:
        made = PrimeRLRunner(provider=LocalProvider(), gpu_types=["NVIDIA L40S"], gpus=2)
        assert (made.request.gpu_types, made.request.count) == (("NVIDIA L40S",), 2)

    async def test_a_job_of_another_model_is_refused(self, run: RunContext, tmp_path: Path) -> None:
        async with started(run, tmp_path) as made:
            with pytest.raises(UnknownName):
                await made.submit(evolve(job(), base_model="Qwen/Qwen3-4B"))
            with pytest.raises(JobError):
                async with made.serve(BaseModel("Qwen/Qwen3-4B", 1)):
                    pass


def _episode() -> Any:
    from ai_trains_ai.records import Episode

    return Episode("episode", "group", "task", 0, "finished", "", (), (), (), 1, 1, job_id="job")


async def _die(made: PrimeRLRunner, run: RunContext, *tasks: asyncio.Task[Any]) -> None:
    """What SIGKILL leaves of a controller: its books and its machines, and nothing that it would still do."""
    run.store.close()

    async def nothing(*_: Any, **__: Any) -> None:
        raise RuntimeError("this process is dead")

    made._fleet.jobs = nothing  # type: ignore[method-assign]
    working = [running.task for running in made._jobs.values() if running.task is not None]
    for task in (*tasks, *working, *made._fleet._tasks):
        task.cancel()
    await asyncio.gather(*tasks, *working, *made._fleet._tasks, return_exceptions=True)
