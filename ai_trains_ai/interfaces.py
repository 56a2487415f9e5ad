"""The interfaces that everything is built behind. Async where something waits, sync where something computes.

Subclass one in a notebook cell and pass the class or an instance to `Experiment`: nothing needs packaging or
registering. Each docstring states who owns what, what may run at once, what may be called twice, units, and errors;
`ai_trains_ai.testing` has contract test classes that check it (`ServedModel` is tested with runners, `Transport` with
providers; `IntegrityCheck` has none). Signatures are pinned by ``tests/test_signatures.py``.

Unless a docstring says otherwise: the run makes one instance, calls it from one event loop, and closes what it
started, also after an error. Seconds are wall seconds, money is US dollars. An error of `ai_trains_ai.errors` is
understood by the loop; anything else that a part raises ends the run and comes out as itself.
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
    Finding,
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
    Prompt,
    Reward,
    SamplingParams,
    SandboxResult,
    Scenario,
    Submission,
    Task,
    TaskLimits,
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
    and returns at once; ``secret(name)`` gives an environment variable's value, which never goes into a record, an
    event or a message; ``fleet(provider)`` gives the pool of machines of a provider, one per provider and run. A part
    that spends asks ``ledger.require`` before and books with ``ledger.charge`` after.
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


# ------------------------------------------------------------------------------------------ the outer agent


class Policy(ABC):
    """A frozen snapshot of an outer policy: it keeps its ``version`` and its weights while a newer one is trained.

    Valid until the `OuterPolicy` that made it is closed.
    """

    version: int

    @abstractmethod
    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        """Sample the next assistant turn.

        Called from many episodes at once; a policy batches as it likes. A cancelled call must leave the others alone.

        Args:
            conversation: ends with a message that isn't the assistant's. Assistant messages carry the `Turn` that
                sampled them; a trainer's policy extends its token ids exactly (token in, token out). The tool messages
                after an assistant's are the answers to its calls, in order.
            tools: JSON-schema descriptions of the tools, as in chat APIs.
            params: temperature, longest turn in tokens, and a seed that need not be honoured.

        Returns:
            The turn, with ``policy_version`` of this snapshot. For a trainer: ``prompt_ids``, ``ids`` and ``logprobs``
            (natural logarithms, one per id). A conversation that doesn't fit the context gives a turn with
            ``stop_reason="context"``. A broken tool call is a `ToolCall` with ``error``, never an exception.

        Raises:
            PolicyError: it can't sample. The episode is masked from training as an infrastructure failure.
        """


class OuterPolicy(ABC):
    """An agent that acts. Enough for evaluation; an `OuterTrainer` adds learning.

    Owns its model, its connections and what it spends: a paid service is asked through ``run.ledger``.
    """

    async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
        """Load the model, from ``checkpoint`` on resume. Called once a run, before anything else.

        Raises:
            ConfigurationError, PolicyError: the model can't be loaded. The run then doesn't start.
        """

    @abstractmethod
    async def snapshot(self) -> Policy:
        """The newest published policy, frozen. Cheap, and the same one until a `OuterTrainer.train_step`.

        Called while other snapshots are in use; those stay valid until `close`.
        """

    async def close(self) -> None:
        """Release what `start` took. Idempotent; also called when `start` failed."""


class OuterTrainer(OuterPolicy):
    """Owns the outer policy: samples from it and improves it. Rendering and parsing of tokens stay inside."""

    @abstractmethod
    async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
        """One policy-gradient update on ``groups`` and publication of the next version.

        Called by one task at a time, while `Policy.act` goes on elsewhere. All or nothing: either the version rises by
        one, also when there was nothing to learn from, or the call raises and the policy is as it was.

        Args:
            groups: episodes with advantages. Those with advantage ``None`` and degenerate groups are left out of the
                update. ``Episode.segments`` hold token ids [n], the mask of sampled ones [n] and log-probabilities
                [n] under ``Episode.policy_versions``, which may be older than the newest.

        Returns:
            The new version, finite metrics with slash-named keys (``outer/kl``, …), and the tokens trained on.

        Raises:
            PolicyError: a batch that can't be trained on, for instance a gradient that is not finite. The loop skips
                the step. Whatever else is raised (`Transient`: a service that is down) ends the run; nothing is lost,
                and resumed it trains on the same episodes.
        """

    @abstractmethod
    async def save(self, name: str) -> Checkpoint:
        """Keep weights and optimizer under ``name``, atomically: a crash leaves no half checkpoint.

        Called after every `train_step`. Idempotent: the same name again replaces what it named. A trainer may drop the
        optimizer of old checkpoints, never that of the newest two.

        Raises:
            StorageError, PolicyError: it can't be kept. The run stops; the last stored step stands.
        """

    @abstractmethod
    async def export(self, checkpoint: Checkpoint, folder: Path) -> Exported:
        """Write the weights of ``checkpoint`` into ``folder`` for others, in the Hugging Face layout.

        Idempotent. ``Exported.kind`` says whether it is a PEFT adapter or full weights.

        Raises:
            PolicyError, StorageError: the checkpoint is gone, or the disk refuses.
        """


# ------------------------------------------------------------------------------------------ the inner jobs


class ServedModel(ABC):
    """A model that answers prompts. Valid inside the context of `InnerJobRunner.serve` alone."""

    @abstractmethod
    async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
        """One reply per prompt, in order. The same prompts with the same ``params`` get the same replies.

        A prompt is the text of one user message, or a conversation that ends with one; the base model's own chat
        template is applied, where it has one.

        Raises:
            SandboxError, ProviderError: the server is gone. The episode is masked as an infrastructure failure.
        """


class InnerJobRunner(ABC):
    """Runs training jobs and serves models; never scores them. Owns retries of infrastructure failures.

    Owns its processes and its leases on machines. A runner that needs machines takes ``provider=`` and gets its pool
    from ``run.fleet(provider)``, which books what they cost.

    ``provider`` is whom it rents from, ``None`` when its jobs run on this machine; ``request`` is what it rents.

    ``sandbox_preload`` names modules ("module" or "module:function") that the run's sandbox should import before its
    first run, because jobs of this runner need them there; what validation needs is there in any case.
    """

    provider: GPUProvider | None = None
    request: PodRequest = PodRequest()
    sandbox_preload: ClassVar[Sequence[str]] = ()

    async def start(self, run: RunContext) -> None:
        """Called once a run, before anything else; a runner that was closed may be started for another run.

        Raises:
            NoCapacity, SandboxUnavailable, ConfigurationError: it can't run jobs here. The run then doesn't start.
        """

    @abstractmethod
    def config_surface(self) -> ConfigSurface:
        """What the agent may set; bounds hold on the weakest machine that the runner's arguments admit.

        Asked before `start`, too, and always the same.
        """

    @abstractmethod
    def base_models(self) -> Sequence[BaseModel]:
        """The base models that a job may name, at least one. Asked before `start`, too, and always the same."""

    def limits(self, limits: TaskLimits) -> TaskLimits:
        """What a job of a task may use with this runner; ``limits`` are the family's own, and the default.

        Asked before `start`, too, and always the same. The agent is told, and validation keeps it.
        """
        return limits

    @abstractmethod
    def capacity(self) -> int:
        """Jobs worth having in flight, at least 1; a hint to the loop, not a limit. Known after `start`."""

    @abstractmethod
    async def submit(self, job: TrainingJob) -> JobHandle:
        """Start ``job`` or queue it; returns at once. Called from many episodes at once.

        A job that has ended may keep its machine until `release`, and others then wait for it.

        Idempotent by ``job.id``: a second call gives a handle of the same job and starts nothing. The caller has
        stored the intent before. The handle's ``locator`` may be empty; what a runner needs beyond the job's id to
        find it again, it keeps itself.

        Raises:
            BudgetExceeded: nothing was started. A runner that takes its machine later raises it from `wait`.
        """

    @abstractmethod
    async def wait(
        self, handle: JobHandle, on_event: Callable[[int, Mapping[str, float]], None] | None = None
    ) -> JobResult:
        """Wait for the end; after it, the same result again until `release`.

        Several callers may wait for one job. Cancelling a wait leaves the job alone and ends its calls of ``on_event``.

        A job's own failure is a result, not an exception, and so is the end of retries (status "lost").
        ``JobFailure.side`` is decided on evidence that agent code can't write. ``on_event(step, metrics)`` is display.

        Raises:
            JobError: this runner doesn't know the handle.
        """

    async def attach(self, handle: JobHandle) -> JobHandle | None:
        """Find a job again after a restart of this process; ``None`` when it is gone. Starts nothing. Idempotent."""
        return None

    @abstractmethod
    async def cancel(self, handle: JobHandle) -> None:
        """End the job; `wait` then returns status "cancelled". Idempotent; a job that has ended keeps its result.

        Raises:
            JobError: this runner doesn't know the handle.
        """

    @abstractmethod
    def serve(self, model: BaseModel | JobHandle) -> AbstractAsyncContextManager[ServedModel]:
        """Serve a base model or a job's trained weights, in a process that never held agent code.

        Several models may be served at once. A job's weights stay until `release`.

        Raises:
            JobError: the job is unknown, or has no weights (it failed, or was released).
        """

    @abstractmethod
    async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
        """Give up a job's lease and its weights; a running job is ended. Idempotent, also for unknown handles.

        ``keep_weights`` keeps them as ``artifacts/<job id>/model.safetensors`` in the run folder first.
        """

    async def close(self, drain: bool = True) -> None:
        """Release machines. ``drain`` waits for running jobs, else they are cancelled.

        Idempotent; also called when `start` was not, or failed. Jobs of a closed run are unknown to the next one.
        """


# ------------------------------------------------------------------------------------------ machines


class Transport(ABC):
    """Commands and files on one machine. Several calls may run at once.

    A connection that breaks is re-made inside, with back-off; only what can't be mended comes out.
    """

    @abstractmethod
    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> tuple[int | None, bytes]:
        """Exit status and output (both streams) of a command, without a shell in between.

        Status ``None`` is a lost connection or ``timeout`` (seconds) run out, never success; the command may still be
        running. A program that doesn't exist gives status 127, as a shell does.
        """

    @abstractmethod
    async def put(self, files: Mapping[str, bytes], folder: str) -> None:
        """Write files below ``folder``, each replaced whole. Idempotent. Raises `Transient` when it can't."""

    @abstractmethod
    async def get(self, path: str, limit: int) -> bytes:
        """One whole file of at most ``limit`` bytes.

        Raises:
            TransportError: there is no such file, or it is larger.
            Transient: the machine can't be reached.
        """

    @abstractmethod
    async def tail(self, path: str, offset: int, limit: int = 1 << 20) -> bytes:
        """At most ``limit`` bytes from byte ``offset`` on; empty at the end, and where the file isn't there yet."""

    @abstractmethod
    def forward(self, port: int) -> AbstractAsyncContextManager[int]:
        """A port on 127.0.0.1 here that leads to ``port`` on the machine's own 127.0.0.1, inside the context."""

    async def close(self) -> None:
        """Idempotent."""


