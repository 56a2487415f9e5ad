"""The embedded job runner: tiny Qwen3 models, GRPO in NumPy, one jailed process a job.

A job runs in a child of the run's sandbox, forked from a server that was started before the run's secret, policy and
database existed: a crash or an out-of-memory of a job is a failed job and nothing else. Its weights come back as bytes,
are checked tensor by tensor, and are served by a second server that never held agent code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache

from attrs import define, field

from ai_trains_ai.errors import ConfigurationError, JobError, SandboxError, UntrustedDataError
from ai_trains_ai.fleet import Fleet
from ai_trains_ai.inner.surface import DIVISIBLE, WARMUP_FITS, surface
from ai_trains_ai.interfaces import GPUProvider, InnerJobRunner, RunContext, Sandbox, ServedModel
from ai_trains_ai.pico import model_folder
from ai_trains_ai.records import (
    BaseModel,
    ConfigSurface,
    JobFailure,
    JobHandle,
    JobResult,
    Limits,
    Prompt,
    SamplingParams,
    SandboxResult,
    TrainingJob,
)

logger = logging.getLogger(__name__)

JOB = "ai_trains_ai.inner.embedded_job"
RETRIES = 2  # of infrastructure failures

_CHANGES: Mapping[str, Mapping[str, object]] = {
    "max_steps": {"high": 64},
    "batch_size": {"default": 40, "low": 4, "high": 256},
    "group_size": {"high": 32},
    "optim.type": {},
    "optim.lr": {"default": 1e-4, "high": 1.0},
    "optim.weight_decay": {},
    "optim.max_norm": {},
    "scheduler.type": {},
    "scheduler.warmup_steps": {"high": 63},
    "sampling.temperature": {},
    "sampling.max_completion_tokens": {"low": 2, "high": 24},
    "loss.ratio_clip": {},
    "updates_per_batch": {},
    "advantage.normalize_std": {},
}


@define
class _Running:
    """A job in the runner's hands."""

    job: TrainingJob
    task: asyncio.Task[JobResult]
    listeners: list[Callable[[int, Mapping[str, float]], None]] = field(factory=list)
    weights: bytes = field(default=b"", repr=False)


