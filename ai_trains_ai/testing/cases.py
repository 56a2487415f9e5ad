"""The kinds of outcome that a reward is given, as records that a run could have made."""

from __future__ import annotations

from copy import deepcopy

from attrs import evolve

from ai_trains_ai.evaluation.hidden import paired_difference
from ai_trains_ai.records import (
    Baseline,
    EpisodeOutcome,
    Evaluation,
    Finding,
    Item,
    ItemResult,
    JobFailure,
    JobResult,
    Task,
    TaskLimits,
    ValidationReport,
    mean_and_stderr,
)

_N = 64
_TASK = Task(
    id="sums-2",
    family="sums",
    title="Sums of two digits",
    brief="Add two digits. Reply with the sum.",
    parameters={"terms": 2},
    examples=(Item("3 + 4 =", "7", ("7",), "sums: 3 + 4"),),
    limits=TaskLimits(seconds=20.0, rollouts=1_280, attempts=3),
)
_VALID = ValidationReport(
    valid=True,
    findings=(Finding("few-rows", "sanity", "only 64 rows", severity="warning"),),
    stage="sanity",
    seconds=0.8,
    base_model="small",
    config={"max_steps": 16, "optim.lr": 1e-3},
    configured=("max_steps",),
    environment={"taskset": "Sums"},
    rows=('{"prompt": "3 + 4 =", "answer": "7"}',),
    content_hash="5f" * 32,
)
_INVALID = ValidationReport(
    valid=False,
    findings=(Finding("import-fails", "load", "No module named 'nump'", "Import numpy.", "environment.py:1"),),
    stage="load",
    seconds=0.2,
)
_DONE = JobResult(
    job_id="job-1",
    status="succeeded",
    steps=16,
    train_seconds=5.0,
    wall_seconds=6.5,
    cost_usd=0.02,
    metrics=({"reward/mean": 0.2, "loss": 0.1}, {"reward/mean": 0.6, "loss": 0.05}),
    guarantees="bubblewrap (network, files, processes isolated)",
)


def outcomes() -> tuple[tuple[str, EpisodeOutcome], ...]:
    """Every kind by name: nothing submitted, invalid, failed on either side, evaluated in several ways, tampered."""
    nothing = EpisodeOutcome(_TASK, 0, None, baselines=_baselines())
    crashed = JobFailure("agent", "job-crashed", "the reward function raised ZeroDivisionError", "exit record: 1")
    broken = JobFailure("infrastructure", "sandbox-error", "the sandbox's server died", "server: signal 9")
    lost = JobFailure("infrastructure", "lost", "the machine was gone after 3 attempts", "provider: terminated")
    better = _evaluated(48)
    kinds = (
        ("nothing submitted", nothing),
        ("every attempt invalid", evolve(nothing, attempts=3, report=_INVALID)),
        ("valid, the job failed by the agent's fault", _failed("failed", crashed)),
        ("valid, the job failed by the infrastructure's fault", _failed("failed", broken)),
        ("valid, the job was lost", _failed("lost", lost)),
        ("valid, the job was cancelled", _failed("cancelled", None)),
        ("trained, worse than untrained", _evaluated(3)),
        ("trained, flat", _evaluated(11)),
        ("trained, nothing right", _evaluated(0)),
        ("trained, better", better),
        ("trained, better, valid at the second attempt", evolve(better, attempts=2, valid_attempt=2)),
        ("trained, better, valid at the third attempt", evolve(better, attempts=3, valid_attempt=3)),
        ("trained, perfect", _evaluated(_N)),
        ("trained, better, without baselines", _evaluated(48, baselines=())),
        ("trained, better, all of its time used", evolve(better, job=evolve(_DONE, train_seconds=20.0))),
        ("trained, better, tampered", evolve(better, tampered="forged frame")),
    )
    # whoever changes a mapping in one changes no other, and none of the next call
    return tuple((name, deepcopy(outcome)) for name, outcome in kinds)


def _failed(status: str, failure: JobFailure | None) -> EpisodeOutcome:
    job = JobResult("job-1", status, failure, steps=2, train_seconds=1.0, wall_seconds=2.0)  # type: ignore[arg-type]
    return EpisodeOutcome(_TASK, 1, 1, _VALID, job, None, _baselines())


def _evaluated(right: int, baselines: tuple[Baseline, ...] | None = None) -> EpisodeOutcome:
    baselines = _baselines() if baselines is None else baselines
    evaluation = _evaluation("small", right, _N)
    paired, stderr = paired_difference(evaluation, baselines)
    return EpisodeOutcome(_TASK, 1, 1, _VALID, _DONE, evaluation, baselines, paired, stderr)


def _baselines() -> tuple[Baseline, ...]:
    return (Baseline("tiny", _evaluation("tiny", 8, 2 * _N)), Baseline("small", _evaluation("small", 22, 2 * _N)))


def _evaluation(model: str, right: int, n: int) -> Evaluation:
    """``right`` of ``n`` items solved, spread evenly."""
    scores = [float((index + 1) * right // n - index * right // n) for index in range(n)]
    items = tuple(ItemResult(index, score, " 7" if score else " 5") for index, score in enumerate(scores))
    mean, stderr = mean_and_stderr(scores)
    return Evaluation(_TASK.id, model, n, mean, stderr, items)
