"""Runpod as a provider of machines, over its REST API version 2.

There are no spot pods in this API, and no balance of the account: `ai_trains_ai.providers.runpod.sdk` has both, for as
long as its API lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ai_trains_ai.errors import Transient
from ai_trains_ai.providers.runpod.client import PER_MINUTE, RunpodClient
from ai_trains_ai.providers.runpod.pods import IMAGE, PATIENCE, RunpodPods, offer_id, offer_parts, safe, wanted
from ai_trains_ai.records import Money, Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.transport.ssh import Patience

AVAILABILITY = ("HIGH", "MEDIUM", "LOW")  # of the catalogue, the best first; NONE is no offer to be had now
LOG_LINES, LOG_SILENCE = 500, 2.0  # of a pod's log, and the seconds without a line that end it


class RunpodProvider(RunpodPods):
    """Rents Runpod pods.

    Args:
        max_pods: pods at a time.
        key_variable: the environment variable that holds the API key. The key itself is no argument: arguments are
            written to the run folder.
        image: what a pod runs; it must start an SSH server for the key in its variable PUBLIC_KEY, as Runpod's do.
        disk_gb: container disk. A pod has no volume: nothing outlives it.
        clouds: "SECURE" and "COMMUNITY", in which a pod may be.
        data_centers: ids of those that a pod may be in; empty: any.
        min_cuda: the oldest CUDA version that a host's driver may have, like "12.8".
        env: variables of the pods; AITA_WORKDIR is the folder that jobs live below, /workspace by default.
        args: what the image runs instead of its own start command; empty keeps that.
        ssh_key: a private key file; default one of this user's own, made when it isn't there.
        base_url, per_minute, clock, sleep, patience: of the connections.
    """

    def __init__(
        self,
        max_pods: int = 1,
        key_variable: str = "RUNPOD_API_KEY",
        image: str = IMAGE,
        disk_gb: int = 50,
        clouds: Sequence[str] = ("SECURE",),
        data_centers: Sequence[str] = (),
        min_cuda: str = "12.8",
        env: Mapping[str, str] | None = None,
        args: str = "",
        ssh_key: str = "",
        base_url: str = "",
        per_minute: float = PER_MINUTE,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        patience: Patience = PATIENCE,
    ) -> None:
        self._client = RunpodClient(key_variable, base_url, per_minute, clock, sleep)
        super().__init__(
            *(max_pods, image, disk_gb, clouds, data_centers, env, ssh_key),
            *(self._client.base_url, clock, sleep, patience),
        )
        self._min_cuda, self._args = min_cuda, args

    # ------------------------------------------------------------------------------------------ offers

    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        """One offer a GPU type, cloud and data center, those with much in stock first.

        The community cloud, and a type that the catalogue names no data centers of, have one offer for all of them.
        """
        found: list[tuple[int, Offer]] = []
        for cloud in self._wanted_clouds(request):
            catalogue = await self._client.get(
                "/catalog/gpus",
                include="AVAILABILITY",
                product="POD",
                count=request.count,
                cloud=cloud,
                minCudaVersion=self._min_cuda,
            )
            for gpu in catalogue["gpus"]:
                if wanted(gpu, request.gpu_types) and gpu["maxCount"][cloud.lower()] >= request.count:
                    found += self._offers_of(gpu, cloud, request.count)
        return [offer for _, offer in sorted(found, key=lambda ranked: ranked[0])]

    def _offers_of(self, gpu: Mapping[str, Any], cloud: str, count: int) -> list[tuple[int, Offer]]:
        places = {place["id"]: place["availability"] for place in gpu.get("dataCenters") or []}
        if self._data_centers:
            places = {name: places.get(name, "NONE") for name in self._data_centers}
        elif cloud == "COMMUNITY" or not places:
            places = {"": gpu.get("availability", "LOW")}
        usd = float(gpu["price"][cloud.lower()]) * count
        if usd <= 0:  # not sold in this cloud
            return []
        offers = []
        for place, stock in places.items():
            rank = AVAILABILITY.index(stock) if stock in AVAILABILITY else len(AVAILABILITY)
            name = offer_id(gpu["id"], count, cloud, place)
            offers.append((rank, Offer(name, gpu["id"], count, usd, available=rank < len(AVAILABILITY))))
        return offers

    # ------------------------------------------------------------------------------------------ pods

    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        gpu, count, cloud, place = offer_parts(offer.id)
        body: dict[str, Any] = {
            "name": spec.marker,
            "image": spec.image or self._image,
            "cloud": cloud,
            # without a count every create is refused as if nothing were available
            "gpu": {"id": gpu, "count": count, "minCudaVersion": self._min_cuda},
            "disk": self._disk_gb,
            "ports": ["22/tcp"],
            "env": self._variables(spec),
        }
        if place:
            body["dataCenterIds"] = [place]
        if self._args:  # empty ones would replace the image's own start command
            body["args"] = self._args
        self._forget()
        return self._pod(await self._client.create("/pods", body))

    async def logs(self, pod_id: str) -> AsyncIterator[str]:
        for source in ("system", "container"):
            events = self._client.lines(
                f"/pods/{safe(pod_id)}/logs", silence=LOG_SILENCE, source=source, tail=LOG_LINES
            )
            async with contextlib.aclosing(events):
                async for event in events:
                    yield f"{event.get('ts', '')} {event.get('source', source)}: {event.get('line', '')}"

    async def billed(self, since: datetime, pod_ids: Sequence[str] | None = None) -> Money | None:
        """Runpod's bill in buckets of an hour, of which the newest comes up to an hour late."""
        reply = await self._client.get("/billing/pods", startTime=_moment(since), bucketSize="hour")
        records = reply["records"] if reply else []
        return Money(sum(r["totalAmount"] for r in records if pod_ids is None or r["podId"] in pod_ids))

    async def close(self) -> None:
        await self._client.close()

    # ------------------------------------------------------------------------------------------ how pods are asked

    async def _all(self) -> Sequence[dict[str, Any]]:
        reply = await self._client.get("/pods")
        if not isinstance(reply, dict) or not isinstance(reply.get("pods"), list):
            raise Transient("Runpod answered the listing with something that is no list of pods.")
        return list(reply["pods"])

    async def _one(self, pod_id: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self._client.get(f"/pods/{pod_id}")
        return found

    async def _delete(self, pod_id: str) -> None:
        await self._client.delete(f"/pods/{pod_id}")


def _moment(when: datetime) -> str:
    return (
        when.astimezone().isoformat(timespec="seconds") if when.tzinfo is None else when.isoformat(timespec="seconds")
    )
