"""This machine as a provider: its GPUs as slots, and pods that outlive the controller."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from fakes.pods import path_of_a_pod

from ai_trains_ai.errors import ConfigurationError, StorageError
from ai_trains_ai.fleet import Fleet
from ai_trains_ai.fleet.canary import answers
from ai_trains_ai.providers.local import LocalProvider, LocalTransport
from ai_trains_ai.records import Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.testing.fakes import run_context
from ai_trains_ai.transport.jobs import HostJobs

SMI = """#!/bin/sh
case "$1" in
--query-gpu=name) printf 'NVIDIA H200\\nNVIDIA H200\\nNVIDIA A40\\n' ;;
*) printf 'NVIDIA H200, 570.1, 143771, 1, 0\\nNVIDIA H200, 570.1, 143771, 1, 0\\n' ;;
esac
"""


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, as far as nvidia-smi tells."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", path_of_a_pod(tmp_path / "bin"))


async def test_a_slot_for_each_gpu(tmp_path: Path, gpus: None) -> None:
    provider = LocalProvider(root=str(tmp_path))
    offers = await provider.offers(PodRequest(("gpu",)))
    assert [(o.gpu_type, o.count, o.slots, o.usd_per_hour) for o in offers] == [
        ("NVIDIA H200", 2, 2, 0.0),
        ("NVIDIA A40", 1, 1, 0.0),
    ]
    [pair] = await provider.offers(PodRequest(("nvidia h200",), count=2))
    assert pair.slots == 1
    assert await provider.offers(PodRequest(("A40",), count=2)) == []
    assert [offer.gpu_type for offer in await provider.offers(PodRequest())] == ["cpu"]
    assert await answers(LocalTransport(), offers[0]) == ""
    assert await answers(LocalTransport(), offers[1]) == "nvidia-smi shows 2 GPUs, not 1"


async def test_without_gpus_there_is_no_such_offer(tmp_path: Path) -> None:
    assert await LocalProvider(root=str(tmp_path)).offers(PodRequest(("no such GPU",))) == []


async def test_a_pod_and_its_job_are_found_by_the_next_controller(tmp_path: Path) -> None:
    [offer] = await LocalProvider(slots=1, root=str(tmp_path)).offers(PodRequest())
    pod = await LocalProvider(slots=1, root=str(tmp_path)).create(offer, PodSpec("ata-here"))
    jobs = HostJobs(LocalTransport(), pod.root)
    await jobs.prepare()
    await jobs.submit("job", {}, f"sleep 5; touch {tmp_path}/went-on")
    later = LocalProvider(slots=1, root=str(tmp_path))
    assert await later.list("ata-") == [pod]
    await later.terminate(pod.id)
    assert await later.list("ata-") == []
    await asyncio.sleep(0.5)
    assert os.listdir(tmp_path / "pods") == []


async def test_a_root_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    provider = LocalProvider(slots=1, root=str(tmp_path / "file"))
    [offer] = await provider.offers(PodRequest())
    with pytest.raises(StorageError, match="another root"):
        await provider.create(offer, PodSpec("ata-here"))


@pytest.mark.parametrize("marker", ["", "a/b", "..", ".hidden"])
async def test_a_marker_that_is_no_name(tmp_path: Path, marker: str) -> None:
    provider = LocalProvider(slots=1, root=str(tmp_path))
    [offer] = await provider.offers(PodRequest())
    with pytest.raises(ConfigurationError, match="can't name a pod"):
        await provider.create(offer, PodSpec(marker))


async def test_a_pod_that_a_killed_controller_only_intended_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod is a folder: it is listed, or there is none. At a service a listing lags, and is looked at for minutes."""

    async def killed(offer: Offer, spec: PodSpec) -> Pod:
        raise asyncio.CancelledError("between intent and create")

    with run_context(tmp_path / "run") as run:
        provider = LocalProvider(2, root=str(tmp_path / "machine"))
        monkeypatch.setattr(provider, "create", killed)
        fleet = Fleet(provider, run.ledger, run.clock, "run")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3), fleet.lease("job"):
                raise AssertionError("no pod was there")
        (rental,) = run.store.rentals()
        assert rental.state == "intent"
        again = Fleet(LocalProvider(2, root=str(tmp_path / "machine")), run.ledger, run.clock, "run")
        async with asyncio.timeout(20), again.lease("job") as lease:
            assert lease.pod.status == "ready"
        await again.close()