class GPUProvider(ABC):
    """Rents machines. Knows nothing of jobs, and keeps no state that a crash would lose.

    Owns its connection to the service, not the pods: the fleet terminates those. Calls may run at once. Every call has
    a deadline of its own.

    Errors of every call: `Forbidden` (the key), `OutOfFunds` (the account), `Transient` (worth a retry).

    ``max_pods`` is how many pods a fleet may keep at a time. ``listing_lag`` is for how many seconds a new pod may be
    missing in `list`: after a crash a create without an answer is looked for as long, and nothing is rented meanwhile.
    """

    max_pods: int = 1
    listing_lag: float = 180.0

    @abstractmethod
    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        """Machines of the wanted kind with price per hour and availability; empty when there is none of that kind."""

    @abstractmethod
    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        """Rent one. It costs money from now on. Never retried inside.

        ``spec.marker`` becomes its name and is unique. ``Pod.offer`` carries the price that is really charged.

        Raises:
            NoCapacity: nothing of this offer is free now; nothing was created.
            AmbiguousCreate: the answer was lost. The caller looks for the marker before it tries again.
        """

    @abstractmethod
    async def get(self, pod_id: str) -> Pod | None:
        """A pod's state now. ``None``: it doesn't exist any more, or never did."""

    @abstractmethod
    async def list(self, marker: str) -> Sequence[Pod]:
        """All of this account whose marker starts with ``marker`` and that still cost money; never a foreign one."""

    @abstractmethod
    async def terminate(self, pod_id: str) -> None:
        """End it; it is no longer listed afterwards. Idempotent: a pod that is gone, or never was, is success."""

    @abstractmethod
    async def connect(self, pod: Pod) -> Transport:
        """A way into the pod. The caller closes it.

        Raises:
            Transient: not reachable (yet).
        """

    async def logs(self, pod_id: str) -> AsyncIterator[str]:
        """Boot diagnosis, line by line; may be empty."""
        nothing: tuple[str, ...] = ()
        for line in nothing:
            yield line

    async def billed(self, since: datetime, pod_ids: Sequence[str] | None = None) -> Money | None:
        """The provider's own bill since a moment, where it has one: an alarm, never the ledger.

        Of these pods alone; ``None``: of the whole account, foreign pods included.
        """
        return None

    def end_command(self, pod: Pod) -> str:
        """What the pod's dead-man switch runs in a shell on it, to end it from within; empty: its jobs end, no more."""
        return ""

    async def close(self) -> None:
        """Close the connection to the service; pods stay. Idempotent."""


