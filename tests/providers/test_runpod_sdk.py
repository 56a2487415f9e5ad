"""Runpod over the official SDK, the real one, against a local Runpod."""

from __future__ import annotations

import asyncio
import getpass
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
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
    MissingDependency,
    NoCapacity,
    OutOfFunds,
    Transient,
)
from ai_trains_ai.interfaces import GPUProvider
from ai_trains_ai.providers.runpod import sdk
from ai_trains_ai.providers.runpod.sdk import RunpodSDKProvider
from ai_trains_ai.records import Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.testing import GPUProviderContract

if not importlib.util.find_spec("runpod"):
    pytest.skip(
        "the official SDK is not installed: pip install 'ai-trains-ai[runpod-sdk]' in an environment of its own",
        allow_module_level=True,
    )

A40 = PodRequest(("A40",))


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk, "USER", getpass.getuser())  # a local pod's, where this isn't run by root


def made(cloud: LocalRunpod, **options: Any) -> RunpodSDKProvider:
    settings: dict[str, Any] = {
        "base_url": cloud.graphql_url, "clock": cloud.clock, "sleep": cloud.sleep, "patience": QUICK, "per_minute": 500,
    }  # fmt: skip
    return RunpodSDKProvider(**{**settings, **options})


@pytest_asyncio.fixture
async def provider(cloud: LocalRunpod) -> AsyncIterator[RunpodSDKProvider]:
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


async def offer_of(provider: RunpodSDKProvider) -> Offer:
    return (await provider.offers(A40))[0]


async def rent(provider: RunpodSDKProvider, marker: str = "ata-test-1", **env: str) -> Pod:
    return await provider.create(await offer_of(provider), PodSpec(marker, env=env))


async def ready(provider: RunpodSDKProvider, pod: Pod) -> Pod:
    for _ in range(400):
        if pod.status == "ready":
            return pod
        await asyncio.sleep(0.02)
        pod = await provider.get(pod.id) or pod
    raise AssertionError(f"it stays {pod.status}")


# ------------------------------------------------------------------------------------------ a guest that behaves


def test_the_root_logger_stays_as_it_was(cloud: LocalRunpod) -> None:
    """In a process of its own: only the first import does anything to it."""
    script = (
        "import asyncio, logging\n"
        "from ai_trains_ai.providers.runpod.sdk import RunpodSDKProvider\n"
        "before = logging.root.level, list(logging.root.handlers)\n"
        "asyncio.run(RunpodSDKProvider().balance())\n"
        "print((logging.root.level, logging.root.handlers) == before)\n"
    )
    environment = {**os.environ, "RUNPOD_API_BASE_URL": cloud.graphql_url}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert (said.stdout, said.returncode) == ("True\n", 0), said.stderr


