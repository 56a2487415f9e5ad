"""A pool of warm pods that leases slots to jobs.

Money rules: the intent to rent is stored before the provider is asked, and a pod whose create got no answer is looked
for by its marker; every second of a pod is booked at the price of the pod that was created, whatever it did in it;
nothing is started that the budget can't finish; a restarted controller finds its pods and the jobs on them again, and
ends those that it can't use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from datetime import UTC, datetime

from attrs import evolve

from ai_trains_ai.errors import BudgetExceeded, Fenced, NoCapacity, ProviderError, Transient, TransportError
from ai_trains_ai.fleet.books import Books
from ai_trains_ai.fleet.canary import Canary, answers
from ai_trains_ai.fleet.candidates import Candidates
from ai_trains_ai.fleet.costs import reconcile
from ai_trains_ai.fleet.ledger import Ledger
from ai_trains_ai.fleet.renting import TIMES, FleetTimes, Renter, Warm, has_stopped
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.records import Charge, Lease, Offer, Pod, PodRequest, Rental
from ai_trains_ai.transport.jobs import HostJobs

logger = logging.getLogger(__name__)

BAD_IN_ROW = 6  # pods that never became usable, while none works, after which the fleet says so instead of going on


class Fleet:
    """Leases slots of the pods of one provider, first come first served. Use it from the run's loop.

    Rents up to ``provider.max_pods`` pods while jobs wait, the cheapest per job first, and ends those without work.

    Args:
        provider: who rents.
        ledger: what it costs; its store keeps the rentals and the lasting leases.
        clock: seconds since the epoch.
        marker: begins the name of every pod of this fleet, and of no other.
        name: of the provider in the books; default its class.
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
        times: FleetTimes = TIMES,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        canary: Canary = answers,
        name: str = "",
    ) -> None:
        self._provider, self._ledger, self._clock = provider, ledger, clock
        self._prefix, self._times, self._sleep = f"{marker}-", times, sleep
        self._name = name or type(provider).__name__
        self._books = Books(ledger, clock, self._name)
        self._candidates = Candidates(clock)
        for gpu_type, hours in self._books.job_hours():  # what earlier sessions learned
            self._candidates.learn(gpu_type, hours)
        self._renter = Renter(provider, self._books, self._candidates, clock, times, sleep, canary)
        self._request = PodRequest()
        self._offers: list[Offer] = []
        self._warm: dict[str, Warm] = {}
        self._booting: set[str] = set()
        self._in_hand: set[str] = set()  # markers of pods that are being made, taken over or tried
        self._held_back: Exception | None = None  # why no further pod was rented the last time
        self._not_before = 0.0  # no further boot is tried earlier
        self._refreshing, self._refreshed = asyncio.Lock(), clock()
        self._left_over: dict[str, Lease] = {}  # lasting leases of an earlier session, by job
        self._strays: set[str] = set()  # ids of pods with our marker that the last look found and nobody rented
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed, self._starting = asyncio.Condition(), asyncio.Lock()
        self._waiting: dict[str, float] = {}  # the seconds of each job that has no slot yet
        self._real_prices: dict[str, float] = {}  # of offers whose pods cost more than they say
        self._stopped: Exception | None = None  # ends every wait until the next start
        self._broken: tuple[float, Exception] | None = None  # ends the waits of its moment
        self._closed = self._started = False
        self._billed_at = clock()

    async def start(self, request: PodRequest | None = None) -> None:
        """Find the offers, the pods of an earlier session, and the jobs on them. Idempotent.

        Raises:
            NoCapacity: the provider has nothing of the wanted kind.
        """
        async with self._starting:
            if self._offers:
                return
            self._request, self._closed = request or PodRequest(), False
            self._stopped = self._broken = None
            self._started = True
            self._renter.epoch = self._ledger.store.next_epoch(int(self._clock() * 1000))
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
    async def lease(self, job_id: str, seconds: float | None = None, *, lasting: bool = False) -> AsyncIterator[Lease]:
        """Hold one slot. Waits for a free one; the held time is charged at the pod's price per slot.

        Args:
            job_id: who holds it.
            seconds: the longest that it may take: the budget must cover all of it.
            lasting: a controller that is restarted, and asks for the same job again, gets the same slot.

        Raises:
            BudgetExceeded: the budget doesn't cover the job, or a pod.
            ProviderError: the provider refuses for good (key, funds), or the fleet was closed.
        """
        self._require_open()
        await self.start()
        lease = self._left_over.pop(job_id, None)
        if lease is None:
            lease = await self._take(job_id, self._times.admission if seconds is None else seconds, lasting)
        try:
            yield lease
            self._candidates.learn(lease.pod.offer.gpu_type, (self._clock() - lease.begin) / 3600)
        finally:
            self._give_back(lease)

    async def distrust(self, lease: Lease, why: str) -> None:
        """Give up the pod of a lease: it can't be used. It is ended, and its machine left alone for a while."""
        warm = self._warm.get(lease.pod.marker)
        if warm is not None:
            self._renter.quarantine(warm.pod)
            await self._let_go(warm, why)

    async def jobs(self, lease: Lease) -> HostJobs:
        """The jobs on the pod of a lease, with the host's side of the protocol in place.

        Raises:
            Transient: the pod is gone, or can't be reached now.
            Fenced: a newer controller has it.
        """
        warm = self._warm.get(lease.pod.marker)
        if warm is None:
            raise Transient(f"Pod {lease.pod.marker} is gone.")
        await warm.jobs.prepare()
        return warm.jobs

    def stop(self, error: Exception) -> None:
        """Give out no slot any more: every wait for one, now and until the fleet was closed and started, ends so."""
        self._stopped = error
        self._spawn(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _require_open(self) -> None:
        if self._stopped is not None:
            raise self._stopped
        if self._closed:
            raise ProviderError(f"The fleet of {self._name} is closed; no slot is given out any more.")

    async def _take(self, job_id: str, seconds: float, lasting: bool) -> Lease:
        share = seconds / 3600 * min(offer.usd_per_hour / offer.slots for offer in self._offers)
        self._ledger.require(Charge("busy", job_id, seconds, "seconds", share))
        name = uuid.uuid4().hex
        self._books.expect(name, share)  # two jobs that wait don't count on the same dollars
        self._waiting[name] = seconds
        try:
            async with self._changed:
                warm = await self._free_pod()
                self._books.give_up(name)
                # the pod that came may be dearer, and all of it is paid for as long as one slot is used
                usd = self._books.kept_for(warm.marker, seconds)
                self._ledger.require(Charge("busy", job_id, seconds, "seconds", usd, warm.marker))
                lease = Lease(name, warm.pod, job_id, warm.free_slot(), self._clock(), seconds)
                warm.leases[lease.slot] = lease
                self._books.begin(lease, lasting=lasting)
                return lease
        finally:
            self._waiting.pop(name, None)
            self._books.give_up(name)

    async def _free_pod(self) -> Warm:
        """A pod with a free slot. Called with the lock held."""
        since = self._clock()
        while True:
            self._require_open()
            if self._broken is not None and self._broken[0] >= since:
                raise self._broken[1]
            # fullest first, so that others become idle and are ended
            free = [warm for warm in self._warm.values() if warm.free]
            if free:
                return min(free, key=lambda warm: warm.free)
            self._rent_more()
            await self._changed.wait()

    def _give_back(self, lease: Lease) -> None:
        """Free the slot and book its time; nothing here waits, so nothing can interrupt it."""
        warm = self._warm.get(lease.pod.marker)
        if warm is not None:
            warm.leases.pop(lease.slot, None)
            warm.idle_since = self._clock()
        self._spawn(self._notify())
        self._books.finish(lease)

    # ------------------------------------------------------------------------------------------ renting

    def _rent_more(self) -> None:
        """Boot as many pods as the waiting jobs need and the limits allow. Called with the lock held."""
        if self._clock() < self._not_before:
            return
        slots = max(1, max(offer.slots for offer in self._offers))
        there = len(self._books.open) + sum(1 for marker in self._in_hand if not self._books.has(marker))
        there = max(there, len(self._warm) + len(self._booting))
        while len(self._booting) * slots < len(self._waiting) and there < self._provider.max_pods:
            there += 1
            boot = uuid.uuid4().hex[:8]
            self._booting.add(boot)
            self._spawn(self._boot(boot))

    async def _boot(self, boot: str) -> None:
        """One more usable pod, from whichever offer has one; an error that no waiting mends ends the waits."""
        broken: Exception | None = None
        try:
            # whoever waited may have got another pod's slot meanwhile, or have given up
            while self._waiting and not self._closed and self._stopped is None and not await self._try_offers(boot):
                if len(self._renter.failures) >= BAD_IN_ROW and not self._warm:
                    why, self._renter.failures = self._renter.failures[-1], []
                    raise ProviderError(
                        f"{BAD_IN_ROW} pods of {self._name} in a row could not be used, the last one because {why}. "
                        "See what their image and their logs have to do with it."
                    )
                wait = self._times.poll
                if not self._candidates.ranked(self._offers):
                    wait = self._candidates.soonest() or wait
                    logger.info("%s: nothing is free now; trying again in %.0f s.", self._name, wait)
                await self._sleep(wait)
                await self._refresh()
        except Fenced as error:
            self.stop(error)
        except Exception as error:  # whatever it is, nobody may wait for ever
            broken = error
        finally:
            async with self._changed:
                self._booting.discard(boot)
                if broken is not None and (self._warm or self._booting):  # jobs wait for what works, or may soon
                    again = type(broken) is type(self._held_back)
                    logger.log(
                        logging.DEBUG if again else logging.WARNING, "%s rents no further pod: %s", self._name, broken
                    )
                    self._held_back = broken
                    self._not_before = self._clock() + self._times.watch
                    self._spawn(self._later())
                elif broken is not None:
                    self._broken = (self._clock(), broken)
                self._changed.notify_all()

    async def _refresh(self) -> None:
        """Ask for the offers anew, for all boots together."""
        async with self._refreshing:
            if self._clock() - self._refreshed >= self._times.poll:
                self._refreshed = self._clock()
                with contextlib.suppress(Transient):
                    self._offers = list(await self._provider.offers(self._request)) or self._offers

    async def _later(self) -> None:
        """Let those who wait try again."""
        await self._sleep(self._times.watch)
        await self._notify()

    async def _try_offers(self, boot: str) -> bool:
        """Rent and boot a pod of the best offer that has one; whether there is one now."""
        offers = [evolve(o, usd_per_hour=max(o.usd_per_hour, self._real_prices.get(o.id, 0.0))) for o in self._offers]
        barriers = {offer.id: self._barrier(offer) for offer in offers}
        found = [barrier for barrier in barriers.values() if barrier is not None]
        if len(found) == len(offers):
            raise found[0]
        for offer in self._candidates.ranked(offers):
            if barriers[offer.id] is not None or not self._has_room(offer):
                continue
            marker = f"{self._prefix}{boot}{uuid.uuid4().hex[:4]}"
            self._books.expect(boot, self._beyond_waiting(offer))
            self._in_hand.add(marker)
            try:
                seconds = max(self._times.pod, *self._waiting.values(), 0.0)
                self._ledger.ask(
                    Charge("pod", f"a pod of {offer.id}", seconds, "seconds", seconds * _per_second(offer))
                )
                rented = await self._renter.create(self._books.intend(marker, offer))
                if rented is None:
                    return False
                if await self._too_dear(offer, rented[0]):
                    continue
                return await self._warm_up(*rented)
            except NoCapacity:
                self._candidates.refused(offer)
            except Transient as error:
                logger.warning("%s: %s", self._name, error)
                return False
            finally:
                self._in_hand.discard(marker)
                self._books.give_up(boot)
        return False

    async def _warm_up(self, rental: Rental, pod: Pod, *, busy: bool = False) -> bool:
        warm = await self._renter.boot(rental, pod, busy=busy)
        if warm is None:
            return False
        async with self._changed:
            warm.idle_since = self._clock()
            self._warm[rental.marker] = warm
            self._changed.notify_all()
        return True

    # ------------------------------------------------------------------------------------------ money

    def _barrier(self, offer: Offer) -> BudgetExceeded | None:
        """Why the budget can't carry a pod of an offer until the job that waits for it is over."""
        cap = self._ledger.budget.usd_per_hour
        if cap is not None and offer.usd_per_hour > cap:
            return BudgetExceeded(
                f"A pod of {offer.id} costs {offer.usd_per_hour:.2f} USD an hour; the limit is {cap:.2f}."
            )
        return self._ledger.shortage(f"a pod of {offer.id}", self._beyond_waiting(offer))

    def _beyond_waiting(self, offer: Offer) -> float:
        """Dollars of a pod until the longest job that waits is over, without what those on it have reserved."""
        seconds = max(self._times.pod, *self._waiting.values(), 0.0)
        reserved = sorted((self._books.expected_of(name) for name in self._waiting), reverse=True)
        return max(0.0, seconds * _per_second(offer) - sum(reserved[: offer.slots]))

    def _has_room(self, offer: Offer) -> bool:
        """Whether the hourly limit leaves room beside the pods that are there."""
        cap = self._ledger.budget.usd_per_hour
        return cap is None or self._books.usd_per_hour + offer.usd_per_hour <= cap

    async def _too_dear(self, offer: Offer, rental: Rental) -> bool:
        """End a pod that turned out to cost more than the offer said, and more than the budget carries."""
        price, cap = rental.offer.usd_per_hour, self._ledger.budget.usd_per_hour
        if price <= offer.usd_per_hour:
            return False
        self._real_prices[offer.id] = price
        if (cap is None or self._books.usd_per_hour <= cap) and self._barrier(
            evolve(offer, usd_per_hour=price)
        ) is None:
            return False
        logger.warning(
            "Pod %s costs %.2f USD an hour, not %.2f: it is ended.", rental.marker, price, offer.usd_per_hour
        )
        await self._renter.end(rental, "failed")
        self._candidates.refused(offer)
        return True

    # ------------------------------------------------------------------------------------------ upkeep

    async def _watch(self) -> None:
        """Now and then: let go of pods that are gone, hold back the dead-man switches, end what isn't used."""
        while not self._closed and not self._fenced:
            await self._sleep(self._times.watch)
            for step in (self._look_after, self._beat, self._retire, self._end_loose, self._compare_bill):
                try:
                    await step()
                except Fenced as error:
                    self.stop(error)
                    break  # the pods are another controller's now
                except BudgetExceeded as error:  # an observer stops the run
                    self.stop(error)
                except Exception as error:  # the next look may do better; without one, pods would run for ever
                    logger.warning("%s: %s", self._name, error or type(error).__name__)

    @property
    def _fenced(self) -> bool:
        return isinstance(self._stopped, Fenced)

    async def _beat(self) -> None:
        """Tell the pods that we are there."""
        await asyncio.gather(*(self._heard(warm) for warm in list(self._warm.values()) if warm.jobs.prepared))

    async def _heard(self, warm: Warm) -> None:
        try:
            await warm.jobs.beat()
        except (ProviderError, TransportError) as error:
            logger.warning("Pod %s doesn't hear us: %s", warm.marker, error)

    async def _retire(self) -> None:
        """End pods without work for too long, at once where the budget is at its end."""
        spent = self._ledger.left <= 0 and any(offer.usd_per_hour for offer in self._offers)
        late = self._clock() - (0.0 if spent else self._times.idle)
        async with self._changed:
            late_jobs = [
                self._left_over.pop(job_id)
                for job_id, lease in list(self._left_over.items())
                if lease.begin + max(lease.seconds, self._times.idle) <= self._clock()
            ]
            idle = [w for w in self._warm.values() if not w.leases and w.idle_since <= late]
            for warm in idle:
                del self._warm[warm.marker]
            if spent and not self._warm and not self._booting:
                ledger = self._ledger
                self._broken = (
                    self._clock(),
                    BudgetExceeded(
                        f"{ledger.spent:.2f} of {ledger.budget.usd:.2f} USD are spent. Raise the budget to go on."
                    ),
                )
            self._changed.notify_all()
        for warm in idle:
            await self._try_to_end(warm.rental, "idle", warm.transport)
        for lease in late_jobs:
            await self._drop(lease)

    async def abandon(self, job_id: str) -> None:
        """End a lasting lease of an earlier session, and its job, which nobody will ask for again. Idempotent."""
        lease = self._left_over.pop(job_id, None)
        if lease is not None:
            await self._drop(lease)

    async def _drop(self, lease: Lease) -> None:
        """End a lease that nobody holds, and its job."""
        logger.warning("Job %s was taken up by nobody; its slot is given to others.", lease.job_id)
        warm = self._warm.get(lease.pod.marker)
        try:
            if warm is not None:
                await warm.jobs.prepare()
                await warm.jobs.remove(lease.job_id)
        except (ProviderError, TransportError) as error:  # the next job on it wipes it
            logger.warning("Job %s: %s", lease.job_id, error)
        finally:
            self._give_back(lease)

    def _loose(self) -> list[Rental]:
        """Pods that are in the books, and that nobody has in hand: their end, or the look for them, failed."""
        return [
            rental
            for rental in self._books.open
            if rental.marker not in self._warm and rental.marker not in self._in_hand
        ]

    async def _end_loose(self) -> None:
        for rental in self._loose():
            pod = await self._renter.search(rental) if rental.state == "intent" else None
            if rental.state == "intent" and pod is None:
                self._books.nothing_came(rental)
            else:
                await self._try_to_end(rental if pod is None else self._books.rented(rental, pod), "failed")

    async def _try_to_end(self, rental: Rental, kind: str, transport: Transport | None = None) -> None:
        try:
            await self._renter.end(rental, kind, transport)
        except ProviderError as error:  # it stays in the books, and the next look tries again
            logger.warning("Pod %s can't be ended now: %s", rental.marker, error)

    async def _look_after(self) -> None:
        """Let go of pods that are gone, and give up those that stopped, or can't be reached for long.

        Listings lag, so a pod that isn't listed is asked for by its id before it counts as gone.
        """
        listed = [pod for pod in await self._provider.list(self._prefix) if pod.status != "terminated"]
        strays = {pod.id for pod in listed if self._books.is_stray(pod)}
        if strays & self._strays:  # a listing may still show what was ended a moment ago: two looks decide
            await self._end_strays(self._strays)
        self._strays = strays
        there = {pod.marker: pod for pod in listed if pod.id not in strays}
        self._books.seen(marker for marker, pod in there.items() if pod.status in ("starting", "ready"))
        for warm in list(self._warm.values()):
            pod = there.get(warm.marker) or await self._provider.get(warm.rental.pod_id)
            if pod is not None and pod.status == "ready":
                warm.silent_since = None
            elif pod is None or pod.status == "terminated":
                await self._let_go(warm, "it is gone, and nobody here ended it")
            elif has_stopped(warm.rental, pod):
                await self._let_go(warm, "it stopped by itself")
            elif warm.silent_since is None:
                warm.silent_since = self._clock()
            elif self._clock() - warm.silent_since >= self._times.lost:
                self._renter.quarantine(warm.pod)
                await self._let_go(warm, f"it is {pod.status} for {self._clock() - warm.silent_since:.0f} s")

    async def _compare_bill(self) -> None:
        """Now and then: warn when the provider bills more than is booked."""
        if self._clock() - self._billed_at < self._times.bill:
            return
        self._billed_at = self._clock()
        rentals = [rental for rental in self._ledger.store.rentals(self._name) if rental.pod_id]
        if not rentals:
            return
        since = datetime.fromtimestamp(min(rental.created for rental in rentals), UTC)
        billed = await self._provider.billed(since, [rental.pod_id for rental in rentals])
        found = reconcile(self._books.spent, billed, rentals, self._times.watch)
        if found is not None and found.alarm and found.difference > 0:  # a lower one lags
            logger.warning("%s: %s", self._name, found.sentence())

    async def _let_go(self, warm: Warm, why: str) -> None:
        """No job gets a slot of it any more, those on it notice, and it is ended."""
        logger.warning("Pod %s is let go: %s.", warm.marker, why)
        async with self._changed:
            self._warm.pop(warm.marker, None)
            for lease in [lease for lease in self._left_over.values() if lease.pod.marker == warm.marker]:
                del self._left_over[lease.job_id]
            self._changed.notify_all()
        await self._try_to_end(warm.rental, "failed", warm.transport)

    async def close(self) -> None:
        """Terminate every pod, also those that only the books or the provider know.

        Idempotent; after one that was interrupted or failed, the next one goes on.

        Raises:
            ProviderError: what could not be terminated, by name; everything was tried.
        """
        self._closed = True
        await self._notify()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        failed: list[str] = []
        if self._started:
            try:
                await self._beat()  # a controller that another one has followed ends nothing
                failed = await self._end_all()
            except Fenced as error:
                logger.warning("%s: its pods are left as they are. %s", self._name, error)
                self._stopped = error
        await asyncio.gather(*(warm.transport.close() for warm in self._warm.values()), return_exceptions=True)
        await self._provider.close()
        if failed:
            raise ProviderError(f"Not terminated, and still costing money: {', '.join(failed)}. End them by hand.")
        self._started, self._offers = False, []
        self._warm.clear()
        self._left_over.clear()

    async def _end_all(self) -> list[str]:
        """End what is in the books, and what carries our marker. What could not be ended, and why."""
        if self._fenced:
            return []
        failed: list[str] = []
        for rental in self._books.open:
            warm = self._warm.pop(rental.marker, None)
            try:
                pod = await self._renter.search(rental) if rental.state == "intent" else None
                if rental.state == "alive" or pod is not None:
                    known = rental if pod is None else self._books.rented(rental, pod)
                    await self._renter.end(known, "idle", None if warm is None else warm.transport)
                else:
                    self._books.nothing_came(rental)
            except Exception as error:
                failed.append(f"{rental.marker} ({error})")
        if self._books.ever_rented:
            failed += await self._end_strays()
        return failed

    # ------------------------------------------------------------------------------------------ an earlier session

    async def _reconcile(self) -> None:
        """Take over the pods of an earlier session and the jobs on them; end the useless, settle what is gone.

        Those that boot, or aren't listed, are waited for by nobody here.
        """
        rentals = self._books.open
        if not rentals:
            return
        listed = {pod.marker: pod for pod in await self._provider.list(self._prefix)}
        self._in_hand |= {rental.marker for rental in rentals}
        held = {lease.pod.marker for lease in self._books.leases}
        now: list[Awaitable[None]] = []
        for rental in rentals:
            pod = listed.get(rental.marker)
            work = self._take_over(rental, pod)
            if rental.marker in held or (pod is not None and pod.status != "starting"):
                now.append(work)
            else:
                self._spawn(work)
        await asyncio.gather(*now)
        await self._end_strays()

    async def _take_over(self, rental: Rental, pod: Pod | None) -> None:
        try:
            await self._taken_over(rental, pod)
        except Fenced as error:
            self.stop(error)
        except (ProviderError, TransportError) as error:
            logger.warning("Pod %s of an earlier session: %s", rental.marker, error)
        finally:
            self._in_hand.discard(rental.marker)
            await self._notify()

    async def _taken_over(self, rental: Rental, pod: Pod | None) -> None:
        if pod is None and rental.state == "intent":
            pod = await self._renter.search(rental)
            if pod is None:
                self._books.nothing_came(rental)
                return
        if pod is None:
            # a listing may lag behind; a pod that is asked for by its name does not
            pod = await self._provider.get(rental.pod_id)
        if pod is None:
            logger.warning("Pod %s is gone; it was last seen %.0f s ago.", rental.marker, self._clock() - rental.seen)
            self._books.ended(rental.marker, "idle", lost=True)
            return
        if has_stopped(rental, pod):
            await self._renter.end(rental, "failed")
            return
        known = self._books.rented(rental, pod)
        self._books.settle(rental.marker, "idle")  # whatever it did while nobody was there
        leases = [lease for lease in self._books.leases if lease.pod.marker == rental.marker]
        if not await self._warm_up(known, pod, busy=bool(leases)):
            return
        warm = self._warm[rental.marker]
        for lease in leases:
            placed = self._ledger.store.placement(lease.job_id)
            if placed is not None and placed.state == "ended":
                self._books.finish(lease)  # the job was over, and its lease was not
            else:
                warm.leases[lease.slot] = lease
                self._left_over[lease.job_id] = evolve(lease, pod=warm.pod)

    async def _end_strays(self, only: Container[str] | None = None) -> list[str]:
        """Terminate what carries our marker and isn't rented (of these ids only). What could not be."""
        failed: list[str] = []
        try:
            for pod in await self._provider.list(self._prefix):
                if self._books.is_stray(pod) and (only is None or pod.id in only):
                    logger.warning("Pod %s (%s) turned up late, and is ended.", pod.marker, pod.id)
                    await self._renter.end(self._books.late(pod), "failed")
        except Exception as error:
            failed.append(f"late pods ({error})")
        return failed

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _per_second(offer: Offer) -> float:
    """US dollars of the whole pod."""
    return offer.usd_per_hour / 3600
