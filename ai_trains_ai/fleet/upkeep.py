"""The machines of a run that nobody controls just now: what is there, and how to end it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from attrs import frozen

from ai_trains_ai.errors import ProviderError
from ai_trains_ai.fleet.books import Books
from ai_trains_ai.fleet.ledger import Ledger
from ai_trains_ai.fleet.renting import TIMES
from ai_trains_ai.interfaces import GPUProvider
from ai_trains_ai.records import Offer, Pod, Rental
from ai_trains_ai.store import Store

ATTEMPTS = 4
PAUSE = 2.0  # seconds after the first failure, doubled after each further one


@frozen
class Sighting:
    """One pod of a run: in its books (``rental``), at the provider (``pod``), or both.

    ``spent`` are US dollars from its create to now, booked or not, ``age`` the seconds in between; ``done`` counts the
    jobs that ended on it, ``running`` are those that the books have on it.
    """

    marker: str
    rental: Rental | None
    pod: Pod | None
    spent: float = 0.0
    age: float = 0.0
    done: int = 0
    running: tuple[str, ...] = ()

    @property
    def offer(self) -> Offer:
        """What is paid for: as the books have it, since a pod that stopped shows no price."""
        found = self.rental or self.pod
        assert found is not None
        return found.offer

    @property
    def id(self) -> str:
        return self.pod.id if self.pod else self.rental.pod_id if self.rental else ""

    @property
    def state(self) -> str:
        """The provider's word, and what is odd about it."""
        if self.pod is None:
            return "asked for, not listed" if self.rental and self.rental.state == "intent" else "not listed"
        if self.rental is None:
            return f"{self.pod.status}, not in the books"
        return f"{self.pod.status}, ended in the books" if self.rental.state == "ended" else self.pod.status


async def look(store: Store, provider: GPUProvider, marker: str, now: float) -> list[Sighting]:
    """The pods of a run that cost money or may: those that its books hold open, and those that the provider lists."""
    listed = await _ours(provider, marker)
    rentals = {rental.marker: rental for rental in store.rentals()}
    busy: dict[str, set[str]] = {}
    for _, charge in store.charges():
        if charge.kind == "busy" and charge.pod:
            busy.setdefault(charge.pod, set()).add(charge.subject)
    running = {(placed.marker, placed.job_id) for placed in store.placements() if placed.state == "running"}
    running |= {(lease.pod.marker, lease.job_id) for lease in store.leases()}

    def sighting(name: str) -> Sighting:
        seen = Sighting(name, rentals.get(name), listed.get(name))
        age = 0.0
        if seen.rental is not None:
            age = max(0.0, (now if seen.pod else seen.rental.seen) - seen.rental.created)
        jobs = tuple(sorted(job for pod, job in running if pod == name))
        spent = max(seen.offer.usd_per_hour * age / 3600, store.charged_to_pod(name))
        return Sighting(name, seen.rental, seen.pod, spent, age, len(busy.get(name, set()) - set(jobs)), jobs)

    holding = {name for name, rental in rentals.items() if rental.state != "ended"}
    return [sighting(name) for name in sorted(holding | set(listed))]


async def reap(
    ledger: Ledger,
    provider: GPUProvider,
    marker: str,
    found: Sequence[Sighting],
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> dict[str, str]:
    """End the pods that `look` found, and book what they cost. Hold the run folder as its writer meanwhile.

    Returns:
        What may be left, by name, and why: it would not end, it is still listed, or another provider has it.
    """
    kind = type(provider).__name__
    books: dict[str, Books] = {}
    left: dict[str, str] = {}
    for seen in found:
        name = seen.rental.provider if seen.rental else kind
        # a second provider of the same class has a number behind its name
        if seen.pod is None and name.partition("-")[0] != kind:
            left[seen.marker] = f"it was rented from {name}, and {kind} was asked"
            continue
        since = clock() - seen.rental.created if seen.rental else TIMES.search
        if seen.rental is not None and seen.rental.state == "intent" and seen.pod is None and since < TIMES.search:
            wait = TIMES.search - since
            left[seen.marker] = (
                f"it was asked for {since:.0f} s ago and may still turn up: run this again in {wait:.0f} s"
            )
            continue
        problem = await _terminated(provider, seen.id, sleep) if seen.id else ""
        if problem:
            left[seen.marker] = problem
        else:
            if name not in books:
                books[name] = Books(ledger, clock, name)
            _settle(books[name], seen)
    try:
        for pod in await _ours(provider, marker):
            left.setdefault(pod, "it is still listed")
    except ProviderError as error:
        left.setdefault("perhaps others", f"the pods can't be listed: {error}")
    return left


async def _ours(provider: GPUProvider, marker: str) -> dict[str, Pod]:
    """By name, the pods at the provider that carry a run's marker; no other one, whatever the list says."""
    listed = await provider.list(f"{marker}-")
    return {pod.marker: pod for pod in listed if pod.marker.startswith(f"{marker}-") and pod.status != "terminated"}


async def _terminated(provider: GPUProvider, pod_id: str, sleep: Callable[[float], Awaitable[None]]) -> str:
    """End a pod, in several attempts if need be; says why it would not end, if so."""
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await sleep(PAUSE * 2 ** (attempt - 1))
        try:
            await provider.terminate(pod_id)
            return ""
        except ProviderError as error:
            problem = str(error)
    return problem


def _settle(books: Books, seen: Sighting) -> None:
    """Book the rest of a pod that was ended: up to now if it was there, else up to when it was last seen."""
    if seen.rental is None or seen.rental.state == "ended":
        if seen.pod is not None:
            books.late(seen.pod)
            books.ended(seen.marker, "failed")
    elif seen.pod is not None:
        books.rented(seen.rental, seen.pod)
        books.ended(seen.marker, "idle")
    elif seen.rental.state == "intent":
        books.nothing_came(seen.rental)
    else:
        books.ended(seen.marker, "idle", lost=True)
