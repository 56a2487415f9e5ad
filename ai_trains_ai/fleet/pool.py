"""A pool of warm pods that leases slots to jobs.

Money rules: the intent to rent is stored before the provider is asked, and a pod whose create got no answer is looked
for by its marker; every second of a pod is booked at the price of the pod that was created, whatever it did in it;
nothing is rented that the budget can't carry; a restarted controller finds its pods again and ends those that it can't
use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from attrs import define, evolve, field, frozen

from ai_trains_ai.errors import (
    AmbiguousCreate,
    BudgetExceeded,
    NoCapacity,
    ProviderError,
    Transient,
    TransportError,
)
from ai_trains_ai.fleet.candidates import Candidates
from ai_trains_ai.fleet.ledger import Ledger
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.records import Charge, Lease, Offer, Pod, PodRequest, PodSpec, Rental

logger = logging.getLogger(__name__)

Canary = Callable[[Transport, Offer], Awaitable[str]]


@frozen
class FleetTimes:
    """Seconds. A lease is admitted only if the budget covers ``admission`` of it, a pod only if it covers ``pod``;
    a pod that isn't usable ``boot`` after its create is ended; a create without an answer is looked for over ``search``
    (listings lag); a pod without work is ended after ``idle``; ``poll`` lies between two looks.
    """

    admission: float = 60.0
    pod: float = 600.0
    boot: float = 900.0
    search: float = 180.0
    idle: float = 600.0
    poll: float = 5.0


@define(eq=False)
class _Warm:
    """A usable pod, and who is on it."""

    rental: Rental
    pod: Pod
    leases: dict[str, float] = field(factory=dict)  # lease id -> begin
    idle_since: float = 0.0

    @property
    def free(self) -> int:
        return self.pod.offer.slots - len(self.leases)


async def answers(transport: Transport, offer: Offer) -> str:
    """The default canary: the machine answers, and shows the GPUs that it was rented for. Says what is wrong, if so."""
    status, _ = await transport.run(["true"], timeout=30)
    if status != 0:
        return f"a command ended with status {status}"
    if offer.gpu_type == "cpu" or offer.count == 0:
        return ""
    status, listed = await transport.run(["nvidia-smi", "-L"], timeout=60)
    found = listed.count(b"GPU ")
    if status != 0 or found != offer.count:
        return f"nvidia-smi ended with status {status} and shows {found} GPUs, not {offer.count}"
    return ""


class Fleet:
    """Leases slots of the pods of one provider, first come first served. Use it from the run's loop.

    Rents up to ``provider.max_pods`` pods while jobs wait, the cheapest per job first, and ends those without work.

    Args:
        provider: who rents.
        ledger: what it costs; its store keeps the rentals.
        clock: seconds since the epoch.
        marker: begins the name of every pod of this run, and of no other.
        times: see `FleetTimes`.
        sleep: waits; a test's clock has its own.
        canary: tries a pod before its first job; says what is wrong with it.
    """

    def __init__(
        self,
        provider: GPUProvider,
        ledger: Ledger,
        clock: Callable[[], float],
        marker: str,
        times: FleetTimes = FleetTimes(),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        canary: Canary = answers,
    ) -> None:
        self._provider, self._ledger, self._clock = provider, ledger, clock
        self._marker, self._times, self._sleep, self._canary = marker, times, sleep, canary
        self._name = type(provider).__name__
        self._store = ledger.store
        self._candidates = Candidates(clock)
        self._request = PodRequest()
        self._offers: list[Offer] = []
        self._warm: dict[str, _Warm] = {}
        self._booting: dict[str, Rental | None] = {}  # one entry a boot; its rental once it is chosen
        self._missing: set[str] = set()  # pods that the last listing didn't show
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed, self._starting = asyncio.Condition(), asyncio.Lock()
        self._waiting, self._not_before = 0, 0.0
        self._broken: Exception | None = None
        self._closed = self._started = False
        ledger.accrue(self._owed)

    async def start(self, request: PodRequest | None = None) -> None:
        """Find the offers, and the pods of an earlier session. Idempotent.

        Raises:
            NoCapacity: the provider has nothing of the wanted kind.
        """
        async with self._starting:
            if self._offers:
                return
            self._request, self._closed, self._broken = request or PodRequest(), False, None
            self._started = True
            offers = list(await self._provider.offers(self._request))
            if not offers:
                raise NoCapacity(f"{self._name} has no machine for {self._request}. Ask for another type.")
            await self._reconcile()
            self._offers = offers
            self._spawn(self._watch())

    @property
    def slots(self) -> int:
        """Jobs that fit at a time when all pods are there; known after `start`."""
        return max((offer.slots for offer in self._offers), default=0) * self._provider.max_pods

    @property
    def pods(self) -> list[Pod]:
        """The pods that are usable now."""
        return [warm.pod for warm in self._warm.values()]

    # ------------------------------------------------------------------------------------------ leases

    @contextlib.asynccontextmanager
    async def lease(self, job_id: str) -> AsyncIterator[Lease]:
        """Hold one slot. Waits for a free one; the held time is charged at the pod's price per slot.

        Raises:
            BudgetExceeded: the budget doesn't cover a first minute, or a pod.
            ProviderError: the provider refuses for good (key, funds).
        """
        await self.start()
        self._require_minute(job_id)
        warm = await self._take()
        lease = Lease(uuid.uuid4().hex, warm.pod, job_id)
        begin = warm.leases[lease.id] = self._clock()
        try:
            yield lease
        finally:
            await self._give_back(warm, lease, self._clock() - begin)

    def _require_minute(self, job_id: str) -> None:
        cheapest = min(offer.usd_per_hour / offer.slots for offer in self._offers)
        usd = self._times.admission / 3600 * cheapest
        self._ledger.require(Charge("busy", job_id, self._times.admission, "seconds", usd))

    async def _take(self) -> _Warm:
        async with self._changed:
            self._waiting += 1
            try:
                while True:
                    if self._broken is not None:
                        raise self._broken
                    if self._closed:
                        raise ProviderError(f"The fleet of {self._name} is closing; no slot is given out any more.")
                    # fullest first, so that others become idle and are ended
                    free = [warm for warm in self._warm.values() if warm.free]
                    if free:
                        return min(free, key=lambda warm: warm.free)
                    self._rent_more()
                    await self._changed.wait()
            finally:
                self._waiting -= 1

    async def _give_back(self, warm: _Warm, lease: Lease, seconds: float) -> None:
        offer = warm.pod.offer
        usd = seconds / 3600 * offer.usd_per_hour / offer.slots
        async with self._changed:
            warm.leases.pop(lease.id, None)
            warm.idle_since = self._clock()
            self._candidates.learn(offer.gpu_type, seconds / 3600)
            self._changed.notify_all()
            self._ledger.charge(Charge("busy", lease.job_id, seconds, "seconds", usd, warm.rental.marker))

    # ------------------------------------------------------------------------------------------ renting

    def _rent_more(self) -> None:
        """Boot as many pods as the waiting jobs need and the limits allow. Called with the lock held."""
        if self._clock() < self._not_before:
            return
        slots = max(1, max(offer.slots for offer in self._offers))
        while len(self._booting) * slots < self._waiting and self._alive() < self._provider.max_pods:
            boot = uuid.uuid4().hex[:8]
            self._booting[boot] = None
            self._spawn(self._boot(boot))

    def _alive(self) -> int:
        return len(self._warm) + len(self._booting)

    async def _boot(self, boot: str) -> None:
        """One more usable pod, from whichever offer has one; an error that no waiting mends ends all waits."""
        broken: Exception | None = None
        try:
            while not self._closed and not await self._try_offers(boot):
                wait = self._candidates.soonest() or self._times.poll
                logger.info("%s: nothing is free now; trying again in %.0f s.", self._name, wait)
                await self._sleep(wait)
                with contextlib.suppress(Transient):
                    self._offers = list(await self._provider.offers(self._request)) or self._offers
        except Exception as error:  # whatever it is, nobody may wait for ever
            broken = error
        finally:
            async with self._changed:
                self._booting.pop(boot, None)
                if broken is not None:
                    self._not_before = self._clock() + self._times.poll
                    if self._warm:
                        logger.warning("%s rents no further pod: %s", self._name, broken)
                    else:
                        self._broken = broken  # while a pod works, jobs wait for that one
                self._changed.notify_all()

    async def _try_offers(self, boot: str) -> bool:
        """Rent and boot a pod of the best offer that has one; whether there is one now."""
        for offer in self._candidates.ranked(self._offers):
            if not self._affordable(offer):
                continue
            marker = f"{self._marker}-{uuid.uuid4().hex[:8]}"
            rental = Rental(marker, self._name, offer, "intent", self._clock(), self._clock())
            self._booting[boot] = rental
            try:
                rented = await self._create(rental)
            except NoCapacity:
                self._candidates.refused(offer)
                continue
            except Transient as error:
                logger.warning("%s: %s", self._name, error)
                return False
            if rented is not None:
                rental, pod = rented
                self._booting[boot] = rental
                return await self._warm_up(rental, pod)
        return False

    def _affordable(self, offer: Offer) -> bool:
        """Whether the hourly limit leaves room; the budget itself says so by an error."""
        cap = self._ledger.budget.usd_per_hour
        rented = sum(rental.offer.usd_per_hour for rental in self._rentals())
        if cap is not None and rented + offer.usd_per_hour > cap:
            if not rented:
                raise BudgetExceeded(
                    f"A pod of {offer.id} costs {offer.usd_per_hour:.2f} USD an hour; the limit is {cap:.2f}."
                )
            return False
        usd = self._times.pod / 3600 * offer.usd_per_hour
        self._ledger.require(Charge("pod", f"a pod of {offer.id}", self._times.pod, "seconds", usd))
        return True

    def _rentals(self) -> list[Rental]:
        """The pods that are there or may be."""
        return [*(warm.rental for warm in self._warm.values()), *filter(None, self._booting.values())]

    async def _create(self, rental: Rental) -> tuple[Rental, Pod] | None:
        """Rent, the intent stored before. ``None``: the answer was lost, and no such pod turned up."""
        self._save(rental)
        try:
            pod = await self._provider.create(rental.offer, PodSpec(rental.marker))
        except AmbiguousCreate as error:
            logger.warning("%s: %s", self._name, error)
            found = await self._search(rental)
            if found is None:
                self._save(evolve(rental, state="ended"))
                self._candidates.bad(rental.offer)
                return None
            pod = found
        except ProviderError:  # said in so many words that nothing was created
            self._save(evolve(rental, state="ended"))
            raise
        return self._rented(rental, pod), pod

    def _rented(self, rental: Rental, pod: Pod) -> Rental:
        """The rental of a pod that is there, at its real price, in the books."""
        rental = evolve(rental, state="alive", offer=pod.offer, pod_id=pod.id)
        self._save(rental)
        return rental

    async def _search(self, rental: Rental) -> Pod | None:
        """The pod whose create got no answer, if there is one: listings lag, so the look is repeated."""
        give_up = rental.created + self._times.search
        while True:
            for pod in await self._provider.list(rental.marker):
                if pod.marker == rental.marker:
                    return pod
            if self._clock() >= give_up:
                return None
            await self._sleep(self._times.poll)

    async def _warm_up(self, rental: Rental, pod: Pod) -> bool:
        """Wait until a pod is usable. One that isn't in time, or fails the canary, is ended and counted against it."""
        ready: Pod | None = None
        try:
            ready = await self._ready(rental, pod)
            why = "it was not ready in time" if ready is None else await self._tried(ready)
        except (ProviderError, TransportError) as error:
            why = str(error)
        except BaseException:
            await asyncio.shield(self._end(rental, "failed"))
            raise
        if ready is None or why:
            logger.warning("Pod %s of %s is ended: %s.", rental.marker, rental.offer.id, why)
            await self._end(rental, "failed")
            self._candidates.bad(rental.offer)
            return False
        self._candidates.good(rental.offer)
        self._settle(rental, "boot")
        async with self._changed:
            self._warm[rental.marker] = _Warm(rental, ready, idle_since=self._clock())
            self._changed.notify_all()
        return True

    async def _ready(self, rental: Rental, pod: Pod) -> Pod | None:
        give_up = self._clock() + self._times.boot
        seen: Pod | None = pod
        while seen is not None and seen.status != "ready":
            if seen.status in ("terminated", "unreachable") or self._clock() >= give_up:
                return None
            await self._sleep(self._times.poll)
            seen = await self._provider.get(rental.pod_id)
        return seen

    async def _tried(self, pod: Pod) -> str:
        transport = await self._provider.connect(pod)
        try:
            return await self._canary(transport, pod.offer)
        finally:
            await transport.close()

    # ------------------------------------------------------------------------------------------ ending

    async def _watch(self) -> None:
        """Now and then: end pods that had no work for a while, and let go of those that are gone."""
        while not self._closed:
            await self._sleep(max(1.0, min(self._times.idle / 4, 30.0)))
            try:
                await self._let_go(await self._provider.list(self._marker))
            except ProviderError as error:
                logger.warning("%s can't be asked for its pods: %s", self._name, error)
            late = self._clock() - self._times.idle
            async with self._changed:
                idle = [w for w in self._warm.values() if not w.leases and w.idle_since <= late]
                for warm in idle:
                    del self._warm[warm.rental.marker]
                self._changed.notify_all()
            for warm in idle:
                try:
                    await self._end(warm.rental, "idle")
                except ProviderError as error:  # it stays in the books, and `close` ends it
                    logger.warning("Pod %s can't be ended now: %s", warm.rental.marker, error)
                except BudgetExceeded as error:  # an observer stops the run: so does the next lease
                    self._broken = error

    async def _let_go(self, listed: Iterable[Pod]) -> None:
        """Forget pods that two listings in a row didn't show: somebody else ended them. Their jobs will notice."""
        there = {pod.marker for pod in listed if pod.status != "terminated"}
        async with self._changed:
            for marker, warm in list(self._warm.items()):
                if marker in there:
                    self._missing.discard(marker)
                    warm.rental = evolve(warm.rental, seen=self._clock())
                    self._store.save_rental(warm.rental)
                elif marker not in self._missing:
                    self._missing.add(marker)
                else:
                    logger.warning("Pod %s is gone; nobody here ended it.", marker)
                    del self._warm[marker]
                    self._settle(warm.rental, "idle", until=warm.rental.seen)
                    self._store.save_rental(evolve(warm.rental, state="ended"))

    async def _end(self, rental: Rental, kind: str) -> None:
        """Terminate a pod and book what is still unbooked of it."""
        await self._provider.terminate(rental.pod_id)
        self._save(evolve(rental, state="ended"))  # before the booking, which an observer may stop the run at
        self._settle(rental, kind)

    def _settle(self, rental: Rental, kind: str, until: float | None = None) -> None:
        """Book a pod's time up to now (or ``until``) that neither a charge nor a lease covers yet."""
        usd = self._due(rental, self._clock() if until is None else until) - self._on_lease(rental.marker)
        if usd > 1e-12:
            seconds = usd / rental.offer.usd_per_hour * 3600
            self._ledger.charge(Charge(kind, rental.marker, seconds, "seconds", usd, rental.marker))

    def _on_lease(self, marker: str) -> float:
        """Dollars of the leases on a pod that go on: booked when they end."""
        warm = self._warm.get(marker)
        if warm is None:
            return 0.0
        price = warm.pod.offer.usd_per_hour / warm.pod.offer.slots
        return sum(self._clock() - begin for begin in warm.leases.values()) / 3600 * price

    def _owed(self) -> float:
        """Dollars of pods that are there, as far as they aren't booked."""
        alive = [rental for rental in self._rentals() if rental.state == "alive"]
        return sum(max(0.0, self._due(rental, self._clock())) for rental in alive)

    def _due(self, rental: Rental, until: float) -> float:
        """Dollars of a pod's time that no charge covers."""
        seconds = max(0.0, until - rental.created)
        return rental.offer.usd_per_hour * seconds / 3600 - self._store.charged_to_pod(rental.marker)

    async def close(self) -> None:
        """Terminate every pod, also those that only the books or the provider know. Idempotent.

        Raises:
            ProviderError: what could not be terminated, by name; everything was tried.
        """
        if not self._started:
            await self._provider.close()
            return
        self._closed, self._started = True, False
        async with self._changed:
            self._changed.notify_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._warm.clear()
        failed: list[str] = []
        for rental in self._open():
            try:
                pod = await self._search(rental) if rental.state == "intent" else None
                if rental.state == "alive" or pod is not None:
                    await self._end(rental if pod is None else self._rented(rental, pod), "idle")
                else:
                    self._save(evolve(rental, state="ended"))
            except Exception as error:
                failed.append(f"{rental.marker} ({error})")
        failed += await self._end_strays()
        self._offers = []
        await self._provider.close()
        if failed:
            raise ProviderError(f"Not terminated, and still costing money: {', '.join(failed)}. End them by hand.")

    # ------------------------------------------------------------------------------------------ the books

    async def _reconcile(self) -> None:
        """Take over the pods of an earlier session; end those that can't be used, and settle those that are gone."""
        rentals = self._open()
        if not rentals:
            return
        listed = {pod.marker: pod for pod in await self._provider.list(self._marker)}
        for rental in rentals:
            pod = listed.get(rental.marker)
            if pod is None and rental.state == "intent":
                pod = await self._search(rental)
            if pod is None:
                logger.warning(
                    "Pod %s is gone; it was last seen %.0f s ago.", rental.marker, self._clock() - rental.seen
                )
                self._settle(rental, "idle", until=rental.seen)
                self._save(evolve(rental, state="ended"))
                continue
            known = self._rented(rental, pod)
            self._settle(known, "idle")  # whatever it did while nobody was there
            await self._warm_up(known, pod)
        await self._end_strays()

    async def _end_strays(self) -> list[str]:
        """Terminate what carries our marker and is in no book: a create that turned up late. What could not be."""
        failed: list[str] = []
        known = {rental.marker for rental in self._open()}
        try:
            for pod in await self._provider.list(self._marker):
                if pod.marker not in known:
                    logger.warning("Pod %s turned up late, and is ended.", pod.marker)
                    rental = next((r for r in self._store.rentals(self._name) if r.marker == pod.marker), None)
                    now = self._clock()
                    rental = rental or Rental(pod.marker, self._name, pod.offer, "intent", now, now)
                    await self._end(self._rented(rental, pod), "failed")
        except Exception as error:
            failed.append(f"late pods ({error})")
        return failed

    def _open(self) -> list[Rental]:
        return [rental for rental in self._store.rentals(self._name) if rental.state != "ended"]

    def _save(self, rental: Rental) -> None:
        self._store.save_rental(evolve(rental, seen=self._clock()))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
