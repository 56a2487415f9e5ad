"""The provider's contract on the real Runpod, for 0.05 USD at most.

`RUNPOD_API_KEY=… pytest -s -m live tests/providers` rents about twenty pods of the community cloud. One serves all
tests that need to get into a machine, the others live for seconds. A purse stands between the tests and the service:
it rents nothing that it can't pay for, ends every pod that outlives its time, and ends all of them when the tests are
over. Below: the same tests against a local Runpod, and the purse's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from attrs import define, evolve
from fakes.runpod import GPUS, Fault, LocalRunpod

from ai_trains_ai.errors import AiTrainsAiError, AmbiguousCreate, NoCapacity, Transient
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.providers.runpod.provider import RunpodProvider
from ai_trains_ai.records import Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.testing import LOST_REPLY, FakeClock, FakeGPUProvider, GPUProviderContract
from ai_trains_ai.testing.provider import Rented
from ai_trains_ai.transport.jobs import HostJobs

CAP_USD = 0.05
CHEAP = ("RTX A5000", "RTX A4500", "RTX A4000", "RTX 3070", "RTX 3080", "RTX 3090")
LONG, BRIEF = 720.0, 60.0  # seconds that a pod may live: the one that all tests get into, and the others
TO_END = 15.0  # seconds from the end of a pod's time until it is gone
BOOT = 540.0  # of LONG: the image is some gigabytes
DEAD_MAN = 5  # seconds without a controller after which the pod ends itself
ENDED_BY_ITSELF = 120.0  # seconds until it is seen to be gone


@define
class Stay:
    """One pod in the purse's books."""

    usd_per_hour: float
    begin: float
    until: float
    pod_id: str = ""
    ended: float | None = None

    def usd(self, until: float) -> float:
        return self.usd_per_hour * max(0.0, (self.ended or until) - self.begin) / 3600


