"""The whole way on real hosts: fleet, claims, SSH, and the job protocol, with sshd processes as machines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.sshd import QUICK, SSHD, Server

from ai_trains_ai.fleet import Fleet, FleetTimes, Ledger
from ai_trains_ai.fleet.pool import answers
from ai_trains_ai.providers.local import LocalTransport
from ai_trains_ai.providers.ssh import SSHHost, SSHProvider
from ai_trains_ai.records import Budget, Offer
from ai_trains_ai.store import Store


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[SSHHost]]:
    if not SSHD:
        pytest.skip("sshd is not installed")
    servers = [Server(tmp_path / name) for name in ("one", "two")]
    for server in servers:
        server.start()
    yield [
        SSHHost(
            server.host.address, user=server.host.user, port=server.port, key=server.host.key,
            usd_per_hour=3.6, root=str(server.home / "ata"),
        )
        for server in servers
    ]  # fmt: skip
    for server in servers:
        server.stop()


async def test_jobs_on_hosts(hosts: list[SSHHost], tmp_path: Path) -> None:
    provider = SSHProvider(hosts, QUICK)
    store = Store.create(tmp_path / "run.db")
    ledger = Ledger(store, Budget(usd=5.0), time.time, lambda event: None)
    fleet = Fleet(provider, ledger, time.time, "ata-run", FleetTimes(poll=0.2))
    used: set[str] = set()

    async def job(number: int) -> bytes:
        async with fleet.lease(f"job-{number}") as lease:
            used.add(lease.pod.offer.id)
            jobs = await fleet.jobs(lease)
            command = "mkdir out; expr $(cat number) '*' 2 > out/answer; sleep 0.5"
            await jobs.submit(f"job-{number}", {"number": str(number).encode()}, command)
            while (await jobs.poll(f"job-{number}")).status != "ended":  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            result = await jobs.result(f"job-{number}", 1 << 16)
            await jobs.wipe()
            return result["answer"]

    assert await asyncio.gather(*map(job, range(1, 6))) == [b"2\n", b"4\n", b"6\n", b"8\n", b"10\n"]
    assert used == {host.id for host in hosts}
    await fleet.close()
    checker = SSHProvider(hosts, QUICK)
    assert await checker.list("ata-") == []
    await checker.close()
    rentals = [rental for rental in store.rentals() if rental.pod_id]  # others were refused: the host was claimed
    lifetimes = sum(rental.seen - rental.created for rental in rentals)
    assert sum(charge.usd for _, charge in store.charges()) == pytest.approx(lifetimes / 1000, rel=0.1)
    assert [rental.state for rental in rentals] == ["ended", "ended"]


async def test_the_canary_of_this_machine() -> None:
    assert await answers(LocalTransport(), Offer("here", "cpu", 0, 0.0)) == ""
    assert "nvidia-smi" in await answers(LocalTransport(), Offer("here", "H100", 9, 0.0))
