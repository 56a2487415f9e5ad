"""The frozen records that flow through the library. Imports nothing of ours.

Words as in the architecture document: a *family* generates *tasks*; the outer agent works on one task in one
*episode*, hands in *submissions*, and a valid one becomes a *training job* whose *result* is scored on a hidden
*evaluation* and paid by a *reward*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

# --------------------------------------------------------------------------------------------- tasks and items


@frozen
class Item:
    """One problem of a family.

    ``key`` is the canonical name of the problem (two prompts that ask the same thing share it); the hidden class is
    decided on it. ``steps`` are the worked intermediate results, used by partial-credit metrics.
    """

    prompt: str
    answer: str
    steps: tuple[str, ...]
    key: str


@frozen
class TaskLimits:
    """What one job of a task may use. ``seconds`` are busy training seconds by the controller's clock."""

    seconds: float = 20.0
    rollouts: int = 1_280
    attempts: int = 3


@frozen
class Task:
    """One problem distribution drawn from a family, and one outer prompt.

    ``parameters`` are the family's own difficulty knobs (JSON values); ``examples`` are public items.
    """

    id: str
    family: str
    title: str
    brief: str
    parameters: Mapping[str, Any]
    examples: tuple[Item, ...] = ()
    limits: TaskLimits = TaskLimits()


@frozen
class BaseModel:
    """A base model that an agent may choose. ``parameters`` is the number of weights."""

    name: str
    parameters: int
    summary: str = ""
    revision: str = ""


# --------------------------------------------------------------------------------------------- config surface


@frozen
class ConfigKey:
    """One hyperparameter that the agent may set. ``low`` and ``high`` are inclusive."""

    path: str
    type: Literal["int", "float", "str", "bool"]
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    reason: str = ""


@frozen
class ConfigRule:
    """A rule over several keys. ``holds`` gets the resolved config (every key present, dotted paths)."""

    code: str
    holds: Callable[[Mapping[str, Any]], bool]
    message: str
    hint: str


@frozen
class ConfigSurface:
    """The allow-list of what an agent may set in ``[prime_rl]``, with bounds and cross-field rules."""

    keys: tuple[ConfigKey, ...]
    rules: tuple[ConfigRule, ...] = ()

    def defaults(self) -> dict[str, Any]:
        """Every key's default, by dotted path."""
        return {key.path: key.default for key in self.keys}

    def key(self, path: str) -> ConfigKey | None:
        return next((key for key in self.keys if key.path == path), None)


# --------------------------------------------------------------------------------------------- submission


Severity = Literal["error", "warning"]


@frozen
class Finding:
    """One remark of a validation stage: a stable code, what is wrong and where, and how to repair it."""

    code: str
    stage: str
    message: str
    hint: str = ""
    place: str = ""
    severity: Severity = "error"

    def text(self) -> str:
        """One line for the agent or a terminal."""
        place = f"{self.place}: " if self.place else ""
        hint = f" {self.hint}" if self.hint else ""
        return f"[{self.code}] {place}{self.message}{hint}"


