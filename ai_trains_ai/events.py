"""What happens in a run, as frozen records. Observers get them in order; they can't change the run."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from ai_trains_ai.records import (
    Baseline,
    Charge,
    Checkpoint,
    Episode,
    Evaluation,
    Finding,
    JobResult,
    TrainStep,
    ValidationReport,
)


@frozen
class Event:
    """Base of all events. ``time`` is seconds since the epoch by the run's clock."""

    time: float = field(kw_only=True, default=0.0)


@frozen
class RunStarted(Event):
    """``plugins`` are the loaded ones beyond the built-ins, as "name (distribution version)"; ``folder`` its path."""

    run: str
    sandbox: str
    resumed: bool = False
    plugins: tuple[str, ...] = ()
    folder: str = ""


@frozen
class BaselineMeasured(Event):
    baseline: Baseline


@frozen
class StepStarted(Event):
    step: int


@frozen
class HealthWarning(Event):
    """A metric of a step is beyond its threshold; ``text`` says what that means and what helps."""

    step: int
    text: str


@frozen
class Stalled(Event):
    """Nothing has happened for long; ``text`` says what the run waits for."""

    text: str


@frozen
class ProbeFinished(Event):
    """Held-out tasks under the policy as it was after ``step`` updates."""

    step: int
    metrics: Mapping[str, float]


@frozen
class EpisodeStarted(Event):
    episode_id: str
    task_id: str
    policy_version: int


@frozen
class SubmissionValidated(Event):
    episode_id: str
    attempt: int
    report: ValidationReport


@frozen
class JobStarted(Event):
    job_id: str
    episode_id: str
    base_model: str


@frozen
class JobProgress(Event):
    """``metrics`` come from the job itself: to look at, never to pay on."""

    job_id: str
    step: int
    metrics: Mapping[str, float]


@frozen
class JobFinished(Event):
    result: JobResult


@frozen
class Evaluated(Event):
    evaluation: Evaluation
    job_id: str = ""


@frozen
class IntegrityFound(Event):
    """What a check or a reviewer has against an episode; tampering when its severity is "error"."""

    episode_id: str
    finding: Finding


@frozen
class Charged(Event):
    charge: Charge


@frozen
class EpisodeFinished(Event):
    episode: Episode


@frozen
class StepFinished(Event):
    step: int
    train: TrainStep
    metrics: Mapping[str, float] = field(factory=dict)


@frozen
class CheckpointSaved(Event):
    checkpoint: Checkpoint


@frozen
class RunStopped(Event):
    """The run ended before its last step: stopped by the user, out of budget, or broken. It can be resumed."""

    steps: int
    reason: str


@frozen
class RunFinished(Event):
    steps: int
    seconds: float