async def test_the_sdks_own_key_and_address_are_left_as_they_were(
    provider: RunpodSDKProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runpod

    monkeypatch.setattr(runpod, "api_key", "rpa_SOMEBODY_ELSES")
    monkeypatch.setenv("RUNPOD_API_BASE_URL", "http://127.0.0.1:9")
    await provider.balance()
    assert (runpod.api_key, os.environ["RUNPOD_API_BASE_URL"]) == ("rpa_SOMEBODY_ELSES", "http://127.0.0.1:9")


async def test_two_accounts_are_not_mixed_up(
    cloud: LocalRunpod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalRunpod(tmp_path / "other", 60.0, balance=7.0, requests_per_minute=600) as other:
        monkeypatch.setenv("OTHER_KEY", other.key)
        accounts = [made(cloud), made(other, key_variable="OTHER_KEY")] * 4
        balances = await asyncio.gather(*(account.balance() for account in accounts))
    assert [money.usd for money in balances] == [50.0, 7.0] * 4


async def test_without_the_sdk_it_is_said_what_to_install(cloud: LocalRunpod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "runpod", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(MissingDependency, match=r"pip install 'ai-trains-ai\[runpod-sdk\]'"):
        await made(cloud).list("ata-")


class Absent:
    """No package named runpod is found."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "runpod":
            raise ModuleNotFoundError(name)


async def test_no_key(cloud: LocalRunpod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY")
    with pytest.raises(Forbidden, match="Set the environment variable RUNPOD_API_KEY"):
        made(cloud)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_pods": 0}, "max_pods"),
        ({"clouds": "SECURE"}, "is a list"),
        ({"bid_usd_per_gpu_hour": 0.1}, "spot=False"),
        ({"spot": True, "bid_usd_per_gpu_hour": 0.0}, "a price above 0"),
    ],
)
def test_wrong_options(cloud: LocalRunpod, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        made(cloud, **options)


async def test_the_key_is_shown_nowhere(
    cloud: LocalRunpod, provider: RunpodSDKProvider, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        pod = await rent(provider)
        cloud.faults += [Fault("list", "html"), Fault("create", "lost_after")]
        await provider.list("ata-")
        with pytest.raises(AmbiguousCreate) as caught:
            await rent(provider, "ata-test-2")
    shown = repr(provider) + repr(pod) + caplog.text + provider.end_command(pod)
    assert cloud.key not in shown
    assert cloud.key not in str(caught.getrepr(showlocals=True, chain=True))


# ------------------------------------------------------------------------------------------ what it adds: the balance


async def test_the_balance(cloud: LocalRunpod, provider: RunpodSDKProvider) -> None:
    cloud.balance = 12.34
    assert (await provider.balance()).usd == 12.34


# ------------------------------------------------------------------------------------------ what it adds: spot pods


async def test_a_spot_pod_costs_its_bid(cloud: LocalRunpod) -> None:
    provider = made(cloud, spot=True, bid_usd_per_gpu_hour=0.2)
    [offer] = await provider.offers(PodRequest(("A40",), count=2))
    pod = await provider.create(offer, PodSpec("ata-spot"))
    assert (offer.usd_per_hour, pod.offer.usd_per_hour, cloud.pods[pod.id].price) == (0.4, 0.4, 0.4)
    assert cloud.pods[pod.id].spot


async def test_without_a_bid_it_is_the_least(cloud: LocalRunpod) -> None:
    offer = await offer_of(made(cloud, spot=True))
    assert (offer.usd_per_hour, offer.available) == (cloud.gpus["NVIDIA A40"].least_bid, True)


async def test_a_bid_that_is_too_low_is_no_offer_to_be_had(cloud: LocalRunpod) -> None:
    provider = made(cloud, spot=True, bid_usd_per_gpu_hour=0.01)
    offer = await offer_of(provider)
    assert not offer.available
    with pytest.raises(NoCapacity):
        await provider.create(offer, PodSpec("ata-low"))


async def test_a_spot_pod_is_a_machine_like_any(cloud: LocalRunpod) -> None:
    odd = 'a "b" \\c\nd é'
    provider = made(cloud, spot=True)
    pod = await ready(provider, await rent(provider, ODD=odd))
    assert cloud.pods[pod.id].env["ODD"] == odd
    transport = await provider.connect(pod)
    assert await transport.run(["echo", "here"]) == (0, b"here\n")
    await transport.close()


async def test_an_interrupted_spot_pod_is_unreachable_and_can_be_ended(cloud: LocalRunpod) -> None:
    provider = made(cloud, spot=True)
    pod = await ready(provider, await rent(provider))
    cloud.interrupt(pod.id)
    provider._forget()
    found = await provider.get(pod.id)
    assert found is not None
    assert found.status == "unreachable"
    await provider.terminate(pod.id)
    assert cloud.alive == []


# ------------------------------------------------------------------------------------------ offers and prices


async def test_one_offer_for_a_cloud_when_no_places_are_wanted(cloud: LocalRunpod) -> None:
    provider = made(cloud, clouds=("SECURE", "COMMUNITY"))
    offers = [(offer.id, offer.usd_per_hour) for offer in await provider.offers(A40)]
    assert offers == [("NVIDIA A40/1/SECURE/any", 0.49), ("NVIDIA A40/1/COMMUNITY/any", 0.35)]


async def test_those_with_much_in_stock_come_first(cloud: LocalRunpod) -> None:
    provider = made(cloud, data_centers=("US-KS-2", "CA-MTL-1", "EU-RO-1"))
    for place, stock in (("US-KS-2", 0), ("CA-MTL-1", 2), ("EU-RO-1", 30)):
        cloud.stock["NVIDIA A40", "SECURE", place] = stock
    assert [(offer.id.rpartition("/")[2], offer.available) for offer in await provider.offers(A40)] == [
        ("EU-RO-1", True), ("CA-MTL-1", True), ("US-KS-2", False),
    ]  # fmt: skip
    pod = await rent(provider)
    assert cloud.pods[pod.id].datacenter == "EU-RO-1"


async def test_what_is_paid_is_the_created_pods_price(cloud: LocalRunpod, provider: RunpodSDKProvider) -> None:
    offer = await offer_of(provider)
    cloud.gpus["NVIDIA A40"] = type(cloud.gpus["NVIDIA A40"])("A40", 48, 1.07, 0.35)
    pod = await provider.create(offer, PodSpec("ata-dearer"))
    assert (offer.usd_per_hour, pod.offer.usd_per_hour) == (0.49, 1.07)


async def test_a_created_pod_whose_price_is_not_told_has_its_offers(
    cloud: LocalRunpod, provider: RunpodSDKProvider, caplog: pytest.LogCaptureFixture
) -> None:
    offer = await offer_of(provider)
    cloud.faults += [Fault("get", "lost_before") for _ in range(9)]
    pod = await provider.create(offer, PodSpec("ata-made"))
    assert (pod.id in cloud.pods, pod.offer, pod.status) == (True, offer_as_rented(offer), "starting")
    assert "its offer's is taken" in caplog.text


def offer_as_rented(offer: Offer) -> Offer:
    return Offer(offer.id, offer.gpu_type, offer.count, offer.usd_per_hour, available=False)


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("spot", [False, True], ids=["on-demand", "spot"])
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (Fault("create", "capacity"), NoCapacity, "no longer any instances"),
        (Fault("create", "402"), OutOfFunds, "Add credit"),
        (Fault("create", "403", text="access denied"), Forbidden, "write access"),
        (Fault("create", "422"), ConfigurationError, "Request validation failed"),
        (Fault("create", "429"), AmbiguousCreate, "no answer"),
        (Fault("create", "500"), AmbiguousCreate, "Something went wrong"),
        (Fault("create", "500_after"), AmbiguousCreate, "Something went wrong"),
        (Fault("create", "html"), AmbiguousCreate, "no answer"),
        (Fault("create", "lost_before"), AmbiguousCreate, "nothing"),
        (Fault("create", "lost_after"), AmbiguousCreate, "nothing"),
    ],
    ids=lambda value: value.do if isinstance(value, Fault) else "",
)
async def test_each_refusal_of_a_create(
    cloud: LocalRunpod, fault: Fault, error: type[Exception], words: str, spot: bool
) -> None:
    provider = made(cloud, spot=spot)
    offer = await offer_of(provider)
    cloud.faults.append(fault)
    with pytest.raises(error, match=words) as caught:
        await provider.create(offer, PodSpec("ata-refused"))
    assert cloud.key not in repr(caught.getrepr(chain=True))
    found = [pod.marker for pod in await provider.list("ata-refused")]
    assert found == (["ata-refused"] if fault.do.endswith("_after") else [])  # so it was never repeated


async def test_a_listing_that_is_no_list_is_not_taken_for_no_pods(
    provider: RunpodSDKProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runpod

    monkeypatch.setattr(runpod, "get_pods", lambda: None)
    with pytest.raises(Transient, match="no list of pods"):
        await provider.list("ata-")


@pytest.mark.parametrize("do", ["429", "500", "html", "lost_before"])
async def test_a_look_is_repeated(cloud: LocalRunpod, provider: RunpodSDKProvider, do: str) -> None:
    await rent(provider)
    cloud.faults += [Fault("list", do), Fault("list", do)]
    assert [pod.marker for pod in await provider.list("ata-")] == ["ata-test-1"]


async def test_a_service_that_stays_down_is_said_so(cloud: LocalRunpod, provider: RunpodSDKProvider) -> None:
    cloud.faults += [Fault("list", "html") for _ in range(9)]
    with pytest.raises(Transient, match="no answer"):
        await provider.list("ata-")


async def test_a_lost_answer_to_a_delete_is_asked_again(cloud: LocalRunpod, provider: RunpodSDKProvider) -> None:
    pod = await rent(provider)
    cloud.faults.append(Fault("delete", "lost_after"))
    await provider.terminate(pod.id)
    assert cloud.alive == []


async def test_a_wrong_key(cloud: LocalRunpod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", "rpa_WRONG")
    with pytest.raises(Forbidden, match="RUNPOD_API_KEY") as caught:
        await made(cloud, key_variable="OTHER_KEY").list("ata-")
    assert "rpa_WRONG" not in str(caught.value)


async def test_a_gpu_that_runpod_does_not_have(provider: RunpodSDKProvider) -> None:
    with pytest.raises(ConfigurationError, match="No GPU found"):
        await provider.create(Offer("Abacus/1/SECURE/any", "Abacus", 1, 0.1), PodSpec("ata-abacus"))


@pytest.mark.parametrize("odd", ['say "no"', "back\\slash", "two\nlines"])
async def test_a_value_that_the_sdk_would_break_is_refused_unseen(provider: RunpodSDKProvider, odd: str) -> None:
    with pytest.raises(ConfigurationError, match="'TOKEN' of a pod holds a quote") as caught:
        await rent(provider, TOKEN=odd)
    assert odd not in str(caught.value)


async def test_a_create_past_its_deadline_may_have_been_done(
    cloud: LocalRunpod, provider: RunpodSDKProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = await offer_of(provider)
    monkeypatch.setattr(sdk, "DEADLINE", 0.2)
    cloud.faults.append(Fault("create", "slow", seconds=1.0))
    with pytest.raises(AmbiguousCreate, match=r"within 0\.2 seconds"):
        await provider.create(offer, PodSpec("ata-slow"))


async def test_a_create_that_never_had_its_turn_made_nothing(
    cloud: LocalRunpod, provider: RunpodSDKProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, over = await offer_of(provider), threading.Event()
    monkeypatch.setattr(sdk, "DEADLINE", 0.2)
    sdk._worker.submit(over.wait, 30)
    with pytest.raises(Transient):
        await provider.create(offer, PodSpec("ata-late"))
    over.set()
    monkeypatch.undo()
    assert cloud.alive == []


# ------------------------------------------------------------------------------------------ machines


async def test_a_pod_without_an_address_is_not_ready(cloud: LocalRunpod, provider: RunpodSDKProvider) -> None:
    cloud.faults.append(Fault("boot", "no_direct"))
    pod = await rent(provider)
    await asyncio.sleep(60 / cloud.speed)
    found = await provider.get(pod.id)
    assert found is not None
    assert found.status == "starting"
    with pytest.raises(Transient, match="it is starting"):
        await provider.connect(found)


async def test_a_pod_ends_itself_by_the_command_of_its_dead_man(
    cloud: LocalRunpod, provider: RunpodSDKProvider
) -> None:
    pod = await ready(provider, await rent(provider))
    transport = await provider.connect(pod)
    await transport.run(["sh", "-c", provider.end_command(pod)], timeout=20)
    assert cloud.alive == []
    await transport.close()
