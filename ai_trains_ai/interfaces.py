"""The interfaces that everything is built behind. Async where something waits, sync where something computes.

Each docstring states ownership, concurrency and errors. Subclass one in a notebook cell and pass an instance to
`Experiment`: nothing needs packaging or registering.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define

from ai_trains_ai.events import Event
from ai_trains_ai.records import (
    BaseModel,
    Budget,
    Checkpoint,
    ConfigSurface,
    EpisodeGroup,
    EpisodeOutcome,
    Exported,
    Guarantees,
    Item,
    JobHandle,
    JobResult,
    Limits,
    Message,
    Money,
    Offer,
    Pod,
    PodRequest,
    PodSpec,
    Reward,
    SamplingParams,
    SandboxResult,
    Scenario,
    Task,
    TrainingJob,
    TrainStep,
    Turn,
)

if TYPE_CHECKING:
    import random

    from ai_trains_ai.fleet import Fleet, Ledger
    from ai_trains_ai.store import Store


@define
class RunContext:
    """What a run lends to its parts. Owned by the loop; parts keep a reference and never close anything in it.

    ``clock`` gives seconds since the epoch; ``rng`` is seeded by the run; ``emit`` hands an event to the observers
    and returns at once; ``fleet(provider)`` gives the pool of machines of a provider, one per provider and run.
    """

    folder: Path
    seed: int
    store: Store
    ledger: Ledger
    budget: Budget
    clock: Callable[[], float]
    rng: random.Random
    emit: Callable[[Event], None]
    sandbox: Sandbox
    secret: Callable[[str], str]
    fleet: Callable[[GPUProvider], Fleet]


class Policy(ABC):
    """A frozen snapshot of an outer policy."""

    version: int

    @abstractmethod
    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        """Sample the next assistant turn.

        Safe to call from many episodes at once; a policy batches as it likes. ``conversation`` ends with a message
        that isn't the assistant's. Assistant messages carry the `Turn` that sampled them, whose token ids the policy
        must extend exactly (token in, token out). Raises `PolicyError` when it can't sample; a conversation that
        doesn't fit the context gives a turn with ``stop_reason="context"`` instead.
        """


class OuterPolicy(ABC):
    """An agent that acts. Enough for evaluation; an `OuterTrainer` adds learning."""

    async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
        """Load the model, from ``checkpoint`` on resume. Called once, before anything else."""

    @abstractmethod
    async def snapshot(self) -> Policy:
        """The newest published policy, frozen. Cheap to call again; snapshots in use stay valid until `close`."""

    async def close(self) -> None:
        """Release what `start` took. Idempotent."""


class OuterTrainer(OuterPolicy):
    """Owns the outer policy: samples from it and improves it. Rendering and parsing of tokens stay inside."""

    @abstractmethod
    async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
        """One policy-gradient update on ``groups`` and publication of the next version.

        Called by one task at a time, while `Policy.act` goes on elsewhere. Episodes with advantage ``None`` and
        degenerate groups are left out. Raises `PolicyError` on non-finite gradients; the policy is then unchanged.
        """

    @abstractmethod
    async def save(self, name: str) -> Checkpoint:
        """Write weights and optimizer under the run folder, atomically: a crash leaves no half checkpoint."""

    @abstractmethod
    async def export(self, checkpoint: Checkpoint, folder: Path) -> Exported:
        """Write weights for others into ``folder`` in the Hugging Face layout."""


class ServedModel(ABC):
    """A model that answers prompts. Valid inside the context of `InnerJobRunner.serve` alone."""

    @abstractmethod
    async def sample(self, prompts: Sequence[str], params: SamplingParams) -> list[str]:
        """One reply per prompt, in order. Deterministic in ``params.seed`` and the prompt's position."""


class InnerJobRunner(ABC):
    """Runs training jobs and serves models; never scores them. Owns retries of infrastructure failures.

    ``sandbox_preload`` names modules ("module" or "module:function") that the run's sandbox should import before its
    first run, because validation or jobs of this runner need them there.
    """

    sandbox_preload: ClassVar[Sequence[str]] = ()

    async def start(self, run: RunContext) -> None:
        """Called once, before anything else."""

    @abstractmethod
    def config_surface(self) -> ConfigSurface:
        """What the agent may set; bounds hold on the weakest machine that this run admits."""

    @abstractmethod
    def base_models(self) -> Sequence[BaseModel]:
        """The base models that a job may name."""

    @abstractmethod
    def capacity(self) -> int:
        """Jobs worth having in flight."""

    @abstractmethod
    async def submit(self, job: TrainingJob) -> JobHandle:
        """Start ``job`` or queue it. Idempotent by ``job.id``. Returns at once."""

    @abstractmethod
    async def wait(
        self, handle: JobHandle, on_event: Callable[[int, Mapping[str, float]], None] | None = None
    ) -> JobResult:
        """Wait for the end. A job's own failure is a result, not an exception; ``on_event(step, metrics)`` is display.

        Raises `JobError` for a handle that this runner doesn't know.
        """

    async def attach(self, handle: JobHandle) -> JobHandle | None:
        """Find a job again after a restart of this process; ``None`` when it is gone."""
        return None

    @abstractmethod
    async def cancel(self, handle: JobHandle) -> None:
        """End the job; `wait` then returns status "cancelled". Idempotent."""

    @abstractmethod
    def serve(self, model: BaseModel | JobHandle) -> AbstractAsyncContextManager[ServedModel]:
        """Serve a base model or a job's trained weights, in a process that never held agent code."""

    @abstractmethod
    async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
        """Give up a job's lease; its weights go too unless ``keep_weights``. Idempotent."""

    async def close(self, drain: bool = True) -> None:
        """Release machines. ``drain`` waits for running jobs, else they are cancelled."""


