"""Hosts of one's own, with real sshd processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attrs import evolve
from fakes.sshd import QUICK, SSHD, Server

from ai_trains_ai.errors import ConfigurationError, NoCapacity, Transient
from ai_trains_ai.interfaces import GPUProvider
from ai_trains_ai.providers.ssh import SSHHost, SSHProvider
from ai_trains_ai.records import PodRequest, PodSpec
from ai_trains_ai.testing import GPUProviderContract
from ai_trains_ai.transport.jobs import HostJobs

pytestmark = pytest.mark.skipif(not SSHD, reason="sshd is not installed")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    found = [Server(tmp_path / name) for name in ("one", "two", "three")]
    for server in found:
        server.start()
    yield found
    for server in found:
        server.stop()


def host_of(server: Server, **changes: Any) -> SSHHost:
    host = server.host
    given = SSHHost(host.address, user=host.user, port=host.port, key=host.key, root=str(server.home / "ata"))
    return evolve(given, **changes)


@pytest_asyncio.fixture
async def provider(servers: list[Server]) -> AsyncIterator[SSHProvider]:
    hosts = [
        host_of(servers[0], gpu_type="NVIDIA A40", count=1, usd_per_hour=0.4),
        host_of(servers[1], gpu_type="NVIDIA A40", count=2, usd_per_hour=0.8, slots=2),
        host_of(servers[2]),
    ]
    found = SSHProvider(hosts, QUICK)
    yield found
    await found.close()


class TestContract(GPUProviderContract):
    @pytest.fixture
    def provider(self, provider: SSHProvider) -> GPUProvider:
        return provider


async def test_offers_are_the_hosts_that_fit(provider: SSHProvider) -> None:
    every = await provider.offers(PodRequest())
    assert [(o.gpu_type, o.count, o.usd_per_hour, o.slots) for o in every] == [
        ("NVIDIA A40", 1, 0.4, 1),
        ("NVIDIA A40", 2, 0.8, 2),
        ("cpu", 0, 0.0, 1),
    ]
    assert len(await provider.offers(PodRequest(("NVIDIA A40",)))) == 2
    assert len(await provider.offers(PodRequest(("NVIDIA A40",), count=2))) == 1


async def test_a_host_belongs_to_one_fleet_and_is_found_again(provider: SSHProvider) -> None:
    offer, *_ = await provider.offers(PodRequest())
    pod = await provider.create(offer, PodSpec("ata-first-0"))
    assert await provider.create(offer, PodSpec("ata-first-0")) == pod
    restarted = SSHProvider(list(provider.hosts.values()), QUICK)
    with pytest.raises(NoCapacity, match="claimed by another fleet"):
        await restarted.create(offer, PodSpec("ata-second-0"))
    assert await restarted.list("ata-first") == [pod]
    assert await restarted.list("ata-second") == []
    assert not (await restarted.offers(PodRequest()))[0].available
    await restarted.terminate(f"{offer.id}/ata-second-0")  # not the one that is there
    assert await provider.get(pod.id) == pod
    await restarted.terminate(pod.id)
    assert await provider.get(pod.id) is None
    await restarted.close()


async def test_only_one_of_many_claims_wins(provider: SSHProvider) -> None:
    offer, *_ = await provider.offers(PodRequest())
    claims = (provider.create(offer, PodSpec(f"ata-{n}")) for n in range(8))
    done = await asyncio.gather(*claims, return_exceptions=True)
    assert [type(d).__name__ for d in done].count("Pod") == 1
    assert [type(d).__name__ for d in done].count("NoCapacity") == 7


async def test_termination_ends_the_jobs_on_the_host(provider: SSHProvider, servers: list[Server]) -> None:
    offer, *_ = await provider.offers(PodRequest())
    pod = await provider.create(offer, PodSpec("ata-jobs"))
    shell = await provider.connect(pod)
    jobs = HostJobs(shell, provider.hosts[offer.id].root)
    await jobs.prepare()
    await jobs.submit("job", {}, "sleep 66")
    for _ in range(100):
        if (await jobs.poll("job")).status == "running":
            break
        await asyncio.sleep(0.05)
    await provider.terminate(pod.id)
    status, said = await shell.run(["pgrep", "-f", "sleep 66"])
    assert (status, said) == (1, b"")
    with pytest.raises(Transient, match="no longer ours"):
        await provider.connect(pod)
    await shell.close()


async def test_a_host_that_does_not_answer(provider: SSHProvider, servers: list[Server]) -> None:
    offer, *_ = await provider.offers(PodRequest())
    pod = await provider.create(offer, PodSpec("ata-gone"))
    servers[0].stop()
    patient = SSHProvider([provider.hosts[offer.id]], evolve(QUICK, total=0.2))
    seen = await patient.get(pod.id)
    assert seen is not None
    assert seen.status == "unreachable"
    assert [o.available for o in await patient.offers(PodRequest())] == [False]
    with pytest.raises(Transient):
        await patient.terminate(pod.id)
    await patient.close()


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([], "at least one"),
        ("gpu-1", "a list of hosts"),
        (["gpu-1", "gpu-1"], "the same host twice"),
        ([{"adress": "gpu-1"}], "is no host"),
        ([7], "is no host"),
        ([{"address": "a", "slots": 0}], "slots must be at least 1"),
        ([{"address": "a", "root": "here"}], "absolute path"),
    ],
)
def test_hosts_that_are_none(hosts: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SSHProvider(hosts)