class EmbeddedJobRunner(InnerJobRunner):
    """Runs jobs on this machine, as many at once as the provider has slots.

    Args:
        provider: who lends the slots; this machine's cores by default. Its pods must be on this machine.
        slots: shorthand for a `LocalProvider` with so many slots.
    """

    sandbox_preload = (
        "ai_trains_ai.environments.warm:warm_up",
        "ai_trains_ai.families.practice",
        f"{JOB}:warm_up",
    )

    def __init__(self, provider: GPUProvider | None = None, slots: int | None = None) -> None:
        if provider is not None and slots is not None:
            raise ConfigurationError("Give the embedded runner a provider or a number of slots, not both.")
        if provider is not None and not isinstance(provider, GPUProvider):
            raise ConfigurationError(
                f"provider={provider!r} is no GPUProvider. Pass an instance, or let the experiment make it: "
                'ata.job_runner("embedded", provider=…) takes a name or a class too.'
            )
        self.provider, self._slots = provider, slots
        self._jobs: dict[str, _Running] = {}

    async def start(self, run: RunContext) -> None:
        provider = self.provider
        if provider is None:
            from ai_trains_ai.providers.local import LocalProvider

            provider = LocalProvider(self._slots)
        self._run = run
        self._jobs = {}  # a runner may be used for another run, or for the same one again
        self._fleet: Fleet = run.fleet(provider)
        await self._fleet.start()
        self._server: Sandbox = run.sandbox.another((f"{JOB}:warm_up",))
        await self._server.start()

    def config_surface(self) -> ConfigSurface:
        return surface(_CHANGES, (DIVISIBLE, WARMUP_FITS))

    def base_models(self) -> Sequence[BaseModel]:
        models = (("pico-s", "small"), ("pico-m", "larger"))
        found = []
        for name, summary in models:
            count = json.loads((model_folder(name) / "config.json").read_text())
            found.append(BaseModel(name, _parameters(count), f"{summary}, {_parameters(count) // 1000}k parameters"))
        return found

    def capacity(self) -> int:
        return self._fleet.slots

    # ------------------------------------------------------------------------------------------ jobs

    async def submit(self, job: TrainingJob) -> JobHandle:
        if job.id not in self._jobs:
            running = _Running(job, asyncio.create_task(self._execute(job), name=f"job {job.id}"))
            self._jobs[job.id] = running
        return JobHandle(job.id)

    async def wait(
        self, handle: JobHandle, on_event: Callable[[int, Mapping[str, float]], None] | None = None
    ) -> JobResult:
        running = self._known(handle)
        if on_event is not None:
            running.listeners.append(on_event)
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if running.task.cancelled():
                return JobResult(handle.job_id, "cancelled")
            raise
        finally:
            if on_event is not None:
                running.listeners.remove(on_event)

    async def attach(self, handle: JobHandle) -> JobHandle | None:
        return handle if handle.job_id in self._jobs else None  # jobs end with this process

    async def cancel(self, handle: JobHandle) -> None:
        self._known(handle).task.cancel()

    async def _execute(self, job: TrainingJob) -> JobResult:
        for attempt in range(1 + RETRIES):
            async with self._fleet.lease(job.id) as lease:
                if lease.pod.address != "local":
                    raise ConfigurationError(
                        f"The embedded runner trains on this machine; pod {lease.pod.id} is at {lease.pod.address!r}. "
                        "Use a runner that reaches it, for instance prime-rl."
                    )
                result = await self._train(job)
            if result.outcome != "sandbox_error":
                return self._result(job, result)
            logger.warning("Job %s: the sandbox failed (%s), attempt %d.", job.id, result.detail, attempt + 1)
        failure = JobFailure("infrastructure", "sandbox-error", "the sandbox failed", result.detail)
        return JobResult(job.id, "lost", failure, guarantees=self._run.sandbox.guarantees.text())

    async def _train(self, job: TrainingJob) -> SandboxResult:
        order = {
            "base_model": job.base_model,
            "config": dict(job.config),
            "environment": dict(job.environment),
            "rows": list(job.rows),
            "seed": job.seed,
        }
        # CPU seconds bound the job; the wall limit only ends one that sleeps
        limits = Limits(
            wall_seconds=10 * job.limits.seconds, cpu_seconds=int(job.limits.seconds) + 1, result_bytes=8 << 20
        )

        def on_frame(kind: str, data: bytes) -> None:
            if kind == "progress":
                self._tell(job.id, data)

        return await self._run.sandbox.run(
            f"{JOB}:train", json.dumps(order).encode(), files=job.files, limits=limits, on_frame=on_frame
        )

    def _tell(self, job_id: str, data: bytes) -> None:
        running = self._jobs.get(job_id)
        progress = _progress(data)
        if running is not None and progress is not None:
            for listener in tuple(running.listeners):
                listener(int(progress["step"]), progress)

    def _result(self, job: TrainingJob, result: SandboxResult) -> JobResult:
        """The verdict, from what the sandbox saw; the frames count as untrusted bytes."""
        metrics = [p for kind, data in result.frames if kind == "progress" and (p := _progress(data)) is not None]
        weights = [data for kind, data in result.frames if kind == "weights"]
        failure = _failure(result, weights)
        if failure is None:
            failure = self._keep(job, weights[0])
        return JobResult(
            job.id,
            "failed" if failure else "succeeded",
            failure,
            steps=0 if failure else int(job.config["max_steps"]),
            train_seconds=result.cpu_seconds,
            wall_seconds=result.wall_seconds,
            metrics=tuple(metrics[: int(job.config["max_steps"])]),
            guarantees=self._run.sandbox.guarantees.text(),
        )

    def _keep(self, job: TrainingJob, weights: bytes) -> JobFailure | None:
        """Take the weights for serving, unless they don't fit or are those of the base model."""
        evidence = "checked outside the job"
        try:
            check_weights(job.base_model, weights)
        except UntrustedDataError as error:
            return JobFailure("agent", "bad-weights", str(error), evidence)
        if weights == _base_weights(job.base_model):
            message = "the weights are those of the base model: every step left them as they were"
            return JobFailure("agent", "did-not-train", message, evidence)
        self._jobs[job.id].weights = weights
        return None

    # ------------------------------------------------------------------------------------------ serving

    @contextlib.asynccontextmanager
    async def serve(self, model: BaseModel | JobHandle) -> AsyncIterator[ServedModel]:
        if isinstance(model, BaseModel):
            if model.name not in {known.name for known in self.base_models()}:
                raise JobError(f"This runner has no base model {model.name!r}.")
            yield _Served(self._server, model.name, b"")
            return
        running = self._known(model)
        if not running.weights:
            raise JobError(f"Job {model.job_id} has no weights to serve: it failed, or it was released.")
        yield _Served(self._server, running.job.base_model, running.weights)

    async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
        running = self._jobs.pop(handle.job_id, None)
        if running is None:
            return
        if not running.task.done():  # nobody waits for it any more
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
        if keep_weights and running.weights:
            from ai_trains_ai.store.folder import attempt_write

            path = self._run.folder / "artifacts" / handle.job_id / "model.safetensors"
            await asyncio.to_thread(attempt_write, path, running.weights)

    async def close(self, drain: bool = True) -> None:
        tasks = [running.task for running in self._jobs.values()]
        if not drain:
            for task in tasks:
                task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # also when the user has had enough of waiting
            if hasattr(self, "_fleet"):
                await self._fleet.close()
            if hasattr(self, "_server"):
                await self._server.close()

    def _known(self, handle: JobHandle) -> _Running:
        if handle.job_id not in self._jobs:
            raise JobError(f"This runner has no job {handle.job_id!r}: it was never submitted here, or was released.")
        return self._jobs[handle.job_id]


