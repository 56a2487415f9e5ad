"""The prime-rl job runner: GRPO on rented GPUs, one job a machine at a time.

A job is compiled for the machine that it got, run there by a supervisor of ours, and classified here from what that
saw. Its machine stays its own until the job is released: the trained weights never leave it unless they are to be
kept, and are served from it for the evaluation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, BinaryIO, Final

from attrs import define, evolve, field

from ai_trains_ai.errors import ConfigurationError, JobError, ProviderError, RunFolderError, StorageError, UnknownName
from ai_trains_ai.fleet import Fleet, Held, HostedJob, HostedJobs
from ai_trains_ai.inner.prime_rl.memory import GPU_MIB, Machine, Shape, shape
from ai_trains_ai.inner.prime_rl.pod.metrics import TRAINER
from ai_trains_ai.inner.prime_rl.profiles import DEFAULT, profile
from ai_trains_ai.inner.prime_rl.results import outcome
from ai_trains_ai.inner.prime_rl.serving import CachedReplies, events, served
from ai_trains_ai.inner.prime_rl.shipment import (
    DEADLINES,
    PORTS,
    SLOT_PORTS,
    Deadlines,
    Engine,
    adapter_config,
    library,
    serve_order,
    shipment,
)
from ai_trains_ai.inner.prime_rl.surface import MAX_SEQ_LEN, prime_rl_surface
from ai_trains_ai.interfaces import GPUProvider, InnerJobRunner, RunContext, ServedModel
from ai_trains_ai.records import (
    BaseModel,
    ConfigSurface,
    JobHandle,
    JobResult,
    Lease,
    Placement,
    PodRequest,
    TaskLimits,
    TrainingJob,
)
from ai_trains_ai.store import attempt_write
from ai_trains_ai.transport.jobs import HostJobs, job_folder

logger = logging.getLogger(__name__)

MODELS: Final = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")
GPU_TYPES: Final = ("NVIDIA A40", "NVIDIA RTX A6000", "NVIDIA L40S", "NVIDIA RTX 6000 Ada Generation")
"""Cards with 48 GB: the smallest on which all of a 1.7B model is trained beside its inference."""
RETRIES: Final = 1  # of failures that are the engine's or the machine's
BASE: Final = "base-model-"  # begins the names of machines that serve a base model
HELD: Final = 1800.0  # seconds that the evaluation may hold a job's machine
ADAPTER: Final = "adapter_model.safetensors"  # an adapter's file, as peft names it
RESULT_BYTES: Final = 64 << 20

Listener = Callable[[int, Mapping[str, float]], None]


@define(eq=False)
class _Running:
    """A job in the runner's hands, from its submission to its release."""

    job: TrainingJob
    result: asyncio.Future[JobResult]
    task: asyncio.Task[None] | None = None
    released: asyncio.Event = field(factory=asyncio.Event)
    serving: asyncio.Lock = field(factory=asyncio.Lock)  # one model at a time on its machine
    listeners: list[Listener] = field(factory=list)
    held: Held | None = None
    weights: str = ""
    """Where the trained weights are on its machine."""