class Purse(GPUProvider):
    """Rents from another provider as long as the money lasts: a pod's whole time is set aside before it is made."""

    def __init__(
        self, provider: GPUProvider, cap_usd: float = CAP_USD, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._provider, self._cap, self._clock = provider, cap_usd, clock
        self.seconds = BRIEF  # that the next pod may live
        self._stays: dict[str, Stay] = {}

    @property
    def spent(self) -> float:
        return sum(stay.usd(self._clock()) for stay in self._stays.values())

    @property
    def committed(self) -> float:
        """What is spent if every pod lives for all of its time."""
        return sum(stay.usd(max(self._clock(), stay.until + TO_END)) for stay in self._stays.values())

    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        return sorted(await self._provider.offers(request), key=lambda offer: offer.usd_per_hour)

    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        now = self._clock()
        stay = Stay(offer.usd_per_hour, now, now + self.seconds)
        self._stays[spec.marker] = stay  # also when the answer is lost
        if self.committed > self._cap:
            del self._stays[spec.marker]
            pytest.skip(
                f"{offer.id} for {self.seconds:g} seconds could pass the cap of {self._cap} USD: "
                f"{self.committed:.4f} USD are spent or set aside"
            )
        try:
            pod = await self._provider.create(offer, spec)
        except AmbiguousCreate:
            raise
        except AiTrainsAiError:
            del self._stays[spec.marker]
            raise
        stay.pod_id, stay.usd_per_hour = pod.id, pod.offer.usd_per_hour
        if self.committed > self._cap:
            await self.terminate(pod.id)
            pytest.skip(f"{pod.id} costs {stay.usd_per_hour} USD an hour, more than offered, and could pass the cap")
        return pod

    async def get(self, pod_id: str) -> Pod | None:
        return await self._provider.get(pod_id)

    async def list(self, marker: str) -> Sequence[Pod]:
        return await self._provider.list(marker)

    async def terminate(self, pod_id: str) -> None:
        await self._provider.terminate(pod_id)
        for stay in self._stays.values():
            if stay.pod_id == pod_id and stay.ended is None:
                stay.ended = self._clock()

    async def connect(self, pod: Pod) -> Transport:
        return await self._provider.connect(pod)

    def logs(self, pod_id: str) -> AsyncIterator[str]:
        return self._provider.logs(pod_id)

    def end_command(self, pod: Pod) -> str:
        return self._provider.end_command(pod)

    async def close(self) -> None:
        await self._provider.close()

    async def end(self, overdue_only: bool = False) -> None:
        """Terminate the pods that are left, or those whose time is over; those too that a lost answer hides."""
        failed: list[str] = []
        for marker, stay in list(self._stays.items()):
            if stay.ended is not None or (overdue_only and self._clock() < stay.until):
                continue
            try:
                found = [stay.pod_id] if stay.pod_id else [p.id for p in await self.list(marker) if p.marker == marker]
                for pod_id in found:
                    await self.terminate(pod_id)
                stay.ended = self._clock()
            except Exception as error:
                failed.append(f"{stay.pod_id or marker} ({error!r})")
        assert overdue_only or not failed, f"these may cost money, end them by hand: {', '.join(failed)}"

    async def watch(self) -> None:
        while True:
            await self.end(overdue_only=True)
            await asyncio.sleep(1)


# ------------------------------------------------------------------------------------------ live


@pytest_asyncio.fixture(scope="module")
async def purse() -> AsyncIterator[Purse]:
    per_minute = float(os.environ.get("LIVE_TEST_REQUESTS_PER_MINUTE", "50"))
    purse = Purse(RunpodProvider(max_pods=4, clouds=("COMMUNITY",), per_minute=per_minute))
    watch = asyncio.create_task(purse.watch())
    yield purse
    watch.cancel()
    for left in (3, 2, 1, 0):  # money is at stake: once is not enough
        try:
            await purse.end()
            break
        except AssertionError:
            if not left:
                raise
            await asyncio.sleep(10)
    await purse.close()
    print(f"\nThe live tests cost {purse.spent:.4f} USD.")
    assert purse.spent <= CAP_USD


@pytest_asyncio.fixture(scope="module")
async def warm(purse: Purse) -> Pod:
    """The pod that all tests get into; it boots while the tests run that need none."""
    purse.seconds = LONG
    try:
        for offer in await purse.offers(PodRequest(CHEAP)):
            if offer.available:
                with contextlib.suppress(NoCapacity):
                    return await purse.create(offer, PodSpec(f"ata-live-{uuid.uuid4().hex[:8]}"))
    finally:
        purse.seconds = BRIEF
    pytest.skip(f"Runpod has none of {', '.join(CHEAP)} free in its community cloud")


@pytest_asyncio.fixture(scope="module")
async def booted(purse: Purse, warm: Pod) -> Pod:
    give_up = time.monotonic() + BOOT
    while time.monotonic() < give_up:
        pod = await purse.get(warm.id)
        if pod is None or pod.status == "unreachable":
            break
        if pod.status == "ready":
            return pod
        await asyncio.sleep(2)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            async for line in purse.logs(warm.id):
                print(line)
    pytest.fail(f"the pod {warm.id} did not boot within {BOOT:g} seconds; its log is above")


@pytest.mark.live
class TestOnRunpod(GPUProviderContract):
    request = PodRequest(CHEAP)

    @pytest.fixture
    def provider(self, purse: Purse) -> GPUProvider:
        return purse

    @pytest_asyncio.fixture
    async def rented(self, purse: Purse, warm: Pod) -> AsyncIterator[Rented]:
        rented = Rented(purse, self.request, BOOT, 2.0)
        yield rented
        await rented.end()

    @pytest_asyncio.fixture
    async def machine(self, purse: Purse, booted: Pod) -> AsyncIterator[Transport]:
        transport = await purse.connect(booted)
        yield transport
        await transport.close()

    @pytest.mark.asyncio
    async def test_a_pod_that_no_controller_speaks_to_ends_itself(self, purse: Purse, booted: Pod) -> None:
        """Only the service can tell whether the key that it puts into a pod may delete that pod."""
        transport = await purse.connect(booted)
        jobs = HostJobs(transport, f"/tmp/ata-live-{uuid.uuid4().hex[:8]}")
        await jobs.prepare()
        await jobs.arm(DEAD_MAN, purse.end_command(booted))
        await transport.close()
        for _ in range(int(ENDED_BY_ITSELF / 2)):
            if await purse.get(booted.id) is None:
                return
            await asyncio.sleep(2)
        pytest.fail(f"the dead-man switch of {booted.id} did not end the pod within {ENDED_BY_ITSELF:g} seconds")

    @pytest.mark.asyncio
    async def test_nobody_gets_into_a_pod_that_is_gone(self, purse: Purse, booted: Pod) -> None:
        await purse.terminate(booted.id)
        with pytest.raises(Transient):
            await purse.connect(booted)


# ------------------------------------------------------------------------------------------ the same, without money


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalRunpod]:
    with LocalRunpod(
        tmp_path / "cloud", 1.0, requests_per_minute=6000, provisioning=0.2, pull=0.2, sshd_after=0.2
    ) as cloud:
        yield cloud


