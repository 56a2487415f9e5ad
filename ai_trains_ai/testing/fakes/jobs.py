"""A job runner that ends jobs without training anything."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from attrs import define, field

from ai_trains_ai.errors import (
    JobError,
)
from ai_trains_ai.inner.surface import DIVISIBLE, surface
from ai_trains_ai.interfaces import (
    InnerJobRunner,
    RunContext,
    ServedModel,
)
from ai_trains_ai.records import (
    BaseModel,
    Charge,
    ConfigSurface,
    JobFailure,
    JobHandle,
    JobResult,
    Prompt,
    SamplingParams,
    TrainingJob,
)
from ai_trains_ai.store import attempt_write
from ai_trains_ai.testing.fakes.context import NO_TENSORS


@define(eq=False)
class _Job:
    """A job in the fake's hands."""

    job: TrainingJob
    task: asyncio.Task[JobResult]
    listeners: list[Callable[[int, Mapping[str, float]], None]] = field(factory=list)
    trained: bool = False


class TinyRunner(InnerJobRunner):
    """Trains nothing and runs no agent code: for tests of the parts around a runner.

    A job ends after a few turns of the event loop for each of its steps. It fails by the agent's side when its
    environment.py has a ``raise`` statement. A served model answers a problem of a built-in family right with a
    chance of its own, `CHANCE`, which a job of `LIFT`; what it says depends on model, prompt, seed and position only.
    The base models carry the names of the shipped ones, so that a script for those works here too.

    Args:
        slots: what `capacity` says.
        usd_per_job: booked for each job that began, and asked of the budget before.
    """

    CHANCE: Mapping[str, float] = {"pico-s": 0.2, "pico-m": 0.4}
    LIFT = 0.3

    def __init__(self, slots: int = 4, usd_per_job: float = 0.0) -> None:
        self._slots, self._usd = slots, usd_per_job
        self._jobs: dict[str, _Job] = {}

    async def start(self, run: RunContext) -> None:
        self._run = run
        self._jobs = {}

    def config_surface(self) -> ConfigSurface:
        changes: dict[str, dict[str, Any]] = {
            "max_steps": {"default": 4, "high": 64},
            "batch_size": {"default": 16, "high": 256},
            "group_size": {"high": 32},
            "optim.lr": {"default": 1e-4, "high": 1.0},
        }
        return surface(changes, (DIVISIBLE,))

    def base_models(self) -> Sequence[BaseModel]:
        return [BaseModel(name, 1, f"answers {chance:.0%} right untrained") for name, chance in self.CHANCE.items()]

    def capacity(self) -> int:
        return self._slots

    async def submit(self, job: TrainingJob) -> JobHandle:
        if job.id not in self._jobs:
            self._run.ledger.require(Charge("busy", job.id, 0.0, "steps", self._usd))
            self._jobs[job.id] = _Job(job, asyncio.create_task(self._execute(job), name=f"job {job.id}"))
        return JobHandle(job.id)

    async def wait(
        self, handle: JobHandle, on_event: Callable[[int, Mapping[str, float]], None] | None = None
    ) -> JobResult:
        known = self._known(handle)
        if on_event is not None:
            known.listeners.append(on_event)
        try:
            await asyncio.wait([known.task])
        finally:
            if on_event is not None:
                known.listeners.remove(on_event)
        return JobResult(handle.job_id, "cancelled") if known.task.cancelled() else known.task.result()

    async def attach(self, handle: JobHandle) -> JobHandle | None:
        return handle if handle.job_id in self._jobs else None

    async def cancel(self, handle: JobHandle) -> None:
        self._known(handle).task.cancel()

    @contextlib.asynccontextmanager
    async def serve(self, model: BaseModel | JobHandle) -> AsyncIterator[ServedModel]:
        if isinstance(model, BaseModel):
            if model.name not in self.CHANCE:
                raise JobError(f"This runner has no base model {model.name!r}.")
            yield _Guesser(model.name, self.CHANCE[model.name])
            return
        known = self._known(model)
        if not known.trained:
            raise JobError(f"Job {model.job_id} has no weights to serve: it failed, or it was released.")
        base = known.job.base_model
        yield _Guesser(base, self.CHANCE[base] + self.LIFT)

    async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
        known = self._jobs.pop(handle.job_id, None)
        if known is None:
            return
        known.task.cancel()
        await asyncio.wait([known.task])
        if keep_weights and known.trained:
            attempt_write(self._run.folder / "artifacts" / handle.job_id / "model.safetensors", NO_TENSORS)

    async def close(self, drain: bool = True) -> None:
        tasks = [known.task for known in self._jobs.values()]
        if not drain:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _execute(self, job: TrainingJob) -> JobResult:
        begin, steps = self._run.clock(), int(job.config["max_steps"])
        metrics: list[Mapping[str, float]] = []
        try:
            for step in range(steps):
                await _some_turns()
                if re.search(rb"^\s*raise\b", job.files.get("environment.py", b""), re.MULTILINE):
                    failure = JobFailure("agent", "job-crashed", "environment.py raises", "read by the runner")
                    return JobResult(job.id, "failed", failure, metrics=tuple(metrics))
                metrics.append({"step": float(step), "reward": (step + 1) / steps})
                for listener in tuple(self._jobs[job.id].listeners):
                    listener(step, metrics[-1])
            await _some_turns()
            self._jobs[job.id].trained = True
        finally:
            self._run.ledger.charge(Charge("busy", job.id, float(len(metrics)), "steps", self._usd))
        seconds = self._run.clock() - begin
        return JobResult(
            job.id, "succeeded", None, steps, seconds, seconds, self._usd, tuple(metrics), "none: nothing is run"
        )

    def _known(self, handle: JobHandle) -> _Job:
        if handle.job_id not in self._jobs:
            raise JobError(f"This runner has no job {handle.job_id!r}: it was never submitted here, or was released.")
        return self._jobs[handle.job_id]


async def _some_turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


class _Guesser(ServedModel):
    """Knows every answer of the built-in families, and gives it as often as ``chance`` says."""

    def __init__(self, name: str, chance: float) -> None:
        self._name, self._chance = name, chance

    async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
        texts = [p if isinstance(p, str) else "".join(message.content for message in p) for p in prompts]
        return [self._reply(text, position, params) for position, text in enumerate(texts)]

    def _reply(self, prompt: str, position: int, params: SamplingParams) -> str:
        from ai_trains_ai.families import BUILT_IN, load

        # greedy replies depend on the prompt alone; all models draw alike, so that a better one is right wherever a
        # worse one is
        drawn = f"{params.seed} {position} " if params.temperature > 0 else ""
        rng = random.Random(drawn + prompt)
        right = rng.random() < self._chance
        for family in map(load, BUILT_IN):
            item = family.item(prompt)
            if item is not None:
                return family.gold(item) if right else f" so {rng.randrange(100)}?"
        return f" {rng.randrange(100)}"
