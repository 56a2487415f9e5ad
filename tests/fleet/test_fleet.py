from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ai_trains_ai.errors import BudgetExceeded, ConfigurationError, TransportError
from ai_trains_ai.fleet import Fleet, Ledger
from ai_trains_ai.providers.local import LocalProvider
from ai_trains_ai.records import Budget, Charge, Offer, PodRequest
from ai_trains_ai.store import Store


class Priced(LocalProvider):
    async def offers(self, request: PodRequest) -> list[Offer]:
        return [Offer("x", "cpu", 0, 3_600.0, slots=self.slots)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(tmp_path: Path, provider: LocalProvider, usd: float | None = None) -> tuple[Fleet, Ledger, Clock]:
    clock = Clock()
    ledger = Ledger(Store.create(tmp_path / "run.db"), Budget(usd), clock, lambda event: None)
    return Fleet(provider, ledger, clock, "marker"), ledger, clock


async def test_no_more_leases_than_slots_and_none_is_lost(tmp_path: Path) -> None:
    fleet, _, _ = made(tmp_path, LocalProvider(slots=2, root=str(tmp_path)))
    running, most = 0, 0

    async def job(name: str) -> None:
        nonlocal running, most
        async with fleet.lease(name):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(job(str(i)) for i in range(20)))
    assert most == 2


async def test_a_cancelled_waiter_leaves_its_slot_to_others(tmp_path: Path) -> None:
    fleet, _, _ = made(tmp_path, LocalProvider(slots=1, root=str(tmp_path)))

    async def hold() -> None:
        async with fleet.lease("waiter"):
            pass

    async with fleet.lease("holder"):
        waiter = asyncio.create_task(hold())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
    await asyncio.wait_for(hold(), 1)


async def test_held_time_is_charged_at_the_slots_price_also_when_the_job_fails(tmp_path: Path) -> None:
    fleet, ledger, clock = made(tmp_path, Priced(slots=2))

    async def fail() -> None:
        async with fleet.lease("job"):
            clock.now += 10.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert [(c.kind, c.usd) for _, c in ledger.store.charges()] == [("busy", pytest.approx(5.0))]
    assert ledger.spent == pytest.approx(10.0)  # the other slot was paid for, too


async def test_the_budget_refuses_what_it_can_not_pay(tmp_path: Path) -> None:
    fleet, ledger, _ = made(tmp_path, Priced(slots=1), usd=670.0)
    async with fleet.lease("first"):
        pass
    ledger.charge(Charge("busy", "x", 1.0, "seconds", 620.0))
    with pytest.raises(BudgetExceeded, match=r"only 50\.00 of 670\.00 USD"):
        async with fleet.lease("second"):
            pass


async def test_the_ledger_remembers_an_earlier_session(tmp_path: Path) -> None:
    _, ledger, _ = made(tmp_path, LocalProvider(slots=1, root=str(tmp_path)))
    ledger.charge(Charge("busy", "x", 1.0, "seconds", 2.5))
    again = Ledger(Store.open(tmp_path / "run.db"), Budget(), Clock(), lambda event: None)
    assert again.spent == 2.5


async def test_close_terminates_pods(tmp_path: Path) -> None:
    provider = LocalProvider(slots=1, root=str(tmp_path))
    fleet, _, _ = made(tmp_path, provider)
    async with fleet.lease("job") as lease:
        assert await provider.list("marker") == [lease.pod]
    await fleet.close()
    assert await provider.list("marker") == []


async def test_local_provider_refuses_what_it_is_not() -> None:
    with pytest.raises(ConfigurationError, match="at least one slot"):
        LocalProvider(slots=0)
    assert await LocalProvider().offers(PodRequest(("H100",))) == []


async def test_local_transport_runs_and_moves_files(tmp_path: Path) -> None:
    provider = LocalProvider(slots=1, root=str(tmp_path))
    (offer,) = await provider.offers(PodRequest())
    from ai_trains_ai.records import PodSpec

    shell = await provider.connect(await provider.create(offer, PodSpec("m")))
    await shell.put({"a/b.txt": b"hello"}, str(tmp_path))
    assert await shell.get(str(tmp_path / "a/b.txt"), 5) == b"hello"
    assert await shell.run(["cat"], stdin=b"x") == (0, b"x")
    assert await shell.run(["sleep", "5"], timeout=0.1) == (None, b"")
    with pytest.raises(TransportError, match="larger than 4"):
        await shell.get(str(tmp_path / "a/b.txt"), 4)
    with pytest.raises(TransportError, match="can't be read"):
        await shell.get(str(tmp_path / "nothing"), 4)
    assert (await shell.run(["no-such-program"]))[0] == 127
    assert await shell.tail(str(tmp_path / "a/b.txt"), 3) == b"lo"
    assert await shell.tail(str(tmp_path / "nothing"), 0) == b""
    async with shell.forward(8000) as port:
        assert port == 8000