def run_live(cloud: LocalRunpod, folder: Path, *marks: str, fails: bool = False, **changes: str) -> str:
    environment = {
        **os.environ,
        "RUNPOD_API_KEY": cloud.key,
        "RUNPOD_REST_V2_API_URL": cloud.url,
        "LIVE_TEST_REQUESTS_PER_MINUTE": "5000",
        "XDG_STATE_HOME": str(folder / "state"),
        **changes,
    }
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *marks, __file__]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=400)
    expected = (1,) if fails else (0, 5)  # 5: nothing was selected
    assert done.returncode in expected, done.stdout + done.stderr
    return done.stdout


def count(said: str, what: str) -> int:
    found = re.search(rf"(\d+) {what}", said.strip().splitlines()[-1])
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_the_live_tests_hold_and_cost_less_than_their_cap(cloud: LocalRunpod, tmp_path: Path) -> None:
    said = run_live(cloud, tmp_path, "-m", "live")
    contract = [name for name in dir(GPUProviderContract) if name.startswith("test_")]
    assert (count(said, "passed"), count(said, "skipped")) == (len(contract) + 1, 0), said
    assert (cloud.alive, cloud.processes) == ([], [])
    assert 0 < cloud.spent <= CAP_USD


@pytest.mark.slow
def test_live_tests_that_cost_too_much_are_skipped(cloud: LocalRunpod, tmp_path: Path) -> None:
    cloud.gpus["NVIDIA RTX A5000"] = evolve(GPUS["NVIDIA RTX A5000"], community=0.24)
    said = run_live(cloud, tmp_path, "-m", "live", "-k", "pods_are_made_at_once or exit_status")
    assert (count(said, "passed"), count(said, "skipped")) == (1, 1), said
    assert f"could pass the cap of {CAP_USD} USD" in said
    assert (cloud.alive, cloud.processes) == ([], [])
    assert 0 < cloud.spent <= CAP_USD


@pytest.mark.slow
def test_pods_are_ended_also_when_live_tests_fail(cloud: LocalRunpod, tmp_path: Path) -> None:
    cloud.faults.append(Fault("boot", "error"))
    said = run_live(cloud, tmp_path, "-m", "live", "-k", "exit_status", fails=True)
    assert "did not boot" in said
    assert (len(cloud.pods), cloud.alive, cloud.processes) == (1, [], [])


@pytest.mark.slow
@pytest.mark.parametrize("marks", [(), ("-m", "not slow"), ("-m", "not live")], ids=" ".join)
def test_no_live_test_runs_unless_it_is_asked_for(cloud: LocalRunpod, tmp_path: Path, marks: tuple[str, ...]) -> None:
    said = run_live(cloud, tmp_path, *marks, "--collect-only", "-q")
    assert "TestOnRunpod" not in said


