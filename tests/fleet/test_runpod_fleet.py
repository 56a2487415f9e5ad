"""A fleet on a local Runpod with real SSH machines: jobs end, nothing leaks, both ledgers agree, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.runpod import Fault, LocalRunpod

from ai_trains_ai.errors import BudgetExceeded, Forbidden, OutOfFunds
from ai_trains_ai.fleet import Fleet, FleetTimes, Ledger
from ai_trains_ai.fleet.hosted import HostedJob, HostedJobs
from ai_trains_ai.providers.runpod.provider import RunpodProvider
from ai_trains_ai.records import Budget, Placement, PodRequest
from ai_trains_ai.store import Store
from ai_trains_ai.transport.ssh import Patience

WATCH = 10.0
TIMES = FleetTimes(boot=120.0, search=60.0, watch=WATCH, lost=60.0)
PATIENCE = Patience(connect=2.0, total=3.0, pause=0.05, keepalive=0.3)


class World:
    """The service, and one controller of a run."""

    def __init__(self, folder: Path, cloud: LocalRunpod) -> None:
        self.folder, self.cloud = folder, cloud
        self.store = Store.create(folder / "run.db")

    async def run(self, *jobs: HostedJob, budget: Budget = Budget(usd=5.0), **options: Any) -> list[Placement]:  # noqa: B008
        """Run jobs to their end on a fleet of A40s, and close the fleet."""
        provider = RunpodProvider(
            **{"max_pods": 2, "base_url": self.cloud.url, "clock": self.cloud.clock, "sleep": self.cloud.sleep,
               "patience": PATIENCE, **options},
        )  # fmt: skip
        self.ledger = Ledger(self.store, budget, self.cloud.clock, lambda event: None)
        fleet = Fleet(provider, self.ledger, self.cloud.clock, "ata-run", TIMES, self.cloud.sleep)
        hosted = HostedJobs(
            fleet,
            self.store,
            self.folder / "artifacts",
            self.cloud.clock,
            self.cloud.sleep,
            poll=5.0,
            silence=60.0,
            attempts=9,
        )
        try:
            await fleet.start(PodRequest(("A40",)))
            return list(await asyncio.wait_for(asyncio.gather(*map(hosted.run, jobs)), 90))
        finally:
            await fleet.close()

    def answer(self, job_id: str) -> str:
        return (self.folder / "artifacts" / job_id / "out/answer").read_text()

    def assert_clean(self) -> None:
        # on a busy machine a look takes up to a second, which is a minute here
        self.cloud.assert_clean(
            sum(charge.usd for _, charge in self.store.charges()), poll=max(WATCH, self.cloud.speed)
        )
        assert all(rental.state == "ended" for rental in self.store.rentals())
        assert self.ledger.spent == pytest.approx(sum(charge.usd for _, charge in self.store.charges()))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with LocalRunpod(tmp_path / "cloud", 60.0, requests_per_minute=240) as cloud:
        cloud.add_foreign("ata-runner-of-somebody-else")
        monkeypatch.setenv("RUNPOD_API_KEY", cloud.key)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.setattr("ai_trains_ai.providers.runpod.provider.LOG_SILENCE", 0.3)
        world = World(tmp_path, cloud)
        yield world
        world.assert_clean()


def job(number: int, seconds: float = 0.3) -> HostedJob:
    command = f"sleep {seconds}; mkdir out; expr $(cat number) '*' 2 >out/answer"
    return HostedJob(f"job-{number}", {"number": str(number).encode()}, command, 600.0)


async def test_jobs_on_two_pods(world: World) -> None:
    ended = await world.run(*(job(number) for number in range(1, 7)))
    assert [(placed.exit, world.answer(placed.job_id)) for placed in ended] == [(0, f"{2 * n}\n") for n in range(1, 7)]
    assert len({placed.marker for placed in ended}) == 2
    kinds = {charge.kind for _, charge in world.store.charges()}
    assert {"boot", "busy"} <= kinds


@pytest.mark.parametrize(
    "fault",
    [
        Fault("create", "lost_after"),
        Fault("create", "lost_before"),
        Fault("create", "lost_after", lag=20.0),
        Fault("create", "500_after"),
        Fault("create", "500"),
        Fault("create", "html"),
        Fault("create", "duplicate"),
        Fault("create", "capacity"),
        Fault("create", "403"),
        Fault("create", "429", retry_after=20),
        Fault("list", "html"),
        Fault("delete", "lost_after"),
        Fault("delete", "500"),
        Fault("boot", "stuck"),
        Fault("boot", "error"),
        Fault("boot", "no_direct"),
        Fault("boot", "refuse"),
        Fault("boot", "gpus", count=0),
        Fault("boot", "ecc", count=3),
        Fault("boot", "busy", mib=20000),
        Fault("boot", "silent"),
        Fault("boot", "remap", at=25),
        Fault("boot", "die", at=25),
        Fault("boot", "end", at=25),
        Fault("boot", "freeze", at=25),
        Fault("boot", "freeze", at=25, seconds=30),
    ],
    ids=lambda fault: f"{fault.on}-{fault.do}" + "".join(f"-{name}" for name in fault.details),
)
async def test_a_job_ends_though(world: World, fault: Fault) -> None:
    world.cloud.faults.append(fault)
    [ended] = await world.run(job(21, 1.0))
    assert (ended.exit, world.answer("job-21")) == (0, "42\n")
    assert world.cloud.faults == []  # it did happen


@pytest.mark.parametrize(("do", "error"), [("402", OutOfFunds), ("401", Forbidden)])
async def test_what_the_user_has_to_mend_ends_the_run(
    world: World, do: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    if do == "402":
        world.cloud.faults += [Fault("create", "402"), Fault("create", "402")]
    else:
        monkeypatch.setenv("RUNPOD_API_KEY", "rpa_WRONG")
    with pytest.raises(error):
        await world.run(job(1), max_pods=1)


async def test_the_service_is_asked_less_than_its_limit_allows(world: World) -> None:
    await world.run(*(job(number) for number in range(8)), max_pods=4)
    assert not [request for request in world.cloud.requests if request[-1] == 429]


async def test_a_job_that_the_budget_can_not_finish_is_not_started(world: World) -> None:
    with pytest.raises(BudgetExceeded, match="job-1 would cost at least"):
        await world.run(HostedJob("job-1", {}, "true", 8 * 3600.0), budget=Budget(usd=1.0))
    assert not [request for request in world.cloud.requests if request[1] == "POST"]


async def test_a_fleet_that_is_stopped_while_it_boots_leaves_nothing(world: World) -> None:
    work = asyncio.ensure_future(world.run(job(1), job(2)))
    await world.cloud.sleep(12.0)
    assert world.cloud.alive
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
