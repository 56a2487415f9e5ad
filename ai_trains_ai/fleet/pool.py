"""A pool of warm pods that leases slots to jobs."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable

from ai_trains_ai.errors import NoCapacity, ProviderError
from ai_trains_ai.fleet.ledger import Ledger
from ai_trains_ai.interfaces import GPUProvider
from ai_trains_ai.records import Charge, Lease, Offer, Pod, PodRequest, PodSpec

ADMISSION_SECONDS = 60.0  # a lease is admitted only if the budget covers so much of it


class Fleet:
    """Leases slots of the pods of one provider, first come first served.

    Thin on purpose: it keeps the first available offer's pods warm until `close`. Use it from the run's loop.
    """

    def __init__(
        self, provider: GPUProvider, ledger: Ledger, clock: Callable[[], float], marker: str, max_pods: int = 1
    ) -> None:
        self._provider, self._ledger, self._clock = provider, ledger, clock
        self._marker, self._max_pods = marker, max_pods
        self._offer: Offer | None = None
        self._free: dict[str, int] = {}
        self._pods: dict[str, Pod] = {}
        self._changed = asyncio.Condition()

    async def start(self, request: PodRequest | None = None) -> None:
        """Choose the offer. Raises `NoCapacity` when the provider has nothing of the wanted kind. Idempotent."""
        if self._offer is None:
            offers = [offer for offer in await self._provider.offers(request or PodRequest()) if offer.available]
            if not offers:
                name = type(self._provider).__name__
                raise NoCapacity(
                    f"{name} has no machine for {request or PodRequest()}. Ask for another type, or try later."
                )
            self._offer = offers[0]

    @property
    def slots(self) -> int:
        """Jobs that fit at a time; known after `start`."""
        return 0 if self._offer is None else self._offer.slots * self._max_pods

    @contextlib.asynccontextmanager
    async def lease(self, job_id: str) -> AsyncIterator[Lease]:
        """Hold one slot. Waits for a free one; the held time is charged at the pod's price per slot."""
        pod = await self._take(job_id)
        begin = self._clock()
        try:
            yield Lease(uuid.uuid4().hex, pod, job_id)
        finally:
            seconds = self._clock() - begin
            usd = seconds / 3600 * pod.offer.usd_per_hour / pod.offer.slots
            async with self._changed:
                if pod.id in self._free:  # the fleet may be closing
                    self._free[pod.id] += 1
                self._changed.notify()
            self._ledger.charge(Charge("busy", job_id, seconds, "seconds", usd))

    async def _take(self, job_id: str) -> Pod:
        await self.start()
        assert self._offer is not None
        usd = ADMISSION_SECONDS / 3600 * self._offer.usd_per_hour
        self._ledger.require(Charge("busy", job_id, ADMISSION_SECONDS, "seconds", usd))
        async with self._changed:
            while True:
                for pod_id, free in self._free.items():
                    if free:
                        self._free[pod_id] -= 1
                        return self._pods[pod_id]
                if len(self._pods) < self._max_pods:
                    spec = PodSpec(marker=f"{self._marker}-{len(self._pods)}")
                    pod = await self._provider.create(self._offer, spec)
                    self._pods[pod.id], self._free[pod.id] = pod, self._offer.slots
                else:
                    await self._changed.wait()

    async def close(self) -> None:
        """Terminate every pod. Idempotent. Every pod is tried; what failed is raised at the end, by name."""
        failed: list[str] = []
        for pod_id in list(self._pods):
            try:
                await self._provider.terminate(pod_id)
                del self._pods[pod_id], self._free[pod_id]
            except Exception as error:
                failed.append(f"{pod_id} ({error})")
        await self._provider.close()
        if failed:
            raise ProviderError(f"Not terminated, and still costing money: {', '.join(failed)}. End them by hand.")