# ------------------------------------------------------------------------------------------ what is paid, and for what


class RewardFn(ABC):
    """Pays episodes. Pure: the same outcome gives the same reward, in any order, and is left as it was."""

    @abstractmethod
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        """Pay an episode: a finite total, every component by name (also those of weight 0, and the same names for
        every outcome), their weights, and in ``zeros`` why a component earned nothing.

        Gets every kind of outcome: nothing submitted, invalid, failed, evaluated. Raises on none of them; what it does
        raise ends the run.
        """

    def scenarios(self) -> Sequence[Scenario]:
        """ "What would score what", from worst to best; shown in docs and tested for order."""
        return ()


class IntegrityCheck(ABC):
    """Looks for cheating in what an episode handed in and came to, before it is paid. Pure, and fast."""

    @abstractmethod
    def __call__(self, submission: Submission, outcome: EpisodeOutcome) -> Sequence[Finding]:
        """Findings, empty when there is nothing to say. One of severity "error" is tampering, a warning is kept.

        Called once for each episode whose job ended. What it raises is counted as a failure of the check and shown.
        """


class TaskFamily(ABC):
    """A generator of tasks of one kind, and of their items. Stateless; all randomness is passed in.

    ``name`` is unique among families, ``summary`` one line.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """The tasks of this family, with public examples. At least one, always the same, ids unique."""

    @abstractmethod
    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        """``n`` items with distinct keys: all of the hidden class when ``hidden``, else none of it.

        The class is decided by `ai_trains_ai.families.hidden.reserved` on the item's key. The same generator state
        gives the same items.

        Raises:
            ConfigurationError: the task has too few distinct items.
        """

    @abstractmethod
    def item(self, prompt: str) -> Item | None:
        """Read and solve a prompt of this family, whoever wrote it; ``None`` when the text isn't one."""

    @abstractmethod
    def gold(self, item: Item) -> str:
        """A complete right reply to ``item``; `score` and `partial` give it 1."""

    @abstractmethod
    def score(self, item: Item, reply: str) -> float:
        """The exact metric, in [0, 1]. Takes any text."""

    @abstractmethod
    def partial(self, item: Item, reply: str) -> float:
        """The partial-credit metric, in [0, 1]; at least `score`. Takes any text."""