@pytest.mark.slow
def test_without_a_key_the_live_tests_say_what_they_need(cloud: LocalRunpod, tmp_path: Path) -> None:
    said = run_live(cloud, tmp_path, "-m", "live", RUNPOD_API_KEY="")
    assert (count(said, "passed"), "RUNPOD_API_KEY" in said, cloud.requests) == (0, True, [])


# ------------------------------------------------------------------------------------------ the purse


AN_HOUR = Offer("gpu", "GPU", 1, 3.6)  # 0.001 USD a second


class Listed(FakeGPUProvider):
    """Charges its own price, whatever it was taken for."""

    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        return await super().create(evolve(offer, usd_per_hour=AN_HOUR.usd_per_hour), spec)


def purse_of(cap_usd: float, seconds: float = BRIEF) -> tuple[FakeClock, FakeGPUProvider, Purse]:
    clock = FakeClock()
    provider = Listed((AN_HOUR,), clock=clock)
    purse = Purse(provider, cap_usd, clock)
    purse.seconds = seconds
    return clock, provider, purse


async def test_a_pods_whole_time_is_set_aside_before_it_is_made() -> None:
    _, _, purse = purse_of(0.2, seconds=100 - TO_END)
    await purse.create(AN_HOUR, PodSpec("one"))
    assert (purse.spent, purse.committed) == (0, pytest.approx(0.1))


async def test_what_could_pass_the_cap_is_not_made() -> None:
    _, provider, purse = purse_of(0.15, seconds=100 - TO_END)
    await purse.create(AN_HOUR, PodSpec("one"))
    with pytest.raises(pytest.skip.Exception, match=r"could pass the cap of 0\.15 USD: 0\.1000 USD"):
        await purse.create(AN_HOUR, PodSpec("two"))
    assert provider.alive == ["one"]


async def test_an_ended_pod_gives_back_the_time_that_it_did_not_need() -> None:
    clock, provider, purse = purse_of(0.15, seconds=100 - TO_END)
    pod = await purse.create(AN_HOUR, PodSpec("one"))
    clock.now += 10
    await purse.terminate(pod.id)
    assert purse.committed == pytest.approx(0.01)
    await purse.create(AN_HOUR, PodSpec("two"))
    assert provider.alive == ["two"]


async def test_a_pod_that_outlives_its_time_is_ended() -> None:
    clock, provider, purse = purse_of(1.0)
    await purse.create(AN_HOUR, PodSpec("one"))
    clock.now += BRIEF - 1
    await purse.create(AN_HOUR, PodSpec("two"))
    clock.now += 2
    await purse.end(overdue_only=True)
    assert provider.alive == ["two"]


async def test_a_lost_answer_is_paid_for_and_its_pod_is_ended() -> None:
    _, provider, purse = purse_of(1.0)
    provider.faults.append(("create", LOST_REPLY))
    with pytest.raises(AmbiguousCreate):
        await purse.create(AN_HOUR, PodSpec("lost"))
    assert (purse.committed > 0, provider.alive) == (True, ["lost"])
    await purse.end()
    assert provider.alive == []


async def test_a_refused_create_costs_nothing() -> None:
    _, provider, purse = purse_of(1.0)
    provider.faults.append(("create", NoCapacity("none")))
    with pytest.raises(NoCapacity):
        await purse.create(AN_HOUR, PodSpec("one"))
    assert purse.committed == 0


async def test_a_pod_that_is_dearer_than_offered_is_ended_at_once() -> None:
    _, provider, purse = purse_of(0.05)
    with pytest.raises(pytest.skip.Exception, match="more than offered"):
        await purse.create(evolve(AN_HOUR, usd_per_hour=0.1), PodSpec("one"))
    assert provider.alive == []


async def test_pods_that_can_not_be_ended_are_named() -> None:
    _, provider, purse = purse_of(1.0)
    pod = await purse.create(AN_HOUR, PodSpec("one"))
    provider.faults.append(("terminate", Transient("no")))
    with pytest.raises(AssertionError, match=f"end them by hand: {pod.id}"):
        await purse.end()
