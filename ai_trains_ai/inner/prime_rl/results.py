"""From what the supervisor left in a job's result to how the job ended, and why."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve

from ai_trains_ai.fleet import Held
from ai_trains_ai.inner.prime_rl import rules
from ai_trains_ai.inner.prime_rl.failures import Evidence, Verdict, classify
from ai_trains_ai.inner.prime_rl.pod.metrics import progress
from ai_trains_ai.inner.prime_rl.profiles import Profile
from ai_trains_ai.records import JobResult, JobStatus, Placement, TrainingJob

logger = logging.getLogger(__name__)

GOOD_SHARE: Final = 0.5  # of a job's steps: weights of so many are worth more than another attempt after a hang
PROCESSES: Final = (*rules.ALL, "env")
FIELDS: Final = {
    **dict.fromkeys(("phase", "deadline", "found", "detail", "gpu", "weights", "guarantee"), str),
    "exits": dict,
    "step": int,
    "train_seconds": float,
}
GPU: Final = {"clean": "healthy"}  # the supervisor's word -> the rules'


def outcome(
    job: TrainingJob, held: Held | Placement, folder: Path, profile: Profile
) -> tuple[JobResult, Verdict | None, str]:
    """What came of an attempt.

    Args:
        job: what ran.
        held: how the attempt ended, on a machine or on none.
        folder: what was fetched of it.
        profile: the version of prime-rl.

    Returns:
        The result, why it failed (``None``: it didn't), and where its weights are in its folder on the machine.
    """
    placed = held if isinstance(held, Placement) else held.placement
    said = _verdict(folder / "out/verdict.json") if placed.exit == 0 else None
    usd = 0.0
    if isinstance(held, Held):
        offer = held.lease.pod.offer
        usd = placed.seconds / 3600 * offer.usd_per_hour / offer.slots
    result = JobResult(job.id, "lost", wall_seconds=placed.seconds, cost_usd=usd, metrics=_metrics(folder / "out"))
    if said is None:
        rule = rules.POD_LOST if placed.exit is None else rules.UNKNOWN
        why = placed.why or f"the supervisor ended with status {placed.exit}: {_last_words(folder, placed.attempt)}"
        verdict = Verdict(rule.code, rule.side, "another pod", rule.message, why)
        return evolve(result, failure=verdict.failure()), verdict, ""
    result = evolve(result, steps=said["step"], train_seconds=said["train_seconds"], guarantees=said["guarantee"])
    if said["phase"] == "done" and said["gpu"] != "clean":
        said["phase"], said["found"] = "weights", "gpu"  # nothing can be served there
    stood_still = bool(said["weights"]) and result.steps >= GOOD_SHARE * job.config["max_steps"]
    if said["phase"] == "done" or (stood_still and said["found"] != "gpu"):
        if said["phase"] != "done":
            logger.warning("Job %s stood still; its weights of step %d are taken.", job.id, result.steps)
        return evolve(result, status="succeeded"), None, said["weights"]
    verdict = classify(_evidence(said, folder / "out"), profile.version)
    status: JobStatus = "failed" if verdict.side == "agent" else "lost"
    return evolve(result, status=status, failure=verdict.failure()), verdict, ""


def _verdict(path: Path) -> dict[str, Any] | None:
    """What the supervisor says, if it is what a supervisor says."""
    try:
        said = json.loads(path.read_bytes())
        whole = all(isinstance(said[name], kind) for name, kind in FIELDS.items())
        return said if whole and ".." not in Path(said["weights"]).parts else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _evidence(said: Mapping[str, Any], out: Path) -> Evidence:
    """What the supervisor saw, as the rules want it."""
    logs = {}
    for process in PROCESSES:
        with contextlib.suppress(OSError):
            logs[process] = (out / f"logs/{process}.log").read_bytes()
    return Evidence(
        logs,
        {process: status for process, status in said["exits"].items() if process in PROCESSES},
        phase=said["phase"],
        deadline=said["deadline"],
        found=said["found"],
        detail=said["detail"],
        gpu=GPU.get(said["gpu"], said["gpu"]),
        weights=bool(said["weights"]),
    )


def _metrics(out: Path) -> tuple[dict[str, float], ...]:
    """One mapping a step, from the rows of both writers."""
    steps: dict[int, dict[str, float]] = {}
    with contextlib.suppress(OSError):
        for line in (out / "metrics.jsonl").read_bytes().splitlines():
            if (found := progress(line)) is not None:
                _, step, values = found
                steps.setdefault(step, {"step": step}).update(values)
    return tuple(steps[step] for step in sorted(steps))


def _last_words(folder: Path, attempt: int) -> str:
    with contextlib.suppress(OSError):
        return (folder / f"log.{attempt}").read_bytes()[-600:].decode("utf-8", "backslashreplace").strip()
    return ""