class PrimeRLRunner(InnerJobRunner):
    """Runs training jobs with prime-rl on machines of a provider.

    The defaults fit pods of the project's image: see the how-to page on training with prime-rl.

    Args:
        provider: who rents the machines.
        models: base models by hub name, or shapes of others; they are in the image.
        version: of prime-rl; one of the profiles.
        gpu_types: what to rent, by the providers' names; each must have a memory profile.
        gpus: one, shared by trainer and inference, or two.
        minutes: a job's time to train.
        rollouts: that a job may sample at most.
        own_user: refuse machines on which agent code can't run as a user of its own, where it could forge its result.
        preflight: let the environment and the base model show before the training that there is something to learn.
        engine: the folder of prime-rl's programs on the machines.
        models_folder: the folder of base models there, each below its hub name.
        ports: of the inference server, the env server and the rollout transport, on the machines' loopback.
        deadlines: of the phases before the training, and of its steps.
        poll: seconds between two looks at a job.
    """

    def __init__(
        self,
        provider: GPUProvider | None = None,
        models: Sequence[str | Shape] = MODELS,
        version: str = DEFAULT,
        gpu_types: Sequence[str] = GPU_TYPES,
        gpus: int = 1,
        minutes: float = 40.0,
        rollouts: int = 12_800,
        own_user: bool = True,
        preflight: bool = True,
        engine: str = "/app/.venv/bin",
        models_folder: str = "/models",
        ports: tuple[int, int, int] = PORTS,
        deadlines: Deadlines = DEADLINES,
        poll: float = 2.0,
    ) -> None:
        if provider is not None and not isinstance(provider, GPUProvider):
            raise ConfigurationError(
                f"provider={provider!r} is no GPUProvider. Pass an instance, or let the experiment make it: "
                'ata.job_runner("prime-rl", provider=…) takes a name or a class too.'
            )
        if isinstance(gpus, bool) or gpus not in (1, 2):
            raise ConfigurationError(f"A prime-rl job runs on one GPU or two, not {gpus!r}.")
        for name, number in (("minutes", minutes), ("rollouts", rollouts), ("poll", poll)):
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
                raise ConfigurationError(f"{name} must be a positive number, not {number!r}.")
        for name, given in (("models", models), ("gpu_types", gpu_types)):
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise ConfigurationError(f"{name} must be a list of names, not {given!r}.")
        for name, place in (("engine", engine), ("models_folder", models_folder)):
            if not isinstance(place, str) or not re.fullmatch(r"/[\w./-]+", place):
                raise ConfigurationError(f"{name} must be an absolute path without blanks, not {place!r}.")
        wrong = [port for port in ports if type(port) is not int or not 0 < port < 65_000]
        if len(set(ports)) != 3 or wrong:
            raise ConfigurationError(f"ports must be three different ports below 65000, not {ports!r}.")
        if not isinstance(deadlines, Deadlines):
            raise ConfigurationError(f"deadlines must be a Deadlines, not {deadlines!r}.")
        self.provider = provider
        self._shapes = {found.name: found for found in (m if isinstance(m, Shape) else shape(m) for m in models)}
        if not self._shapes:
            raise ConfigurationError("The prime-rl runner needs at least one base model.")
        if not gpu_types:
            raise ConfigurationError("gpu_types names no GPU: what fits depends on it.")
        for name in gpu_types:
            if name not in GPU_MIB:
                raise UnknownName.of("GPU type with a memory profile", name, GPU_MIB)
        self.request = PodRequest(tuple(gpu_types), gpus)
        self._seconds, self._rollouts, self._poll = 60.0 * minutes, rollouts, poll
        self._engine = Engine(
            profile(version),
            engine.rstrip("/"),
            models_folder.rstrip("/"),
            own_user=own_user,
            preflight=preflight,
            deadlines=deadlines,
            ports=(ports[0], ports[1], ports[2]),
            poll=min(1.0, poll),
        )
        machines = [Machine(name, gpus) for name in gpu_types]
        self._surface = prime_rl_surface(list(self._shapes.values()), machines)  # refuses what fits nowhere
        self._jobs: dict[str, _Running] = {}

    async def start(self, run: RunContext) -> None:
        if self.provider is None:
            raise ConfigurationError(
                'The prime-rl runner rents GPUs: give it a provider, as in ata.job_runner("prime-rl", '
                'provider=ata.gpu_provider("runpod")).'
            )
        self._run, self._jobs = run, {}
        self._fleet: Fleet = run.fleet(self.provider)
        await self._fleet.start(self.request)
        self._folder = run.folder / "artifacts"
        self._hosted = HostedJobs(self._fleet, run.store, self._folder, run.clock, poll=self._poll)
        for placed in run.store.placements():  # of a session that was killed while it served
            if placed.state == "running" and placed.job_id.startswith(BASE):
                await self._fleet.abandon(placed.job_id)
                run.store.end_placement(evolve(placed, state="ended", why="its controller went"))

    def config_surface(self) -> ConfigSurface:
        return self._surface

    def base_models(self) -> Sequence[BaseModel]:
        return [
            BaseModel(name, found.parameters, f"{found.layers} layers, {found.parameters / 1e9:.2f} B parameters")
            for name, found in self._shapes.items()
        ]

    def limits(self, limits: TaskLimits) -> TaskLimits:
        return evolve(limits, seconds=self._seconds, rollouts=self._rollouts)

    def capacity(self) -> int:
        return self._fleet.slots

    # ------------------------------------------------------------------------------------------ jobs

    async def submit(self, job: TrainingJob) -> JobHandle:
        if job.id not in self._jobs:
            if job.base_model not in self._shapes:
                raise UnknownName.of("base model of this runner", job.base_model, self._shapes)
            running = _Running(job, asyncio.get_running_loop().create_future())
            running.result.add_done_callback(_heard)
            running.task = asyncio.create_task(self._execute(running), name=f"job {job.id}")
            self._jobs[job.id] = running
        return JobHandle(job.id)

    async def wait(self, handle: JobHandle, on_event: Listener | None = None) -> JobResult:
        running = self._known(handle)
        if on_event is not None:
            running.listeners.append(on_event)
        try:
            return await asyncio.shield(running.result)
        finally:
            if on_event is not None:
                running.listeners.remove(on_event)

    async def attach(self, handle: JobHandle) -> JobHandle | None:
        if handle.job_id in self._jobs:
            return handle
        placed = self._attempts(handle.job_id)
        if not placed or placed[-1].state != "running":
            return None  # it never came to a machine, or its machine was given up with the weights
        try:
            job, _, _ = self._run.store.job(handle.job_id)
        except RunFolderError:
            return None
        return await self.submit(job)

    async def cancel(self, handle: JobHandle) -> None:
        running = self._known(handle)
        if not running.result.done():
            await self._end(running)

    async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
        running = self._jobs.get(handle.job_id)
        if running is None:
            return
        try:
            if keep_weights and running.held is not None and running.weights:
                await self._keep(running.held, running.weights, running.job)
        finally:
            self._jobs.pop(handle.job_id, None)
            await self._end(running)

    async def close(self, drain: bool = True) -> None:
        try:
            if drain:
                await asyncio.gather(*(running.result for running in self._jobs.values()), return_exceptions=True)
        finally:  # also when the user has had enough of waiting
            ending = [self._end(running) for running in self._jobs.values()]
            await asyncio.gather(*ending, return_exceptions=True)
            if hasattr(self, "_fleet"):
                await self._fleet.close()

    async def _end(self, running: _Running) -> None:
        """Let go of a job's machine; a job that runs is ended."""
        assert running.task is not None
        if running.held is None:
            running.task.cancel()
        running.released.set()
        await asyncio.gather(running.task, return_exceptions=True)
        if not running.result.done():
            running.result.set_result(JobResult(running.job.id, "cancelled"))

    async def _execute(self, running: _Running) -> None:
        """A job's attempts, until it has a result; then hold its machine until it is released."""
        try:
            for retries in range(1 + RETRIES):
                name = f"{running.job.id}.{len(self._ended(running.job.id)) + 1}"
                async with self._hosted.holding(self._order(name, running.job), _Live(running).hear) as held:
                    result, verdict, weights = outcome(running.job, held, self._folder / name, self._engine.profile)
                    if verdict is not None and verdict.retry != "never" and retries < RETRIES:
                        logger.warning("Job %s is tried once more: %s (%s)", name, verdict.message, verdict.evidence)
                        others = self.provider is not None and self.provider.max_pods > 1
                        if isinstance(held, Held) and verdict.retry == "another pod" and others:
                            await self._hosted.distrust(held, verdict.message.partition(". ")[0])
                        continue
                    if result.status == "succeeded" and isinstance(held, Held):
                        running.held, running.weights = held, f"{held.folder}/{weights}"
                        running.result.set_result(result)
                        await self._hold(running)
                if not running.result.done():
                    running.result.set_result(result)
                return
        except Exception as error:  # the budget, the provider, a config that can't be compiled: whoever waits hears it
            if not running.result.done():
                running.result.set_exception(error)

    async def _hold(self, running: _Running) -> None:
        """Keep a job's machine until it is released, but not for ever: others wait for it, and it costs."""
        try:
            async with asyncio.timeout(HELD):
                await running.released.wait()
        except TimeoutError:
            logger.warning("Job %s was not released for %.0f s: its weights are given up.", running.job.id, HELD)
        async with running.serving:  # whoever samples on its machine finishes
            running.held = None

    def _order(self, name: str, job: TrainingJob) -> HostedJob:
        engine = self._engine

        def files(lease: Lease) -> dict[str, bytes]:
            offer = lease.pod.offer
            each = max(1, offer.count // max(1, offer.slots))  # a machine may have more than was asked for
            machine = Machine(offer.gpu_type, min(self.request.count, each))
            folder = job_folder(lease.pod.root, name)
            return shipment(job, engine, machine, self._shapes[job.base_model], folder, lease.slot)

        return HostedJob(
            name,
            files,
            engine.command("supervisor", "order.json"),
            engine.deadlines.total(job.limits.seconds),
            held=HELD,
            result_bytes=RESULT_BYTES,
        )

    def _attempts(self, job_id: str) -> list[Placement]:
        """A job's attempts of ours, each of which has as many machines as it takes."""
        found: list[Placement] = []
        while (placed := self._run.store.placement(f"{job_id}.{len(found) + 1}")) is not None:
            found.append(placed)
        return found

    def _ended(self, job_id: str) -> list[Placement]:
        return [placed for placed in self._attempts(job_id) if placed.state == "ended"]

    # ------------------------------------------------------------------------------------------ weights

    async def _keep(self, held: Held, weights: str, job: TrainingJob) -> None:
        """Fetch the weights, each file whole or not at all. An adapter is kept as a folder that peft reads."""
        said = await held.call(lambda host: host.listing(weights, ".safetensors"))
        if not said:
            raise JobError(f"The weights of {held.placement.job_id} are not in {weights} any more.")
        folder = self._folder / job.id
        if ADAPTER in said:
            config = adapter_config(job.base_model, job.config)
            await asyncio.to_thread(
                attempt_write, folder / "adapter_config.json", json.dumps(config, indent=2).encode()
            )
        for name in said:
            target = folder / ("model.safetensors" if len(said) == 1 and name != ADAPTER else name)
            partial = target.with_name(f"{target.name}.partial")
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with partial.open("wb") as file:
                    await held.call(_fetching(f"{weights}/{name}", file))
                partial.replace(target)
            except OSError as error:
                raise StorageError(f"Can't write {target}: {error.strerror}. Free space.") from error
            finally:
                partial.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------ serving

    @contextlib.asynccontextmanager
    async def serve(self, model: BaseModel | JobHandle) -> AsyncIterator[ServedModel]:
        if isinstance(model, BaseModel):
            if model.name not in self._shapes:
                raise JobError(f"This runner has no base model {model.name!r}.")
            async with contextlib.AsyncExitStack() as stack:
                about = (model.name, self._engine.profile.version)
                yield CachedReplies(
                    self._folder / "base-replies", about, lambda: stack.enter_async_context(self._base(model.name))
                )
            return
        running = self._known(model)
        if not running.weights:
            raise JobError(f"Job {model.job_id} has no weights to serve: it failed, or it was released.")
        async with self._machine(running) as held:
            async with self._served(held, running.job.base_model, running.weights, running.job.config) as found:
                yield found

    @contextlib.asynccontextmanager
    async def _machine(self, running: _Running) -> AsyncIterator[Held]:
        """The machine that a job holds, for one model at a time: its GPU has room for no second."""
        try:
            await asyncio.wait_for(running.serving.acquire(), HELD)
        except TimeoutError:
            raise ProviderError(
                f"The machine of job {running.job.id} serves another model for {HELD:.0f} s already. Serve one after "
                "the other, or give the provider more pods."
            ) from None
        try:
            if running.held is None:
                raise ProviderError(f"The weights of job {running.job.id} are gone: their machine was given up.")
            yield running.held
        finally:
            running.serving.release()

    @contextlib.asynccontextmanager
    async def _base(self, name: str) -> AsyncIterator[ServedModel]:
        """A base model: on a machine of its own, or, where jobs have them all, on one that a job holds unused."""
        busy = [running for running in self._jobs.values() if running.held is not None or not running.result.done()]
        idle = [running for running in busy if running.held is not None and not running.serving.locked()]
        if idle and len(busy) >= self._fleet.slots:
            async with self._machine(idle[0]) as held:
                async with self._served(held, name, "", {}) as found:
                    yield found
            return
        job = HostedJob(f"{BASE}{uuid.uuid4().hex}", {}, "true", 60.0, held=HELD)
        async with self._hosted.holding(job) as held:
            if isinstance(held, Placement):
                raise ProviderError(f"No machine could be had to serve {name}: {held.why}")
            async with self._served(held, name, "", {}) as found:
                yield found

    @contextlib.asynccontextmanager
    async def _served(
        self, held: Held, base: str, weights: str, config: Mapping[str, Any]
    ) -> AsyncIterator[ServedModel]:
        engine = self._engine
        port = engine.ports[0] + SLOT_PORTS * held.lease.slot
        length = config.get("seq_len", MAX_SEQ_LEN)
        order = serve_order(engine, base, weights, config, port=port, max_model_len=length)
        async with served(
            held,
            {**library(), "serve.json": order},
            engine.command("server", "serve.json"),
            engine.deadlines.inference,
            bool(config.get("renderer.enable_thinking", False)),
            self._poll,
        ) as found:
            yield found

    def _known(self, handle: JobHandle) -> _Running:
        if handle.job_id not in self._jobs:
            raise JobError(f"This runner has no job {handle.job_id!r}: it was never submitted here, or was released.")
        return self._jobs[handle.job_id]


class _Live:
    """Shows what the supervisor says while it goes on. A step is shown once, when it was trained."""

    def __init__(self, running: _Running) -> None:
        self._running, self._rest = running, b""
        self._steps: dict[int, dict[str, float]] = {}
        self._shown = -1

    def hear(self, said: bytes) -> None:
        self._rest += said
        for event in events(self._rest):
            if event.get("event") == "progress":
                step = int(event["step"])
                known = self._steps.setdefault(step, {"step": step})
                known.update(event["metrics"])
                if event["writer"] == TRAINER and step > self._shown:
                    self._shown = step
                    for listener in tuple(self._running.listeners):
                        try:
                            listener(step, dict(known))
                        except Exception:  # it is for display, and may not end a job
                            logger.exception("A listener of job %s failed.", self._running.job.id)
            elif event.get("event") in ("phase", "guarantee", "preflight"):
                logger.info("Job %s: %s", self._running.job.id, {k: v for k, v in event.items() if k != "time"})
        self._rest = self._rest[self._rest.rfind(b"\n") + 1 :]


def _fetching(path: str, target: BinaryIO) -> Callable[[HostJobs], Awaitable[None]]:
    return lambda host: host.fetch(path, target)


def _heard(result: asyncio.Future[JobResult]) -> None:
    """Nobody may be left to ask."""
    if not result.cancelled():
        result.exception()