class Transport(ABC):
    """A shell on one machine."""

    @abstractmethod
    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> tuple[int | None, bytes]:
        """Exit status and output; status ``None`` is a lost connection, never success."""

    @abstractmethod
    async def put(self, files: Mapping[str, bytes], folder: str) -> None:
        """Write files below ``folder``, replaced whole."""

    @abstractmethod
    async def get(self, path: str, limit: int) -> bytes:
        """Read one file of at most ``limit`` bytes."""

    async def close(self) -> None:
        """Idempotent."""


class GPUProvider(ABC):
    """Rents machines. Knows nothing of jobs. Errors: NoCapacity, AmbiguousCreate, Forbidden, OutOfFunds, Transient."""

    @abstractmethod
    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        """Machines of the wanted kind with price per hour and availability."""

    @abstractmethod
    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        """Rent one. ``spec.marker`` becomes its name; when the answer is lost raise `AmbiguousCreate`."""

    @abstractmethod
    async def get(self, pod_id: str) -> Pod | None:
        """``None``: it doesn't exist any more."""

    @abstractmethod
    async def list(self, marker: str) -> Sequence[Pod]:
        """All of ours whose marker starts with ``marker``."""

    @abstractmethod
    async def terminate(self, pod_id: str) -> None:
        """Idempotent; a pod that is gone is success."""

    @abstractmethod
    async def connect(self, pod: Pod) -> Transport:
        """A shell on the pod."""

    async def logs(self, pod_id: str) -> AsyncIterator[str]:
        """Boot diagnosis; may be empty."""
        nothing: tuple[str, ...] = ()
        for line in nothing:
            yield line

    async def billed(self, since: datetime) -> Money | None:
        """The provider's own bill, where it has one."""
        return None

    async def close(self) -> None:
        """Idempotent."""


class RewardFn(ABC):
    """Pure: the same outcome gives the same reward."""

    @abstractmethod
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        """Pay an episode. Never raises on a recorded outcome."""

    def scenarios(self) -> Sequence[Scenario]:
        """ "What would score what", from worst to best; shown in docs and tested for order."""
        return ()


class TaskFamily(ABC):
    """A generator of tasks of one kind, and of their items. Stateless; all randomness is passed in."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """The tasks of this family, with public examples."""

    @abstractmethod
    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        """``n`` items with distinct keys: all of the hidden class when ``hidden``, else none of it."""

    @abstractmethod
    def item(self, prompt: str) -> Item | None:
        """Read and solve a prompt of this family, whoever wrote it; ``None`` when the text isn't one."""

    @abstractmethod
    def gold(self, item: Item) -> str:
        """A complete right reply to ``item``."""

    @abstractmethod
    def score(self, item: Item, reply: str) -> float:
        """The exact metric, in [0, 1]."""

    @abstractmethod
    def partial(self, item: Item, reply: str) -> float:
        """The partial-credit metric, in [0, 1]; at least `score`."""


class Sandbox(ABC):
    """Runs untrusted code in throw-away children. Only data comes out; every verdict is made by the caller."""

    guarantees: Guarantees

    def preload(self, *targets: str) -> None:
        """Import these before the first run ("module", or "module:function" to call). Call it before `start`."""

    @abstractmethod
    def another(self, preload: Sequence[str] = ()) -> Sandbox:
        """A second, separate instance of the same backend, not started: for work apart from agent code."""

    @abstractmethod
    async def start(self) -> None:
        """Start the backend. Raises `SandboxUnavailable` with the reason and the fix. Idempotent."""

    @abstractmethod
    async def run(
        self,
        target: str,
        payload: bytes,
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits = Limits(),
        on_frame: Callable[[str, bytes], None] | None = None,
    ) -> SandboxResult:
        """Call ``target`` ("module:function" of ours) as ``function(payload, channel)`` in a fresh jailed child.

        The child's working folder is a private copy of ``files``. ``channel.send(kind, data)`` frames arrive in order
        in ``on_frame`` and in the result; they are untrusted. Safe to call concurrently; the caller bounds how many.
        A limit that was hit, a crash and a non-zero exit are outcomes; `SandboxError` means the sandbox itself broke.
        When the awaiting task is cancelled the child is killed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Kill every child and the backend. Idempotent."""


class Tracker(ABC):
    """Where metrics go. One instance a run; `log` is called in step order from one task."""

    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        """Called once, also on resume."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Slash-named keys, finite values. Must return fast."""

    def close(self) -> None:
        """Idempotent."""