def content_hash(files: Mapping[str, bytes]) -> str:
    """SHA-256 (hex) over sorted ``path`` and content digest: the name of a bundle's bytes."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.encode() + b"\0" + hashlib.sha256(files[path]).digest())
    return digest.hexdigest()


@frozen
class Submission:
    """The files that the agent handed in, frozen, with the number of the attempt (from 1)."""

    episode_id: str
    attempt: int
    files: Mapping[str, bytes] = field(repr=False)
    content_hash: str = field(default="")

    @classmethod
    def of(cls, episode_id: str, attempt: int, files: Mapping[str, bytes]) -> Submission:
        return cls(episode_id, attempt, dict(files), content_hash(files))


@frozen
class ValidationReport:
    """Staged verdict on a submission.

    ``config`` is the resolved config (every surface key, dotted), ``configured`` the keys of it that the agent set
    itself, ``rows`` the frozen task rows (one JSON object as text each); all only of a valid submission. ``stage`` is
    the last stage that ran; ``seconds`` are wall seconds.
    """

    valid: bool
    findings: tuple[Finding, ...]
    stage: str
    seconds: float = 0.0
    base_model: str = ""
    config: Mapping[str, Any] = field(factory=dict)
    configured: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(factory=dict)
    rows: tuple[str, ...] = field(default=(), repr=False)
    dropped_rows: int = 0
    content_hash: str = ""

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")

    def text(self) -> str:
        """The findings as the agent sees them."""
        if self.valid:
            return "valid"
        return "invalid\n" + "\n".join(finding.text() for finding in self.errors)


# --------------------------------------------------------------------------------------------- jobs


@frozen
class TrainingJob:
    """A frozen valid submission plus the locked settings: exactly what runs.

    ``id`` is unique per episode; ``content_hash`` names the bytes (equal bytes of two episodes are two jobs).
    ``seed`` is set by the controller, never by the agent.
    """

    id: str
    episode_id: str
    task_id: str
    base_model: str
    files: Mapping[str, bytes] = field(repr=False)
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: tuple[str, ...] = field(repr=False)
    seed: int
    limits: TaskLimits
    content_hash: str


@frozen
class JobHandle:
    """How a runner finds a job again: a small JSON record."""

    job_id: str
    attempt: int = 1
    locator: str = ""


JobStatus = Literal["succeeded", "failed", "cancelled", "lost"]
FailureSide = Literal["agent", "infrastructure"]


@frozen
class JobFailure:
    """Why a job did not succeed. ``side`` is decided on ``evidence`` that agent code can't write."""

    side: FailureSide
    code: str
    message: str
    evidence: str = ""


@frozen
class JobResult:
    """How a job ended.

    ``train_seconds`` are busy seconds by the controller's clock (CPU seconds where jobs share cores), ``wall_seconds``
    from start to end, ``metrics`` one mapping per training step (what the job said of itself: display only).
    """

    job_id: str
    status: JobStatus
    failure: JobFailure | None = None
    steps: int = 0
    train_seconds: float = 0.0
    wall_seconds: float = 0.0
    cost_usd: float = 0.0
    metrics: tuple[Mapping[str, float], ...] = ()
    guarantees: str = ""


# --------------------------------------------------------------------------------------------- evaluation and reward


@frozen
class ItemResult:
    """Score in [0, 1] of one hidden item. ``index`` is its position in the hidden set; the key stays secret."""

    index: int
    score: float
    reply: str


@frozen
class Evaluation:
    """Score of a model on a hidden set of ``n`` items: mean and its standard error, both in [0, 1]."""

    task_id: str
    model: str
    n: int
    mean: float
    stderr: float
    items: tuple[ItemResult, ...] = field(default=(), repr=False)


@frozen
class Baseline:
    """Evaluation of an untrained base model on the same hidden set, plus further items for a tighter mean."""

    base_model: str
    evaluation: Evaluation


@frozen
class Reward:
    """Total and every component, recorded even at weight 0; ``zeros`` gives the reason of each zero component."""

    total: float
    components: Mapping[str, float]
    weights: Mapping[str, float]
    noise_band: float = 0.0
    zeros: Mapping[str, str] = field(factory=dict)


@frozen
class EpisodeOutcome:
    """All that a reward function sees.

    ``attempts`` counts submissions; ``valid_attempt`` is the number of the valid one (``None``: none was).
    ``paired_uplift`` is the mean difference to the best untrained baseline over the items that both answered, and
    ``uplift_stderr`` its standard error; the uplift that is paid is over the baseline's own, tighter mean.
    """

    task: Task
    attempts: int
    valid_attempt: int | None
    report: ValidationReport | None = None
    job: JobResult | None = None
    evaluation: Evaluation | None = None
    baselines: tuple[Baseline, ...] = ()
    paired_uplift: float = 0.0
    uplift_stderr: float = 0.0
    tampered: str = ""

    @property
    def best_baseline(self) -> float:
        """Mean of the best untrained base model; 0 when none was evaluated."""
        return max((b.evaluation.mean for b in self.baselines), default=0.0)

    @property
    def noise_band(self) -> float:
        """1.64 standard errors of the paired uplift: a one-sided 95 % band."""
        return 1.64 * self.uplift_stderr


@frozen
class Scenario:
    """A named outcome that shows what a reward function pays for."""

    name: str
    outcome: EpisodeOutcome


# --------------------------------------------------------------------------------------------- outer policy


