"""What a run has cost, from its books: by kind, job, step, family and GPU type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from html import escape

from attrs import frozen

from ai_trains_ai.records import Charge, Episode
from ai_trains_ai.store import Store

BREAKDOWNS = ("kind", "job", "step", "family", "gpu")


@frozen
class Costs:
    """US dollars that a run has booked. Time of pods that are still there is booked when a lease or the pod ends.

    Each of the five breakdowns adds up to ``total``. What belongs to no job (booting, idle and failed pods, storage,
    tokens of the outer agent) stands there under "no job: boot" and so on, what ran on no pod under "no pod: tokens".

    Attributes:
        total: everything.
        machines: the part of it that pods cost; a provider's bill is compared with this.
        jobs: training jobs that something was booked for.
        overhead: the part of ``machines`` that belongs to no job.
        kind: what the money was for: busy, boot, idle, failed, tokens, storage.
        job: by job id.
        step: by update of the outer policy, and "probe-before", "probe" (in between) and "probe-after".
        family: by task family.
        gpu: by GPU type of the pod that was rented.
        all_in: by job id, with the overhead spread over the jobs in proportion to their own dollars.
    """

    total: float
    machines: float
    jobs: int
    overhead: float
    kind: Mapping[str, float]
    job: Mapping[str, float]
    step: Mapping[str, float]
    family: Mapping[str, float]
    gpu: Mapping[str, float]
    all_in: Mapping[str, float]

    @property
    def usd_per_job(self) -> float | None:
        """All-in dollars per job; ``None`` before the first one."""
        return sum(self.all_in.values()) / self.jobs if self.jobs else None

    def by(self, what: str) -> Mapping[str, float]:
        """One of the `BREAKDOWNS` by its name."""
        breakdown: Mapping[str, float] = getattr(self, what)
        return breakdown

    def sentence(self) -> str:
        """The whole in one line."""
        if not self.total and not self.jobs:
            return "Nothing was spent."
        each = "" if self.usd_per_job is None else f", {dollars(self.usd_per_job)} a job all in"
        share = f", {self.overhead / self.machines:.0%} of the machines' cost is overhead" if self.machines else ""
        jobs = f"{self.jobs} {'job' if self.jobs == 1 else 'jobs'}"
        return f"{dollars(self.total)} for {jobs}{each}{share}."

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} {dollars(usd)}" for kind, usd in self.kind.items())
        return f"Costs({dollars(self.total)}{': ' if kinds else ''}{kinds}; {self.jobs} jobs)"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{what}</td><td>{escape(name)}</td><td>{dollars(usd)}</td></tr>"
            for what in BREAKDOWNS
            if what != "job"  # there may be thousands
            for name, usd in self.by(what).items()
        )
        head = "<tr><th>by</th><th></th><th>cost</th></tr>"
        return f"<table><caption>{escape(self.sentence())}</caption><thead>{head}</thead><tbody>{rows}</tbody></table>"


def costs_of(store: Store) -> Costs:
    """The cost table of a run, as far as its books go."""
    charges = [charge for _, charge in store.charges()]
    steps = _steps(store)
    families: Mapping[str, str] = store.meta("families", {})
    gpus = {rental.marker: rental.offer.gpu_type for rental in store.rentals()}

    def is_job(charge: Charge) -> bool:
        return charge.subject in steps or charge.kind == "busy"

    def per_job(name: Callable[[str], str]) -> Mapping[str, float]:
        return _sums(charges, lambda c: name(c.subject) if is_job(c) else f"no job: {c.kind}")

    def family(job: str) -> str:
        task = steps[job][1] if job in steps else ""
        return families.get(task, task) or "unknown"

    def gpu(charge: Charge) -> str:
        return gpus.get(charge.pod, "unknown") if charge.pod else f"no pod: {charge.kind}"

    direct = _sums([charge for charge in charges if is_job(charge)], lambda c: c.subject)
    overhead = sum(charge.usd for charge in charges if charge.pod and not is_job(charge))
    busy = sum(direct.values())
    return Costs(
        total=sum(charge.usd for charge in charges),
        machines=sum(charge.usd for charge in charges if charge.pod),
        jobs=len(direct),
        overhead=overhead,
        kind=_sums(charges, lambda c: c.kind),
        job=per_job(lambda job: job),
        step=per_job(lambda job: steps[job][0] if job in steps else "unknown"),
        family=per_job(family),
        gpu=_sums(charges, gpu),
        all_in={job: usd + (overhead * usd / busy if busy else overhead / len(direct)) for job, usd in direct.items()},
    )


def dollars(usd: float) -> str:
    """An amount as people read it; small ones keep their digits."""
    if 0 < usd < 0.00005:
        return "<$0.0001"
    return f"${usd:,.2f}" if abs(usd) >= 0.995 or usd == 0 else f"${usd:.4f}"


def _sums(charges: list[Charge], name: Callable[[Charge], str]) -> Mapping[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for charge in charges:
        sums[name(charge)] += charge.usd
    return dict(sums)


def _steps(store: Store) -> dict[str, tuple[str, str]]:
    """Job id -> the step that it belongs to, and its task."""
    found: dict[str, tuple[str, str]] = {}

    def take(episodes: list[Episode], step: str) -> None:
        found.update({episode.job_id: (step, episode.task_id) for episode in episodes if episode.job_id})

    for stage in ("submitted", "finished"):
        for phase in ("probe-before", "probe", "probe-after"):
            take(store.episodes(phase=phase, stage=stage), phase)
        for step in range(max(int(store.meta("steps", 0)), len(store.steps()))):
            take(store.episodes(phase="train", step=step, stage=stage), f"step {step}")
    return found
