"""What a run will cost and how long it will take, with a range, and where each number comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from attrs import evolve, field, frozen

from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.interfaces import GPUProvider, InnerJobRunner
from ai_trains_ai.records import Offer
from ai_trains_ai.report.costs import costs_of, dollars
from ai_trains_ai.store import Store

ENOUGH = 5  # own jobs (or episodes) that a number is learned from
LEFT_OUT = "time of the outer agent (sampling, training) and of hidden evaluations"


@frozen
class Span:
    """A number that isn't known yet: what is expected, between a low and a high end."""

    low: float
    expected: float
    high: float

    @classmethod
    def of(cls, given: Any, what: str) -> Span:
        """From one number, or from three that don't fall."""
        values = [given] * 3 if isinstance(given, int | float) else given
        try:
            low, expected, high = map(float, values)
        except (TypeError, ValueError):
            raise ConfigurationError(f"{what} is a number or (low, expected, high), not {given!r}.") from None
        if not (0 <= low <= expected <= high < math.inf):
            raise ConfigurationError(f"{what} must be finite, not negative and in order, not {given!r}.")
        return cls(low, expected, high)

    @classmethod
    def seen(cls, values: Sequence[float]) -> Span:
        """The 10 % quantile, the mean and the 90 % quantile; the mean of a skewed sample widens them."""
        ordered = sorted(values)
        mean = min(max(sum(ordered) / len(ordered), ordered[0]), ordered[-1])
        return cls(min(_quantile(ordered, 0.1), mean), mean, max(_quantile(ordered, 0.9), mean))

    def __mul__(self, factor: float) -> Span:
        return Span(self.low * factor, self.expected * factor, self.high * factor)

    def text(self, show: Any) -> str:
        return f"{show(self.expected)} ({show(self.low)} to {show(self.high)})"


@frozen
class Plan:
    """What is ahead: so many updates, groups and episodes, of which so many hand in a job.

    ``in_flight`` is how many episodes the loop has going at a time; ``limit`` the mean time limit of a job in minutes.
    """

    steps: int
    groups: int
    episodes: int
    in_flight: int
    limit: float


@frozen
class Known:
    """What a run's own books teach. Empty for a run that has not begun.

    ``minutes`` of lease of each job, the share of episodes that hand one in, what the machines cost in all for a dollar
    of busy time, minutes that pods took to boot, and dollars spent.
    """

    minutes: Sequence[float] = ()
    job_share: float | None = None
    overhead: float | None = None
    boots: Sequence[float] = ()
    spent: float = 0.0

    @classmethod
    def of(cls, store: Store) -> Known:
        charges = [charge for _, charge in store.charges()]
        minutes: dict[str, float] = {}
        for charge in charges:
            if charge.kind == "busy" and charge.unit == "seconds":
                minutes[charge.subject] = minutes.get(charge.subject, 0.0) + charge.quantity / 60
        episodes = store.episodes()
        costs = costs_of(store)
        busy = costs.machines - costs.overhead
        return cls(
            tuple(minutes.values()) or tuple(result.wall_seconds / 60 for result in store.results()),
            sum(bool(e.job_id) for e in episodes) / len(episodes) if len(episodes) >= ENOUGH else None,
            costs.machines / busy if busy > 0 and len(minutes) >= ENOUGH else None,
            tuple(charge.quantity / 60 for charge in charges if charge.kind == "boot" and charge.unit == "seconds"),
            costs.total,
        )


@frozen
class Machines:
    """What jobs may run on. Without offers it is this machine, free of charge, with ``slots`` jobs at a time."""

    offers: Sequence[Offer] = ()
    max_pods: int = 1
    slots: int = 1
    source: str = "this machine's cores"


