"""The books against the provider's bill."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from ai_trains_ai.records import Money, Rental
from ai_trains_ai.report.costs import dollars

SHARE = 0.01  # of the bill that may be missing without an alarm


@frozen
class Reconciliation:
    """What the run booked for its machines, what the provider billed, and how far apart they may be (US dollars)."""

    booked: float
    billed: float
    tolerance: float

    @property
    def difference(self) -> float:
        """Billed minus booked."""
        return self.billed - self.booked

    @property
    def alarm(self) -> bool:
        return abs(self.difference) > self.tolerance

    def sentence(self) -> str:
        """What to think of it."""
        said = f"Booked {dollars(self.booked)}, billed {dollars(self.billed)} (tolerance {dollars(self.tolerance)})"
        if not self.alarm:
            return f"{said}: they agree."
        if self.difference < 0:
            return f"{said}: {dollars(-self.difference)} less is billed than booked. Bills lag by an hour; ask again."
        return (
            f"{said}: {dollars(self.difference)} more is billed than booked. See what runs: ai-trains-ai fleet status. "
            "The bill may also hold machines of the account that are not this run's."
        )


def reconcile(booked: float, billed: Money | None, pods: Iterable[Rental], poll: float) -> Reconciliation | None:
    """Compare the books with the bill; ``None`` when the provider has no bill.

    They agree within 1 % of the bill, or one poll interval (``poll`` seconds) of every pod at its price, whichever is
    more. Providers bill in buckets of an hour that are filled up to an hour late: while pods work, and for an hour
    after, a bill that is lower than the books means nothing. ``booked`` is `Costs.machines`; tokens are billed
    elsewhere.
    """
    if billed is None:
        return None
    interval = sum(pod.offer.usd_per_hour * poll / 3600 for pod in pods if pod.pod_id)
    return Reconciliation(booked, billed.usd, max(SHARE * billed.usd, interval))
