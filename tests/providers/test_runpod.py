"""Runpod's provider against a local Runpod: the contract, every refusal of the service, every fault of a machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fakes.runpod import Fault, LocalRunpod
from fakes.sshd import QUICK

from ai_trains_ai.errors import (
    AmbiguousCreate,
    ConfigurationError,
    Forbidden,
    NoCapacity,
    OutOfFunds,
    Transient,
)
from ai_trains_ai.interfaces import GPUProvider
from ai_trains_ai.providers.runpod.client import RunpodClient
from ai_trains_ai.providers.runpod.provider import RunpodProvider
from ai_trains_ai.records import Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.testing import GPUProviderContract

A40 = PodRequest(("A40",))


def made(cloud: LocalRunpod, **options: Any) -> RunpodProvider:
    settings: dict[str, Any] = {
        "base_url": cloud.url, "clock": cloud.clock, "sleep": cloud.sleep, "patience": QUICK, "per_minute": 500,
    }  # fmt: skip
    return RunpodProvider(**{**settings, **options})


@pytest_asyncio.fixture
async def provider(cloud: LocalRunpod) -> AsyncIterator[RunpodProvider]:
    provider = made(cloud)
    yield provider
    await provider.close()


class TestContract(GPUProviderContract):
    request = A40
    boot_seconds = 20.0

    @pytest.fixture
    def provider(self, cloud: LocalRunpod) -> GPUProvider:
        cloud.add_foreign("somebody-elses")
        return made(cloud)


async def offer_of(provider: RunpodProvider) -> Offer:
    return (await provider.offers(A40))[0]


async def rent(provider: RunpodProvider, marker: str = "ata-test-1") -> Pod:
    return await provider.create(await offer_of(provider), PodSpec(marker))


async def ready(provider: RunpodProvider, pod: Pod) -> Pod:
    for _ in range(400):
        if pod.status == "ready":
            return pod
        await asyncio.sleep(0.02)
        pod = await provider.get(pod.id) or pod
    raise AssertionError(f"it stays {pod.status}")


# ------------------------------------------------------------------------------------------ offers and prices


async def test_an_offer_for_each_place_those_with_much_in_stock_first(
    cloud: LocalRunpod, provider: RunpodProvider
) -> None:
    for place, stock in (("US-KS-2", 0), ("CA-MTL-1", 2), ("EU-RO-1", 30)):
        cloud.stock["NVIDIA A40", "SECURE", place] = stock
    offers = await provider.offers(PodRequest(("nvidia a40",)))
    assert [(offer.id, offer.available) for offer in offers] == [
        ("NVIDIA A40/1/SECURE/EU-RO-1", True),
        ("NVIDIA A40/1/SECURE/CA-MTL-1", True),
        ("NVIDIA A40/1/SECURE/US-KS-2", False),
    ]
    assert {offer.usd_per_hour for offer in offers} == {0.49}


async def test_two_gpus_cost_twice_and_more_than_fit_are_no_offer(provider: RunpodProvider) -> None:
    [offer, *_] = await provider.offers(PodRequest(("RTX A5000",), count=2))
    assert (offer.count, offer.usd_per_hour) == (2, 0.54)
    assert await provider.offers(PodRequest(("RTX A5000",), count=9)) == []


async def test_the_clouds_and_places_that_are_wanted(cloud: LocalRunpod) -> None:
    provider = made(cloud, clouds=("SECURE", "COMMUNITY"), data_centers=("EU-RO-1",))
    assert [offer.id for offer in await provider.offers(A40)] == [
        "NVIDIA A40/1/SECURE/EU-RO-1",
        "NVIDIA A40/1/COMMUNITY/EU-RO-1",
    ]
    pod = await provider.create((await provider.offers(A40))[0], PodSpec("ata-there"))
    assert cloud.pods[pod.id].datacenter == "EU-RO-1"
    with pytest.raises(ConfigurationError, match="no cloud 'MOON'"):
        await provider.offers(PodRequest(cloud="MOON"))
    await provider.close()


async def test_what_is_paid_is_the_created_pods_price(cloud: LocalRunpod, provider: RunpodProvider) -> None:
    offer = await offer_of(provider)
    cloud.gpus["NVIDIA A40"] = type(cloud.gpus["NVIDIA A40"])("A40", 48, 1.07, 0.35)
    pod = await provider.create(offer, PodSpec("ata-dearer"))
    assert (offer.usd_per_hour, pod.offer.usd_per_hour) == (0.49, 1.07)


async def test_the_bill_is_of_these_pods_alone(cloud: LocalRunpod, provider: RunpodProvider) -> None:
    since = datetime.fromtimestamp(cloud.clock(), UTC)
    cloud.add_foreign("dear")
    one, two = await rent(provider, "ata-one"), await rent(provider, "ata-two")
    await asyncio.sleep(60 / cloud.speed)
    bills = [await provider.billed(since, ids) for ids in ([one.id], [one.id, two.id], [], None)]
    usd = [bill.usd for bill in bills if bill is not None]
    assert usd[2] == 0 < usd[0] < usd[1] < usd[3]


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (Fault("create", "capacity"), NoCapacity, "no longer any instances"),
        (Fault("create", "402"), OutOfFunds, "Add credit"),
        (Fault("create", "403"), NoCapacity, "pool"),
        (Fault("create", "422"), ConfigurationError, "Runpod refuses the request to /pods"),
        (Fault("create", "429", retry_after=7), Transient, "asks for a pause"),
        (Fault("create", "500"), AmbiguousCreate, "status 500"),
        (Fault("create", "500_after"), AmbiguousCreate, "status 500"),
        (Fault("create", "html"), AmbiguousCreate, "status 502"),
        (Fault("create", "lost_before"), AmbiguousCreate, "was lost"),
        (Fault("create", "lost_after"), AmbiguousCreate, "was lost"),
    ],
    ids=lambda value: value.do if isinstance(value, Fault) else "",
)
async def test_each_refusal_of_a_create(
    cloud: LocalRunpod, provider: RunpodProvider, fault: Fault, error: type[Exception], words: str
) -> None:
    offer = await offer_of(provider)
    cloud.faults.append(fault)
    with pytest.raises(error, match=words) as caught:
        await provider.create(offer, PodSpec("ata-refused"))
    assert cloud.key not in repr(caught.getrepr(chain=True))
    assert len([r for r in cloud.requests if r[1:3] == ("POST", "/v2/pods")]) == 1  # never repeated
    found = [pod.marker for pod in await provider.list("ata-refused")]
    assert found == (["ata-refused"] if fault.do.endswith("_after") else [])


async def test_a_create_without_a_service_made_nothing(cloud: LocalRunpod) -> None:
    provider = made(cloud, base_url="http://127.0.0.1:9/v2")
    with pytest.raises(Transient, match="nothing was created"):
        await provider.create(Offer("NVIDIA A40/1/SECURE/any", "NVIDIA A40", 1, 0.49), PodSpec("ata-nowhere"))
    await provider.close()


@pytest.mark.parametrize("do", ["429", "500", "html", "lost_before"])
async def test_a_look_is_repeated(cloud: LocalRunpod, provider: RunpodProvider, do: str) -> None:
    await rent(provider)
    cloud.faults += [Fault("list", do), Fault("list", do)]
    assert [pod.marker for pod in await provider.list("ata-")] == ["ata-test-1"]


async def test_a_service_that_stays_down_is_said_so(cloud: LocalRunpod, provider: RunpodProvider) -> None:
    cloud.faults += [Fault("list", "html") for _ in range(9)]
    with pytest.raises(Transient, match="status 502"):
        await provider.list("ata-")


async def test_a_lost_answer_to_a_delete_is_asked_again(cloud: LocalRunpod, provider: RunpodProvider) -> None:
    pod = await rent(provider)
    cloud.faults.append(Fault("delete", "lost_after"))
    await provider.terminate(pod.id)
    assert cloud.alive == []


async def test_a_wrong_key(cloud: LocalRunpod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", "rpa_WRONG")
    provider = made(cloud, key_variable="OTHER_KEY")
    with pytest.raises(Forbidden, match="RUNPOD_API_KEY") as caught:
        await provider.list("ata-")
    assert "rpa_WRONG" not in str(caught.value)
    await provider.close()


async def test_no_key(cloud: LocalRunpod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY")
    with pytest.raises(Forbidden, match="Set the environment variable RUNPOD_API_KEY"):
        made(cloud)


async def test_a_firewalls_refusal_is_not_the_keys(
    cloud: LocalRunpod, provider: RunpodProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = provider._client._client()
    http.headers["User-Agent"] = "Python-urllib/3.11"
    with pytest.raises(Transient, match="firewall"):
        await provider.list("ata-")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_pods": 0}, "max_pods"),
        ({"clouds": ("ALL",)}, "SECURE and COMMUNITY"),
        ({"clouds": "SECURE"}, "is a list"),
        ({"data_centers": "EU-RO-1"}, "is a list"),
    ],
)
def test_wrong_options(cloud: LocalRunpod, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        made(cloud, **options)


async def test_a_disk_that_is_no_number_is_the_services_word(cloud: LocalRunpod) -> None:
    provider = made(cloud, disk_gb="much")
    with pytest.raises(ConfigurationError, match="disk"):
        await rent(provider)
    await provider.close()


async def test_the_key_is_shown_nowhere(
    cloud: LocalRunpod, provider: RunpodProvider, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        pod = await rent(provider)
        cloud.faults.append(Fault("list", "500"))
        await provider.list("ata-")
    shown = repr(provider) + repr(provider._client) + repr(pod) + caplog.text + provider.end_command(pod)
    assert cloud.key not in shown


# ------------------------------------------------------------------------------------------ the rate limit


async def test_the_client_keeps_below_the_services_limit(tmp_path: Path, cloud: LocalRunpod) -> None:
    cloud.per_minute = 60
    provider = made(cloud, per_minute=50)
    for _ in range(120):
        await provider._client.get("/pods")
    seconds = cloud.requests[-1][0] - cloud.requests[0][0]
    assert seconds > (120 - 13) / 50 * 60 * 0.9
    assert {status for *_, status in cloud.requests} == {200}
    await provider.close()


async def test_sixteen_looks_at_once_are_one_request(cloud: LocalRunpod, provider: RunpodProvider) -> None:
    pods = [await rent(provider, f"ata-many-{number}") for number in range(4)]
    before = len(cloud.requests)
    provider._forget()
    await asyncio.gather(*(provider.get(pod.id) for pod in pods for _ in range(4)))
    assert len(cloud.requests) == before + 1


async def test_a_pause_that_the_service_asks_for_holds_everybody(cloud: LocalRunpod) -> None:
    provider = made(cloud)
    cloud.faults.append(Fault("list", "429", retry_after=30))
    begin = cloud.clock()
    await asyncio.gather(provider.list("ata-"), provider.offers(A40))
    assert cloud.clock() - begin >= 29
    await provider.close()


# ------------------------------------------------------------------------------------------ machines


async def test_a_new_pod_is_seen_before_it_is_listed(cloud: LocalRunpod, provider: RunpodProvider) -> None:
    cloud.faults.append(Fault("create", "lag", seconds=0))
    pod = await rent(provider)
    found = await provider.get(pod.id)
    assert found is not None
    assert found.marker == "ata-test-1"


@pytest.mark.parametrize("do", ["stuck", "no_direct"])
async def test_a_pod_without_an_address_is_not_ready(cloud: LocalRunpod, provider: RunpodProvider, do: str) -> None:
    cloud.faults.append(Fault("boot", do))
    pod = await rent(provider)
    await asyncio.sleep(60 / cloud.speed)
    found = await provider.get(pod.id)
    assert found is not None
    assert found.status == "starting"
    with pytest.raises(Transient, match="it is starting"):
        await provider.connect(found)


async def test_a_pod_in_error_is_told_with_its_log(cloud: LocalRunpod, provider: RunpodProvider) -> None:
    cloud.faults.append(Fault("boot", "error"))
    pod = await rent(provider)
    await asyncio.sleep(60 / cloud.speed)
    found = await provider.get(pod.id)
    assert found is not None
    assert found.status == "unreachable"
    assert any("OCI runtime create failed" in line for line in [line async for line in provider.logs(pod.id)])


async def test_a_pod_whose_port_changed_is_found_again(cloud: LocalRunpod, provider: RunpodProvider) -> None:
    pod = await ready(provider, await rent(provider))
    transport = await provider.connect(pod)
    assert await transport.run(["echo", "here"]) == (0, b"here\n")
    cloud.remap(pod.id)
    for _ in range(100):
        status, said = await transport.run(["echo", "again"])
        if status == 0:
            break
        await asyncio.sleep(0.05)
    assert said == b"again\n"
    await transport.close()


async def test_a_pod_ends_itself_by_the_command_of_its_dead_man(cloud: LocalRunpod, provider: RunpodProvider) -> None:
    pod = await ready(provider, await rent(provider))
    transport = await provider.connect(pod)
    await transport.run(["sh", "-c", provider.end_command(pod)], timeout=20)
    assert cloud.alive == []
    await transport.close()


async def test_the_users_own_ssh_key(cloud: LocalRunpod, tmp_path: Path) -> None:
    import asyncssh

    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(tmp_path / "mine")
    provider = made(cloud, ssh_key=str(tmp_path / "mine"))
    pod = await ready(provider, await rent(provider))
    transport = await provider.connect(pod)
    assert (await transport.run(["true"]))[0] == 0
    await transport.close()
    await provider.close()
    with pytest.raises(ConfigurationError, match="can't be used"):
        await rent(made(cloud, ssh_key=str(tmp_path / "nothing")))


def test_a_client_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "two words")
    with pytest.raises(Forbidden, match="blank"):
        RunpodClient()