@frozen
class ToolCall:
    """One tool call of the agent. ``error`` is set when the text was a broken call."""

    name: str
    arguments: Mapping[str, Any] = field(factory=dict)
    error: str = ""


@frozen
class Message:
    """One message of a conversation. An assistant message keeps the turn that sampled it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    turn: Turn | None = None


@frozen
class SamplingParams:
    """How the outer policy samples. Training needs temperature 1: log-probabilities of another law don't match."""

    temperature: float = 1.0
    max_tokens: int = 256
    seed: int = 0


StopReason = Literal["stop", "length", "context"]


@frozen
class Usage:
    """Tokens that one turn took: ``prompt`` read in all, ``cached`` of them from a cache, ``completion`` sampled."""

    prompt: int
    completion: int
    cached: int = 0


@frozen
class Turn:
    """What a policy said: text and tool calls; for trainers the exact token ids and log-probabilities.

    ``prompt_ids`` [n_prompt] is everything before this turn, ``ids`` [n] what was sampled (the stop token included),
    ``logprobs`` [n] natural log under the sampling policy of version ``policy_version``. ``usage`` is what a paid
    service counted; ``None`` where nobody counts.
    """

    text: str
    calls: tuple[ToolCall, ...]
    stop_reason: StopReason
    policy_version: int
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    ids: tuple[int, ...] = field(default=(), repr=False)
    logprobs: tuple[float, ...] = field(default=(), repr=False)
    usage: Usage | None = None


Prompt = str | Sequence[Message]
"""What an inner model is asked: one user message as text, or a conversation that ends with a user message."""