class _Served(ServedModel):
    """A model behind the clean server: one fresh child a call."""

    def __init__(self, sandbox: Sandbox, base_model: str, weights: bytes) -> None:
        self._sandbox, self._base_model, self._weights = sandbox, base_model, weights

    async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
        if not prompts:
            return []
        # base models know no roles: contents are put after one another, as in training
        texts = [p if isinstance(p, str) else "".join(message.content for message in p) for p in prompts]
        order = {
            "base_model": self._base_model,
            "prompts": texts,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
        }
        payload = json.dumps(order).encode() + b"\n" + self._weights
        result = await self._sandbox.run(f"{JOB}:sample", payload, limits=Limits(wall_seconds=120.0, cpu_seconds=60))
        if result.outcome != "exited" or result.code != 0:
            tail = result.output.decode("utf-8", "replace")[-500:]
            raise SandboxError(f"Serving {self._base_model} failed: {result.outcome} {result.detail} {tail}")
        replies: list[str] = json.loads(dict(result.frames)["replies"])
        return replies


def check_weights(base_model: str, data: bytes) -> None:
    """Raise `UntrustedDataError` naming the tensor unless ``data`` is a well-formed checkpoint of ``base_model``."""
    from ai_trains_ai.pico.checkpoint import from_bytes, read_config

    from_bytes(read_config(model_folder(base_model)), data)


@cache
def _base_weights(name: str) -> bytes:
    """The base model as a job that changes nothing would send it."""
    from ai_trains_ai.pico.model import Qwen3

    return Qwen3.load(model_folder(name)).to_bytes()


def _failure(result: SandboxResult, weights: Sequence[bytes]) -> JobFailure | None:
    if result.outcome == "exited" and result.code == 0:
        if len(weights) == 1:
            return None
        return JobFailure(
            "agent", "no-weights", f"the job ended with {len(weights)} sets of weights, not one", "frames"
        )
    last = result.output.decode("utf-8", "backslashreplace").strip().splitlines()[-1:] or [""]
    message = last[0][:300] if result.outcome == "exited" else result.outcome.replace("_", " ")
    code = "job-crashed" if result.outcome in ("exited", "signalled") else result.outcome.replace("_", "-")
    return JobFailure("agent", code, message, f"sandbox: {result.outcome} {result.code}")


def _progress(data: bytes) -> dict[str, float] | None:
    """A progress frame as finite numbers; ``None`` for anything else, since agent code can send frames too."""
    try:
        values = {str(k)[:40]: float(v) for k, v in json.loads(data[:4096]).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return values if "step" in values and all(map(math.isfinite, values.values())) else None


def _parameters(config: Mapping[str, int]) -> int:
    """Number of weights of a Qwen3 with tied embeddings."""
    d, heads, kv, size = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    attention = d * size * (heads + 2 * kv) + heads * size * d + 2 * size
    layer = attention + 3 * d * config["intermediate_size"] + 2 * d
    return config["vocab_size"] * d + config["num_hidden_layers"] * layer + d
