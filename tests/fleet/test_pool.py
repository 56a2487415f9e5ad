"""The pool against a provider with scripted faults, in virtual time: nothing leaked, and every second booked."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from attrs import evolve

from ai_trains_ai.errors import BudgetExceeded, Forbidden, NoCapacity, OutOfFunds, ProviderError, Transient
from ai_trains_ai.fleet import Fleet, FleetTimes, Ledger
from ai_trains_ai.interfaces import Transport
from ai_trains_ai.records import Budget, Charge, Money, Offer, PodRequest
from ai_trains_ai.store import Store
from ai_trains_ai.testing import FakeGPUProvider
from ai_trains_ai.testing.fakes import LOST_REPLY, Unlisted

T = TypeVar("T")
CHEAP = Offer("a100", "A100", 1, 1.80)
TIMES = FleetTimes()
DEAR = Offer("h100", "H100", 1, 3.60, slots=2)


class Time:
    """Virtual time: it jumps to the next sleeper when nobody has anything else to do."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._numbers), future))
        await future

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, with time passing as it sleeps."""
        task = asyncio.ensure_future(work)
        for _ in range(100_000):
            for _ in range(20):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            if self._sleepers:
                when, _, future = heapq.heappop(self._sleepers)
                if not future.cancelled():
                    self.now = max(self.now, when)
                    future.set_result(None)
        raise AssertionError("it never ends")


async def fine(transport: Transport, offer: Offer) -> str:
    return ""


class World:
    """A provider, a run's books, and the controllers that come and go."""

    def __init__(self, folder: Path, offers: tuple[Offer, ...] = (CHEAP,), **options: Any) -> None:
        self.time = Time()
        self.provider = FakeGPUProvider(offers, clock=self.time, **options)
        self.provider.max_pods = 2
        self.store = Store.create(folder / "run.db")
        self.budget = Budget()
        self.canary: Any = fine
        self.hired: list[Charge] = []

    def controller(self, times: FleetTimes = TIMES) -> Fleet:
        """A fleet as a (re)started process makes it."""
        self.ledger = Ledger(self.store, self.budget, self.time, lambda event: None)
        return Fleet(
            self.provider, self.ledger, self.time, "ata-run", times=times, sleep=self.time.sleep, canary=self.canary
        )

    async def job(self, fleet: Fleet, name: str, seconds: float = 600.0) -> str:
        async with fleet.lease(name) as lease:
            await self.time.sleep(seconds)
            return lease.pod.offer.id

    def booked(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for _, charge in self.store.charges():
            total[charge.kind] = total.get(charge.kind, 0.0) + charge.usd
        return total

    def assert_clean(self) -> None:
        """No pod is alive, and both books agree to the cent."""
        assert self.provider.alive == []
        assert sum(self.booked().values()) == pytest.approx(self.provider.spent, abs=1e-9)
        assert self.ledger.spent == pytest.approx(self.provider.spent, abs=1e-9)
        assert all(rental.state == "ended" for rental in self.store.rentals())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_jobs_share_warm_pods_and_every_second_is_booked(tmp_path: Path) -> None:
    world = World(tmp_path, (DEAR,), boot_seconds=90.0)
    fleet = world.controller()

    async def work() -> None:
        await asyncio.gather(*(world.job(fleet, f"job-{n}") for n in range(10)))
        assert len(fleet.pods) == 2  # four slots: three rounds, the last of them half empty
        await fleet.close()

    await world.time.run(work())
    assert world.provider.calls.count("create") == 2
    booked = world.booked()
    assert booked["busy"] == pytest.approx(10 * 600 / 3600 * 1.80)
    assert booked["boot"] > 0
    assert booked["idle"] > 0
    world.assert_clean()


async def test_no_more_pods_than_waiting_jobs_need(world: World) -> None:
    fleet = world.controller()

    async def work() -> None:
        await world.job(fleet, "one")
        await world.job(fleet, "two")
        await fleet.close()

    await world.time.run(work())
    assert world.provider.calls.count("create") == 1
    world.assert_clean()


async def test_the_cheapest_per_job_comes_first_and_another_when_it_is_out(tmp_path: Path) -> None:
    world = World(tmp_path, (CHEAP, DEAR), stock={"a100": 0})
    fleet = world.controller()

    async def work() -> tuple[str, str]:
        # per slot both cost the same; the provider's order decides until stock does
        first = await world.job(fleet, "first")
        await fleet.close()
        world.provider.stock["a100"] = 1
        again = world.controller()
        second = await world.job(again, "second")
        await again.close()
        return first, second

    assert await world.time.run(work()) == ("h100", "a100")
    world.assert_clean()


async def test_an_offer_that_runs_out_between_the_look_and_the_create(world: World) -> None:
    world.provider.faults += [("create", NoCapacity("gone")), ("create", NoCapacity("gone"))]
    fleet = world.controller()
    begin = world.time.now

    async def work() -> None:
        await world.job(fleet, "job", 0.0)
        await fleet.close()

    await world.time.run(work())
    assert 60.0 + 120.0 <= world.time.now - begin < 400.0  # it cools down, longer each time
    world.assert_clean()


# ------------------------------------------------------------------------------------------ lost answers


async def test_a_create_without_an_answer_is_found_and_used(world: World) -> None:
    world.provider.faults.append(("create", LOST_REPLY))
    fleet = world.controller()

    async def work() -> None:
        await world.job(fleet, "job")
        await fleet.close()

    await world.time.run(work())
    assert world.provider.calls.count("create") == 1  # never a blind retry
    world.assert_clean()


async def test_a_create_without_an_answer_that_lags_in_the_listing(world: World) -> None:
    async def lagging(offer: Any, spec: Any, create: Any = world.provider.create) -> Any:
        world.provider.faults.append(("create", Unlisted(7)))
        pod = await create(offer, spec)
        world.provider.create = create  # type: ignore[method-assign]
        from ai_trains_ai.errors import AmbiguousCreate

        raise AmbiguousCreate(f"no answer for {pod.marker}")

    world.provider.create = lagging  # type: ignore[method-assign]
    fleet = world.controller()

    async def work() -> None:
        await world.job(fleet, "job")
        await fleet.close()

    await world.time.run(work())
    assert world.provider.calls.count("create") == 1
    world.assert_clean()


async def test_a_pod_that_turns_up_after_the_search_was_given_up_is_ended(world: World) -> None:
    async def late(offer: Any, spec: Any, create: Any = world.provider.create) -> Any:
        world.provider.faults.append(("create", Unlisted(5)))
        await create(offer, spec)
        world.provider.create = create  # type: ignore[method-assign]
        from ai_trains_ai.errors import AmbiguousCreate

        raise AmbiguousCreate("no answer")

    world.provider.create = late  # type: ignore[method-assign]
    fleet = world.controller(FleetTimes(search=10.0))

    async def work() -> None:
        await world.job(fleet, "job")
        await fleet.close()

    await world.time.run(work())
    assert world.provider.calls.count("create") == 2
    world.assert_clean()


# ------------------------------------------------------------------------------------------ pods that don't work


async def test_a_pod_that_never_boots_is_ended_and_paid_for(world: World) -> None:
    world.provider.boot_seconds = 1e9
    fleet = world.controller(FleetTimes(boot=300.0))

    async def work() -> None:
        job = asyncio.ensure_future(world.job(fleet, "job"))
        await world.time.sleep(320.0)
        world.provider.boot_seconds = 30.0
        await job
        await fleet.close()

    await world.time.run(work())
    assert world.booked()["failed"] == pytest.approx(300 / 3600 * 1.80, rel=0.05)
    world.assert_clean()


async def test_a_pod_that_fails_the_canary_is_ended(world: World) -> None:
    tried: list[str] = []

    async def canary(transport: Transport, offer: Offer) -> str:
        tried.append(offer.id)
        return "no GPU" if len(tried) == 1 else ""

    world.canary = canary
    fleet = world.controller()

    async def work() -> None:
        await world.job(fleet, "job")
        await fleet.close()

    await world.time.run(work())
    assert len(tried) == 2
    world.assert_clean()


async def test_a_pod_that_somebody_else_ended_is_let_go(world: World) -> None:
    fleet = world.controller(FleetTimes(idle=1e9))

    async def work() -> None:
        await world.job(fleet, "one", 1.0)
        world.provider.lose(fleet.pods[0].id)
        await world.time.sleep(120.0)
        assert fleet.pods == []
        await world.job(fleet, "two", 1.0)
        await fleet.close()

    await world.time.run(work())
    assert world.provider.calls.count("create") == 2
    assert world.provider.alive == []
    # the end of a lost pod is known to within one look of the watch
    assert sum(world.booked().values()) == pytest.approx(world.provider.spent, abs=30 / 3600 * 1.80)


async def test_a_pod_without_work_is_ended(world: World) -> None:
    fleet = world.controller(FleetTimes(idle=300.0))

    async def work() -> None:
        await world.job(fleet, "job")
        await world.time.sleep(400.0)
        assert fleet.pods == []
        assert world.provider.alive == []
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


# ------------------------------------------------------------------------------------------ money


async def test_nothing_is_rented_that_the_budget_can_not_carry(world: World) -> None:
    world.budget = Budget(usd=0.10)
    fleet = world.controller()
    with pytest.raises(BudgetExceeded, match=r"a pod of a100 would cost at least 0\.27 USD, but only 0\.07 of 0\.10"):
        await world.time.run(world.job(fleet, "job"))
    await world.time.run(fleet.close())
    assert "create" not in world.provider.calls


async def test_running_pods_count_before_they_are_booked(world: World) -> None:
    world.budget = Budget(usd=1.0)
    fleet = world.controller()

    async def work() -> None:
        async with fleet.lease("long"):
            await world.time.sleep(1_500.0)  # 0.75 USD
            assert world.ledger.spent == pytest.approx(0.75)
            with pytest.raises(BudgetExceeded):
                world.ledger.require(Charge("tokens", "outer", 1.0, "tokens", 0.3))
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_the_hourly_limit_holds_back_pods(world: World) -> None:
    world.budget = Budget(usd_per_hour=2.0)
    fleet = world.controller()

    async def work() -> None:
        await asyncio.gather(*(world.job(fleet, f"job-{n}") for n in range(4)))
        await fleet.close()

    await world.time.run(work())
    assert world.provider.calls.count("create") == 1
    world.assert_clean()
    world.budget = Budget(usd_per_hour=1.0)
    with pytest.raises(BudgetExceeded, match=r"the limit is 1\.00"):
        await world.time.run(world.job(world.controller(), "job"))


async def test_a_budget_that_ends_while_a_pod_works_stops_growth_and_not_the_pod(world: World) -> None:
    world.budget = Budget(usd=0.65)  # one pod's admission and no second
    fleet = world.controller()

    async def work() -> None:
        await asyncio.gather(*(world.job(fleet, f"job-{n}", 60.0) for n in range(3)))
        await fleet.close()

    await world.time.run(work())
    assert world.provider.calls.count("create") <= 2
    world.assert_clean()


@pytest.mark.parametrize("error", [Forbidden("the key is wrong"), OutOfFunds("the account is empty")])
async def test_what_no_waiting_mends_ends_every_wait(world: World, error: ProviderError) -> None:
    world.provider.faults += [("create", error), ("create", error)]
    fleet = world.controller()

    async def work() -> list[Any]:
        jobs = (world.job(fleet, f"job-{n}") for n in range(3))
        return await asyncio.gather(*jobs, return_exceptions=True)

    assert [type(done) for done in await world.time.run(work())] == [type(error)] * 3
    await world.time.run(fleet.close())
    assert world.provider.alive == []


async def test_a_provider_with_a_bug_hangs_nobody(world: World) -> None:
    world.provider.faults.append(("create", TypeError("a bug")))
    fleet = world.controller(FleetTimes(search=10.0))
    with pytest.raises(TypeError, match="a bug"):
        await world.time.run(world.job(fleet, "job"))
    await world.time.run(fleet.close())
    world.assert_clean()


async def test_an_observer_that_stops_the_run_at_a_charge_leaves_no_pod_in_the_books(world: World) -> None:
    fleet = world.controller(FleetTimes(idle=60.0))

    def stop(event: Any) -> None:
        if event.charge.kind == "idle":
            raise BudgetExceeded("enough idling")

    async def work() -> None:
        await world.job(fleet, "one", 1.0)
        world.ledger._emit = stop
        await world.time.sleep(300.0)
        assert world.provider.alive == []
        with pytest.raises(BudgetExceeded, match="enough idling"):
            await world.job(fleet, "two", 1.0)
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_a_hiccup_of_the_service_is_waited_out(world: World) -> None:
    world.provider.faults += [("create", Transient("503")), ("offers", Transient("503"))]
    fleet = world.controller()

    async def work() -> None:
        with pytest.raises(Transient):
            await fleet.start()
        await world.job(fleet, "job")
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_a_kind_that_is_not_to_be_had(world: World) -> None:
    fleet = world.controller()
    with pytest.raises(NoCapacity, match=r"has no machine for .*B200"):
        await fleet.start(PodRequest(("B200",)))


async def test_a_pod_that_costs_more_than_the_hour_may_is_ended(world: World) -> None:
    world.budget = Budget(usd_per_hour=2.0)
    kept = world.provider.create

    async def dear(offer: Offer, spec: Any) -> Any:
        pod = await kept(offer, spec)
        world.provider._rented[pod.id].pod = pod = evolve(pod, offer=evolve(pod.offer, usd_per_hour=9.0))
        return pod

    world.provider.create = dear  # type: ignore[method-assign]
    fleet = world.controller()
    with pytest.raises(BudgetExceeded, match=r"costs 9\.00 USD an hour; the limit is 2\.00"):
        await world.time.run(world.job(fleet, "job"))
    await world.time.run(fleet.close())
    assert world.provider.calls.count("create") == 1
    assert world.provider.alive == []


async def test_a_job_needs_the_whole_pod_paid(tmp_path: Path) -> None:
    wide = Offer("wide", "H100", 1, 8.0, slots=8)
    world = World(tmp_path, (wide,))
    world.budget = Budget(usd=2.5)
    fleet = world.controller()

    async def long() -> None:
        async with fleet.lease("long", 3600.0):
            pass

    with pytest.raises(BudgetExceeded, match=r"a pod of wide would cost at least 7\.00 USD"):
        await world.time.run(long())
    await world.time.run(fleet.close())
    assert "create" not in world.provider.calls


async def test_an_offer_beyond_the_limits_does_not_stand_before_one_within(tmp_path: Path) -> None:
    world = World(tmp_path, (Offer("wide", "H100", 1, 4.0, slots=8), CHEAP))
    world.budget = Budget(usd_per_hour=2.0)
    fleet = world.controller()

    async def work() -> str:
        used = await world.job(fleet, "job")
        await fleet.close()
        return used

    assert await world.time.run(work()) == "a100"
    world.assert_clean()


async def test_a_dear_offer_is_not_rented_for_a_job_that_it_can_not_finish(tmp_path: Path) -> None:
    world = World(tmp_path, (CHEAP, Offer("h200", "H200", 1, 4.0)), stock={"a100": 0})
    world.budget = Budget(usd=2.0)
    fleet = world.controller()

    async def hour() -> str:
        async with fleet.lease("hour", 3600.0) as lease:
            return lease.pod.offer.id

    async def work() -> str:
        waiting = asyncio.ensure_future(hour())
        await world.time.sleep(300.0)
        assert "create" not in world.provider.calls
        world.provider.stock["a100"] = 1
        used = await waiting
        await fleet.close()
        return used

    assert await world.time.run(work()) == "a100"
    world.assert_clean()


async def test_a_bill_above_the_books_is_an_alarm(world: World, caplog: pytest.LogCaptureFixture) -> None:
    fleet = world.controller(FleetTimes(bill=600.0))
    factor = 1.0

    async def billed(since: Any, pod_ids: Any = None) -> Money:
        assert len(pod_ids) == 1
        return Money(factor * world.provider.spent)

    world.provider.billed = billed  # type: ignore[method-assign]

    async def work() -> None:
        nonlocal factor
        await world.job(fleet, "honest", 1500.0)
        assert "more is billed" not in caplog.text
        factor = 1.1
        await world.job(fleet, "dear", 1500.0)
        await fleet.close()

    await world.time.run(work())
    assert "more is billed than booked" in caplog.text


# ------------------------------------------------------------------------------------------ nobody's pods


async def test_two_fleets_of_one_run_leave_each_others_pods_alone(world: World) -> None:
    one = world.controller()
    other = Fleet(
        world.provider, world.ledger, world.time, "ata-run-2", TIMES, world.time.sleep, canary=fine, name="Other"
    )
    one._prefix = "ata-run-1-"

    async def work() -> None:
        await asyncio.gather(world.job(one, "one", 300.0), world.job(other, "two", 300.0))
        await one.close()
        assert len(world.provider.alive) == 1
        await other.close()

    await world.time.run(work())
    assert world.provider.calls.count("create") == 2
    assert world.provider.alive == []


async def test_a_close_that_failed_is_taken_up_by_the_next(world: World) -> None:
    fleet = world.controller()

    async def work() -> None:
        await world.job(fleet, "job")
        world.provider.faults.append(("terminate", Transient("500")))
        with pytest.raises(ProviderError, match="Not terminated, and still costing money: ata-run-"):
            await fleet.close()
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_a_close_that_was_interrupted_is_taken_up_by_the_next(world: World) -> None:
    fleet = world.controller()
    kept = world.provider.terminate

    async def slow(pod_id: str) -> None:
        await world.time.sleep(60.0)
        await kept(pod_id)

    async def work() -> None:
        await world.job(fleet, "job")
        world.provider.terminate = slow  # type: ignore[method-assign]
        closing = asyncio.ensure_future(fleet.close())
        await world.time.sleep(5.0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert world.provider.alive
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_a_closed_fleet_rents_nothing(world: World) -> None:
    fleet = world.controller()

    async def work() -> None:
        await world.job(fleet, "job")
        await fleet.close()
        with pytest.raises(ProviderError, match="is closed"):
            await world.job(fleet, "late")

    await world.time.run(work())
    assert world.provider.calls.count("create") == 1
    world.assert_clean()


async def test_an_end_that_failed_is_tried_again_while_the_run_goes_on(world: World) -> None:
    fleet = world.controller(FleetTimes(idle=60.0))

    async def work() -> None:
        await world.job(fleet, "job")
        world.provider.faults += [("terminate", Transient("500")), ("terminate", Transient("500"))]
        await world.time.sleep(200.0)
        assert world.provider.alive == []
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_a_look_that_breaks_is_not_the_last(world: World) -> None:
    fleet = world.controller(FleetTimes(idle=60.0))

    async def work() -> None:
        await world.job(fleet, "job")
        world.provider.faults += [("list", OSError("a socket")), ("list", TypeError("a bug"))]
        await world.time.sleep(200.0)
        assert world.provider.alive == []
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_a_search_that_failed_is_taken_up_by_the_watch(world: World) -> None:
    world.provider.faults += [("create", LOST_REPLY), ("list", Transient("503"))]
    fleet = world.controller(FleetTimes(idle=1e9))

    async def work() -> None:
        await world.job(fleet, "job", 900.0)
        assert len(world.provider.alive) == 1
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_a_hiccup_while_a_bad_pod_is_ended_stops_nobody(world: World) -> None:
    tried: list[str] = []

    async def canary(transport: Transport, offer: Offer) -> str:
        tried.append(offer.id)
        return "no GPU" if len(tried) == 1 else ""

    world.canary = canary
    world.provider.faults.append(("terminate", Transient("500")))
    fleet = world.controller()

    async def work() -> None:
        await world.job(fleet, "job")
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_a_fine_offer_gets_its_turn_after_bad_pods_of_a_cheaper_one(tmp_path: Path) -> None:
    world = World(tmp_path, (CHEAP, Offer("h200", "H200", 1, 4.0)))

    async def canary(transport: Transport, offer: Offer) -> str:
        return "no GPU" if offer.gpu_type == "A100" else ""

    world.canary = canary
    fleet = world.controller()

    async def work() -> str:
        used = await world.job(fleet, "job")
        await fleet.close()
        return used

    assert await world.time.run(work()) == "h200"
    assert world.provider.calls.count("create") == 3
    world.assert_clean()


async def test_two_jobs_and_the_money_for_one_pod(tmp_path: Path) -> None:
    world = World(tmp_path, (CHEAP,), boot_seconds=60.0)
    world.budget = Budget(usd=0.45)
    fleet = world.controller()

    async def work() -> None:
        await asyncio.gather(world.job(fleet, "one", 60.0), world.job(fleet, "two", 60.0))
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_a_bad_pod_that_can_not_be_ended_is_not_forgotten_while_its_boot_goes_on(world: World) -> None:
    tried: list[str] = []

    async def canary(transport: Transport, offer: Offer) -> str:
        tried.extend(world.provider.alive)
        return "no GPU"

    world.canary = canary
    world.provider.faults.append(("terminate", Transient("500")))
    fleet = world.controller()

    async def work() -> None:
        waiting = asyncio.ensure_future(world.job(fleet, "job"))
        await world.time.sleep(60.0)
        assert tried[0] not in world.provider.alive
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await fleet.close()

    await world.time.run(work())
    world.assert_clean()


async def test_boots_without_stock_ask_for_the_offers_together(world: World) -> None:
    world.provider.max_pods, world.provider.stock["a100"] = 16, 0
    fleet = world.controller()

    async def work() -> int:
        jobs = [asyncio.ensure_future(world.job(fleet, f"job-{n}")) for n in range(16)]
        await world.time.sleep(600.0)
        asked = world.provider.calls.count("offers")
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await fleet.close()
        return asked

    assert await world.time.run(work()) <= 600 / 5 + 2
    world.assert_clean()


async def test_pods_that_are_all_bad_are_not_rented_for_ever(world: World) -> None:
    async def canary(transport: Transport, offer: Offer) -> str:
        return "torch is too old"

    world.canary = canary
    fleet = world.controller()
    with pytest.raises(ProviderError, match=r"6 pods of FakeGPUProvider in a row could not be used.*torch is too old"):
        await world.time.run(world.job(fleet, "job"))
    await world.time.run(fleet.close())
    assert world.provider.calls.count("create") == 6
    world.assert_clean()


# ------------------------------------------------------------------------------------------ controllers come and go


async def kill(fleet: Fleet) -> None:
    """What SIGKILL leaves: nothing of the controller, and everything of the provider."""
    for task in list(fleet._tasks):
        task.cancel()
    await asyncio.gather(*fleet._tasks, return_exceptions=True)


async def test_a_restarted_controller_takes_its_pods_over(world: World) -> None:
    first = world.controller()

    async def work() -> None:
        job = asyncio.ensure_future(world.job(first, "cut off", 1e6))
        await world.time.sleep(900.0)
        first._tasks.add(job)
        world.provider.terminate, kept = _never, world.provider.terminate  # type: ignore[method-assign]
        await kill(first)
        world.provider.terminate = kept  # type: ignore[method-assign]
        await world.time.sleep(600.0)
        second = world.controller()
        await second.start()
        assert [pod.marker for pod in second.pods] == world.provider.alive
        await world.job(second, "again")
        await second.close()

    await world.time.run(work())
    assert world.provider.calls.count("create") == 1
    world.assert_clean()


async def _never(pod_id: str) -> None:
    raise Transient("the process is dead")


@pytest.mark.parametrize("moment", range(12))
async def test_a_controller_that_dies_at_any_moment_leaks_nothing(tmp_path: Path, moment: int) -> None:
    """Killed at its n-th call of the provider, before or after the call took effect, and started again."""
    world = World(tmp_path, (CHEAP,), boot_seconds=20.0)
    await world.time.run(_die_at(world, moment // 2, after=moment % 2 == 1))
    again = world.controller()

    async def finish() -> None:
        await world.job(again, "job")
        await again.close()

    await world.time.run(finish())
    world.assert_clean()


class Killed(BaseException):
    """The process is gone."""


async def _die_at(world: World, call: int, *, after: bool) -> None:
    fleet, provider, count = world.controller(), world.provider, itertools.count()
    names = ("offers", "create", "get", "list", "terminate", "connect")
    kept = {name: getattr(provider, name) for name in names}
    dead = False

    def wrapped(name: str) -> Any:
        async def perform(*arguments: Any) -> Any:
            nonlocal dead
            if dead:
                raise Killed
            if next(count) == call:
                dead = True
                if after:
                    await kept[name](*arguments)
                raise Killed
            return await kept[name](*arguments)

        return perform

    for name in names:
        setattr(provider, name, wrapped(name))
    job = asyncio.ensure_future(world.job(fleet, "job", 100.0))
    for _ in range(40):
        if dead or job.done():
            break
        await world.time.sleep(10.0)
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    dead = True
    await kill(fleet)
    for name in names:
        setattr(provider, name, kept[name])