# ------------------------------------------------------------------------------------------ where untrusted code runs


class Sandbox(ABC):
    """Runs untrusted code in throw-away children. Only data comes out; every verdict is made by the caller.

    Owns its backend and every process below it. ``guarantees`` says what it isolates, and is true. Whatever it
    isolates, a child sees nothing of this process's environment variables.
    """

    guarantees: Guarantees

    @abstractmethod
    def preload(self, *targets: str) -> None:
        """Import these before the first run ("module", or "module:function" to call). Called before `start`."""

    @abstractmethod
    def another(self, preload: Sequence[str] = ()) -> Sandbox:
        """A second, separate instance of the same backend, not started: for work apart from agent code.

        The caller owns it, and starts and closes it.
        """

    @abstractmethod
    async def start(self) -> None:
        """Start the backend. Idempotent.

        Raises:
            SandboxUnavailable: with the reason and the fix.
        """

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
        in ``on_frame`` and in the result; they are untrusted. Called concurrently; the caller bounds how many. A limit
        that was hit, a crash and a non-zero exit are outcomes. When the awaiting task is cancelled the child is killed.

        Raises:
            SandboxError: the sandbox itself broke, or is closed; nobody's verdict.
        """

    @abstractmethod
    async def close(self) -> None:
        """Kill every child and the backend. Idempotent; also called on one that never started."""


# ------------------------------------------------------------------------------------------ where metrics go


class Tracker(ABC):
    """Where metrics go. One instance a run; `log` is called in step order from one task.

    What it raises ends the run: a tracker that may lose its connection keeps that to itself.
    """

    def open(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        """Called once a session, also on resume, when steps that were logged before come again.

        Args:
            folder: the run folder.
            run: the run's name.
            config: what the run was started with; plain values.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Slash-named keys, finite values. Must return fast: the loop waits. Leaves ``metrics`` as it is."""

    def close(self) -> None:
        """Flush. Idempotent; also called when the run failed."""