@frozen
class Forecast:
    """What is ahead of a run.

    Attributes:
        steps, groups, episodes, jobs, pods: the plan. ``jobs`` are those expected, ``pods`` the most at a time.
        usd: dollars, from the low to the high end.
        hours: wall hours.
        left: dollars left in the budget; ``None`` without one.
        basis: where each number comes from.
        left_out: what is not counted.
    """

    steps: int
    groups: int
    episodes: int
    jobs: int
    pods: int
    usd: Span
    hours: Span
    left: float | None = None
    basis: Mapping[str, str] = field(factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether even the high end is within the budget; ``None`` without one."""
        return None if self.left is None else self.usd.high <= self.left

    def text(self) -> str:
        """Everything, for a terminal."""
        lines = [
            f"{self.steps} steps, {self.groups} groups, {self.episodes} episodes; about {self.jobs} jobs on "
            + (f"{self.pods} {'pod' if self.pods == 1 else 'pods'} at most" if self.pods else "this machine"),
            f"cost:  {self.usd.text(dollars)}" if self.usd.high else "cost:  $0.00; no machine is paid for",
            f"hours: {self.hours.text(lambda value: f'{value:.3g}')}",
            f"budget: {self.budget_sentence()}",
            *(f"{name}: {where}" for name, where in self.basis.items()),
            *(f"left out: {what}" for what in self.left_out),
        ]
        return "\n".join(lines)

    def budget_sentence(self) -> str:
        if self.left is None:
            return "none is set"
        if self.usd.high <= self.left:
            return f"{dollars(self.left)} are left; it fits"
        if self.usd.expected <= self.left:
            return f"{dollars(self.left)} are left; what is expected fits, the high end doesn't"
        return f"{dollars(self.left)} are left; what is expected doesn't fit"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text())}</pre>"


def provider_of(runner: InnerJobRunner) -> GPUProvider | None:
    """The provider that a runner rents from; ``None``: from nobody, its jobs run on this machine."""
    return runner.provider


def forecast(
    plan: Plan,
    machines: Machines,
    known: Known = Known(),
    *,
    minutes_per_job: Any = None,
    boot_limit: float = 15.0,
    usd: float | None = None,
    usd_per_hour: float | None = None,
) -> Forecast:
    """Dollars and hours of ``plan`` on ``machines``.

    Hours are jobs over the slots that work at once, times the hours of a job, plus the boot of the first pods. Dollars
    are the jobs' hours at the price of a slot, times what idle and failed time added so far. The low end takes the
    quick jobs at the cheapest price, the high end the slow ones at the dearest that ``usd_per_hour`` admits.

    Args:
        minutes_per_job: a number, or (low, expected, high); default the run's own jobs, else the tasks' time limit.
        boot_limit: minutes after which the pool gives a booting pod up.
        usd: the budget in all. usd_per_hour: its hourly limit.
    """
    minutes, told = _minutes(plan, known, minutes_per_job)
    share = 1.0 if known.job_share is None else known.job_share
    jobs = round(plan.episodes * share)
    basis = {"minutes per job": told}
    own = f"this run's own share of episodes with a job ({share:.0%})"
    basis["jobs"] = "every episode hands in a job" if known.job_share is None else own
    left_out = [LEFT_OUT, "tokens of the outer agent (counted as 0: its trainer doesn't say what they cost)"]
    left = None if usd is None else max(0.0, usd - known.spent)
    done = Forecast(plan.steps, plan.groups, plan.episodes, jobs, 0, Span(0, 0, 0), Span(0, 0, 0), left)
    if not machines.offers:
        basis |= {"price": "no rented machines, so 0 dollars", "slots": machines.source}
        hours = minutes * (jobs / 60 / max(1, min(machines.slots, plan.in_flight)))
        return evolve(done, hours=hours, basis=basis, left_out=tuple(left_out))

    offers, source = _admissible(machines.offers, usd_per_hour)
    cheap, dear = offers[0], offers[-1]
    basis["price"] = f"{source}; {cheap.id} {_per_slot(cheap)} to {dear.id} {_per_slot(dear)}"
    pods = {offer.id: _pods(offer, machines.max_pods, plan.in_flight, usd_per_hour) for offer in (cheap, dear)}
    basis["slots"] = f"{pods[cheap.id]} × {cheap.slots} (pods × slots), {plan.in_flight} episodes in flight"
    parallel = [max(1, min(pods[o.id] * o.slots, plan.in_flight)) for o in (cheap, dear)]
    quick, slow = max(parallel), min(parallel)
    job_hours = minutes * (jobs / 60)
    boot, booted = _boot(known, boot_limit, any(offer.usd_per_hour for offer in offers))
    basis["boot"] = booted
    overhead = known.overhead or 1.0
    if known.overhead is None and dear.usd_per_hour:
        left_out.append("idle and failed time of pods, until jobs of this run have shown how much there is")
    elif known.overhead is not None:
        basis["overhead"] = f"this run's own: {overhead - 1:.0%} on top of busy time"
    # a share of overhead that was learned holds the boots already
    boots = boot * (0.0 if known.overhead else pods[cheap.id] / 60)
    cheapest, dearest = _usd_per_slot(cheap), _usd_per_slot(dear)
    spent = Span(
        job_hours.low * cheapest * overhead + boots.low * cheap.usd_per_hour,
        job_hours.expected * cheapest * overhead + boots.expected * cheap.usd_per_hour,
        job_hours.high * dearest * overhead + boots.high * max(cheap.usd_per_hour, dear.usd_per_hour),
    )
    hours = Span(
        job_hours.low / quick + boot.low / 60,
        job_hours.expected / parallel[0] + boot.expected / 60,
        job_hours.high / slow + boot.high / 60,
    )
    return evolve(done, pods=max(pods.values()), usd=spent, hours=hours, basis=basis, left_out=tuple(left_out))


def _minutes(plan: Plan, known: Known, given: Any) -> tuple[Span, str]:
    if given is not None:
        return Span.of(given, "minutes_per_job"), f"given minutes_per_job={given}"
    if len(known.minutes) >= ENOUGH:
        return Span.seen(known.minutes), f"this run's own {len(known.minutes)} jobs (10 %, mean, 90 %)"
    return Span(0.0, plan.limit, plan.limit), "the tasks' time limit, as the runner counts it"


def _boot(known: Known, limit: float, paid: bool) -> tuple[Span, str]:
    if known.boots:
        return Span.seen(known.boots), f"this run's own {len(known.boots)} boots"
    if not paid:
        return Span(0, 0, 0), "none: these machines are there already"
    return Span(0.0, 0.0, limit), f"no pod has booted yet: 0, at the high end the pool's limit of {limit:g} minutes"


def _admissible(offers: Sequence[Offer], cap: float | None) -> tuple[list[Offer], str]:
    """The offers that the pool would take, the cheapest slot first."""
    within = [offer for offer in offers if cap is None or offer.usd_per_hour <= cap]
    if not within:
        raise ConfigurationError(
            f"No offer is within the budget's {cap:.2f} USD an hour; the cheapest costs "
            f"{min(offer.usd_per_hour for offer in offers):.2f}. Raise usd_per_hour."
        )
    free = [offer for offer in within if offer.available]
    source = "the provider's prices now" if free else "the provider's prices now (nothing is free at the moment)"
    return sorted(free or within, key=lambda offer: (_usd_per_slot(offer), offer.id)), source


def _pods(offer: Offer, max_pods: int, in_flight: int, cap: float | None) -> int:
    """How many pods of one offer would work at a time."""
    pods = min(max_pods, math.ceil(in_flight / offer.slots))
    if cap is not None and offer.usd_per_hour > 0:
        pods = min(pods, int(cap / offer.usd_per_hour + 1e-9))
    return max(1, pods)


def _usd_per_slot(offer: Offer) -> float:
    return offer.usd_per_hour / offer.slots


def _per_slot(offer: Offer) -> str:
    return f"{dollars(_usd_per_slot(offer))} per slot and hour"


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest values."""
    place = share * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