@frozen
class Segment:
    """A contiguous token sequence of an episode: ``mask[i]`` is true where ``ids[i]`` was sampled by the policy."""

    ids: tuple[int, ...] = field(repr=False)
    mask: tuple[bool, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(repr=False)


EpisodeStatus = Literal["finished", "infrastructure"]


@frozen
class Episode:
    """One outer rollout on one task, finished.

    ``status`` "infrastructure" masks the episode from training. ``policy_versions`` are all versions that sampled in
    it; ``end`` says how the agent stopped (``submitted``, ``attempts``, ``turns``, ``prose``, ``context``); ``post``
    and ``uplift`` are the hidden score of its trained model and the difference to the best untrained one; ``findings``
    are those of integrity checks and reviewers (an error among them is tampering); ``note`` is the reason of an
    infrastructure failure.
    """

    id: str
    group_id: str
    task_id: str
    index: int
    status: EpisodeStatus
    end: str
    messages: tuple[Message, ...] = field(repr=False)
    segments: tuple[Segment, ...] = field(repr=False)
    policy_versions: tuple[int, ...]
    attempts: int
    valid_attempt: int | None
    reports: tuple[ValidationReport, ...] = field(default=(), repr=False)
    job_id: str = ""
    base_model: str = ""
    post: float | None = None
    uplift: float | None = None
    reward: Reward | None = None
    seconds: float = 0.0
    note: str = ""
    findings: tuple[Finding, ...] = ()


@frozen
class EpisodeGroup:
    """The episodes of one task sampled together. ``advantages`` pair with ``episodes``; the loop sets them.

    ``None`` marks an episode that is masked from training (infrastructure failure).
    """

    id: str
    task_id: str
    episodes: tuple[Episode, ...]
    advantages: tuple[float | None, ...]
    degenerate: bool = False


@frozen
class TrainStep:
    """What one update of the outer policy did: the new version and metrics with slash-named keys."""

    version: int
    metrics: Mapping[str, float]
    tokens: int = 0


@frozen
class Checkpoint:
    """A resumable state of an outer trainer.

    ``path`` says where it is: a folder relative to the run folder, or an address that the trainer understands. Empty
    for a policy that does not learn.
    """

    name: str
    path: str
    version: int


@frozen
class Exported:
    """Weights for others: a PEFT adapter or full weights in the Hugging Face layout."""

    path: str
    kind: Literal["adapter", "weights"]


# --------------------------------------------------------------------------------------------- machines and money


@frozen
class PodRequest:
    """What a runner wants of a machine."""

    gpu_types: tuple[str, ...] = ()
    count: int = 1
    cloud: str = ""


@frozen
class Offer:
    """One kind of machine that a provider has. ``slots`` jobs fit on it at a time; ``usd_per_hour`` is its price."""

    id: str
    gpu_type: str
    count: int
    usd_per_hour: float
    slots: int = 1
    available: bool = True


@frozen
class PodSpec:
    """How to create a pod. ``marker`` is our unique name: a create whose answer was lost is found by it."""

    marker: str
    image: str = ""
    env: Mapping[str, str] = field(factory=dict, repr=False)


@frozen
class Pod:
    """A rented machine. ``host`` names the machine below it, where the provider tells: a bad one is avoided later.

    ``root`` is the folder on it that jobs live in.
    """

    id: str
    marker: str
    offer: Offer
    status: Literal["starting", "ready", "unreachable", "terminated"]
    address: str = ""
    host: str = ""
    root: str = "/var/tmp/ai-trains-ai"


@frozen
class Lease:
    """The hold of one job on one slot (counted from 0) of a pod.

    ``begin`` is seconds since the epoch; ``seconds`` is the longest time that the budget was asked for.
    """

    id: str
    pod: Pod
    job_id: str
    slot: int = 0
    begin: float = 0.0
    seconds: float = 0.0


@frozen
class Money:
    """An amount of US dollars."""

    usd: float


@frozen
class Rental:
    """One pod in the run's books, from the intent to rent it to its end. Times are seconds since the epoch.

    ``state`` "intent" means that the provider may or may not have it: the answer to the create was not stored yet.
    ``seen`` is when it was last known to be there.
    """

    marker: str
    provider: str
    offer: Offer
    state: Literal["intent", "alive", "ended"]
    created: float
    seen: float
    pod_id: str = ""


@frozen
class Placement:
    """Where a job runs on rented machines, or how it ended. ``attempt`` counts from 1; ``exit`` is its exit status.

    An "ended" job has its result with the run; a "running" one is on the pod of ``marker``, or was when it was last
    seen. It began at ``began`` (seconds since the epoch) and took ``seconds``; ``why`` says what ended it, when it
    didn't end by itself.
    """

    job_id: str
    attempt: int
    marker: str
    state: Literal["running", "ended"] = "running"
    exit: int | None = None
    began: float = 0.0
    seconds: float = 0.0
    why: str = ""


@frozen
class Charge:
    """One entry of the ledger. ``kind`` says what was used (busy, idle, boot, failed, tokens, storage), ``subject`` by
    what, ``pod`` (a marker) on which machine, if on any.
    """

    kind: str
    subject: str
    quantity: float
    unit: str
    usd: float
    pod: str = ""


@frozen
class Budget:
    """Hard limits of a run: ``usd`` in all, ``usd_per_hour`` of all pods together. ``None`` means unlimited."""

    usd: float | None = None
    usd_per_hour: float | None = None


@frozen
class Guarantees:
    """What a sandbox backend isolates; shown to the user and stored with the run."""

    backend: str
    network: bool
    files: bool
    processes: bool
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        held = [n for n, on in (("network", self.network), ("files", self.files), ("processes", self.processes)) if on]
        return f"{self.backend} ({', '.join(held) or 'nothing'} isolated)"


@frozen
class Limits:
    """Caps of one sandboxed run."""

    wall_seconds: float = 20.0
    cpu_seconds: int = 15
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    processes: int = 32
    open_files: int = 256
    output_bytes: int = 64 << 10
    result_bytes: int = 16 << 20


SandboxOutcome = Literal[
    "exited",
    "signalled",
    "timeout",
    "cpu_limit",
    "memory_limit",
    "output_limit",
    "result_limit",
    "cancelled",
    "sandbox_error",
]


@frozen
class SandboxResult:
    """How a sandboxed run ended. ``frames`` and ``output`` are untrusted bytes; the rest is the trusted side's word."""

    outcome: SandboxOutcome
    code: int | None = None
    frames: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    output: bytes = field(default=b"", repr=False)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    detail: str = ""


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float]:
    """Sample mean and its standard error (0 for fewer than two values)."""
    n = len(values)
    if n == 0:
        return 0.0, 0.0
    mean = sum(values) / n
    if n < 2:
        return mean, 0.0
    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    return mean, (variance / n) ** 0.5
