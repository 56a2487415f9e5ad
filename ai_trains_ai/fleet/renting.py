"""From an offer to a machine that a job can use, and back: create, boot, trial, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from attrs import define, evolve, field, frozen

from ai_trains_ai.errors import AiTrainsAiError, AmbiguousCreate, Fenced, ProviderError, TransportError
from ai_trains_ai.fleet.books import Books
from ai_trains_ai.fleet.canary import Canary, responds
from ai_trains_ai.fleet.candidates import Candidates
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.records import Lease, Pod, PodSpec, Rental
from ai_trains_ai.transport.jobs import HostJobs

logger = logging.getLogger(__name__)

QUARANTINE = 3600.0  # seconds that a machine which failed is left alone
LOG_LINES, LOG_SECONDS = 3, 20.0  # of a pod that never became usable


@frozen
class FleetTimes:
    """Seconds, by the fleet's clock.

    Attributes:
        admission: what a lease that says nothing of its length reserves of the budget.
        pod: a pod is rented only if the budget covers at least so much of it.
        boot: a pod that isn't usable so long after its create is ended.
        search: a create without an answer is looked for over this time at most: listings lag.
        idle: a pod without work is ended after it.
        poll: between two looks at a new pod.
        watch: between two looks at all pods.
        lost: a pod that its provider can't reach for so long is given up.
        bill: between two looks at the provider's bill.
        deadman: on the pod, by its own clock, everything ends so long after the last word from the controller.
    """

    admission: float = 60.0
    pod: float = 600.0
    boot: float = 900.0
    search: float = 180.0
    idle: float = 600.0
    poll: float = 5.0
    watch: float = 10.0
    lost: float = 120.0
    bill: float = 3600.0
    deadman: float = 1800.0


TIMES = FleetTimes()


@define(eq=False)
class Warm:
    """A usable pod, the way into it, and who is on it."""

    rental: Rental
    pod: Pod
    transport: Transport
    jobs: HostJobs
    leases: dict[int, Lease] = field(factory=dict)  # by slot
    idle_since: float = 0.0
    silent_since: float | None = None

    @property
    def marker(self) -> str:
        return self.rental.marker

    @property
    def free(self) -> int:
        return self.pod.offer.slots - len(self.leases)

    def free_slot(self) -> int:
        return next(slot for slot in range(self.pod.offer.slots) if slot not in self.leases)


def has_stopped(rental: Rental, pod: Pod) -> bool:
    """Whether a pod ended by itself: the provider still has it, and charges nothing more for the machine."""
    return pod.status == "unreachable" and pod.offer.usd_per_hour == 0 < rental.offer.usd_per_hour


class Renter:
    """Rents and ends the pods of one fleet. A pod that it returns is usable; one that isn't has been ended and paid."""

    def __init__(
        self,
        provider: GPUProvider,
        books: Books,
        candidates: Candidates,
        clock: Callable[[], float],
        times: FleetTimes,
        sleep: Callable[[float], Awaitable[None]],
        canary: Canary,
    ) -> None:
        self._provider, self._books, self._candidates = provider, books, candidates
        self._clock, self._times, self._sleep, self._canary = clock, times, sleep, canary
        self._quarantine: dict[str, float] = {}  # machine -> until
        self.epoch = 0
        self.failures: list[str] = []  # why the last pods in a row never became usable

    async def create(self, rental: Rental) -> tuple[Rental, Pod] | None:
        """Rent what was intended. ``None``: the answer was lost, and no such pod turned up."""
        spec = PodSpec(rental.marker, env={"AITA_FLEET": rental.marker, "AITA_EPOCH": str(self.epoch)})
        try:
            pod = await self._provider.create(rental.offer, spec)
        except AmbiguousCreate as error:
            logger.warning("%s", error)
            found = await self.search(rental)
            if found is None:
                self._books.nothing_came(rental)
                self._candidates.bad(rental.offer)
                return None
            pod = found
        except AiTrainsAiError:  # it said in so many words that nothing was created
            self._books.nothing_came(rental)
            raise
        return self._books.rented(rental, pod), pod

    async def search(self, rental: Rental) -> Pod | None:
        """The pod whose create got no answer, if there is one: listings lag, so the look is repeated."""
        give_up = rental.created + min(self._times.search, self._provider.listing_lag)
        while True:
            for pod in await self._provider.list(rental.marker):
                if pod.marker == rental.marker:
                    return pod
            if self._clock() >= give_up:
                return None
            await self._sleep(self._times.poll)

    async def boot(self, rental: Rental, pod: Pod, *, busy: bool = False) -> Warm | None:
        """A pod once it can be used. One that can't in time, or fails the canary, is ended and counted against it.

        One with jobs of an earlier session on it is ``busy``: it only has to answer.
        """
        try:
            warm, why = await self._tried(rental, pod, busy)
        except Fenced:
            raise  # it is another controller's
        except BaseException:
            await asyncio.shield(self.end(rental, "failed"))
            raise
        if warm is None:
            logger.warning(
                "Pod %s of %s is ended: %s.%s", rental.marker, rental.offer.id, why, await self._last_words(rental)
            )
            await self.end(rental, "failed")
            self._candidates.bad(rental.offer)
            self.failures.append(why)
            return None
        self.failures.clear()
        self._candidates.good(rental.offer)
        self._books.settle(rental.marker, "boot")
        return warm

    async def end(self, rental: Rental, kind: str, transport: Transport | None = None) -> None:
        """Terminate a pod and book the rest of it: of one that is gone, or stopped, to where it was last seen."""
        if transport is not None:
            with contextlib.suppress(Exception):  # it is about to be gone
                await asyncio.wait_for(transport.close(), LOG_SECONDS)
        lost = await self._is_gone(rental)
        await self._provider.terminate(rental.pod_id)
        self._books.ended(rental.marker, kind, lost=lost)

    def quarantine(self, pod: Pod) -> None:
        """Leave the pod's machine alone for a while, where the provider names it."""
        if pod.host:
            self._quarantine[pod.host] = self._clock() + QUARANTINE

    # ------------------------------------------------------------------------------------------ trial

    async def _tried(self, rental: Rental, pod: Pod, busy: bool) -> tuple[Warm | None, str]:
        """The usable pod, or what is wrong with it."""
        ready: Pod | None = None
        try:
            ready, why = await self._ready(rental, pod)
            if ready is None:
                return None, why
            if self._quarantine.get(ready.host, 0.0) > self._clock():
                return None, f"its machine {ready.host} failed before"
            transport = await self._provider.connect(ready)
            try:
                why = await responds(transport) if busy else await self._canary(transport, ready.offer)
                if not why:
                    jobs = HostJobs(transport, ready.root, self.epoch)
                    await self._arm(jobs, ready)
                    # what is paid is the rental's offer, whatever a later look says
                    return Warm(rental, evolve(ready, offer=rental.offer), transport, jobs), ""
            except BaseException:
                await transport.close()
                raise
            await transport.close()
        except (ProviderError, TransportError) as error:
            why = str(error).rstrip(".")
        if ready is not None:
            self.quarantine(ready)
        return None, why

    async def _ready(self, rental: Rental, pod: Pod) -> tuple[Pod | None, str]:
        # of a pod of an earlier session the time since its create counts, too
        give_up = max(rental.created + self._times.boot, self._clock() + 2 * self._times.poll)
        seen: Pod | None = pod
        while seen is not None and seen.status != "ready":
            if seen.status in ("terminated", "unreachable"):
                return None, f"it is {seen.status}"
            if self._clock() >= give_up:
                return None, f"it was not ready after {self._times.boot:.0f} s"
            await self._sleep(self._times.poll)
            seen = await self._provider.get(rental.pod_id)
        return seen, "" if seen else "it is gone"

    async def _arm(self, jobs: HostJobs, pod: Pod) -> None:
        """Set the pod's dead-man switch, where the provider knows how a pod ends itself."""
        command = self._provider.end_command(pod)
        if command:
            await jobs.prepare()
            await jobs.arm(max(1, int(self._times.deadman)), command)

    async def _is_gone(self, rental: Rental) -> bool:
        """Whether a pod ended, or stopped, before we end it."""
        try:
            pod = await self._provider.get(rental.pod_id)
        except ProviderError:
            return False
        return pod is None or has_stopped(rental, pod)

    async def _last_words(self, rental: Rental) -> str:
        """The end of the log of a pod that doesn't work, for the user to see why."""
        lines: list[str] = []

        async def read() -> None:
            async for line in self._provider.logs(rental.pod_id):
                lines.append(line)

        try:
            await asyncio.wait_for(read(), LOG_SECONDS)
        except Exception as error:
            logger.debug("no log of %s: %s", rental.marker, error)
        return "".join(f"\n  {line}" for line in lines[-LOG_LINES:])
