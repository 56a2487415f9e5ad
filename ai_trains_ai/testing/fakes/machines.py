"""A provider that rents machines of air, with faults on demand."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Final

from attrs import define, evolve, frozen

from ai_trains_ai.errors import (
    AmbiguousCreate,
    NoCapacity,
    Transient,
)
from ai_trains_ai.interfaces import (
    GPUProvider,
    Transport,
)
from ai_trains_ai.providers.local import LocalTransport
from ai_trains_ai.records import (
    Money,
    Offer,
    Pod,
    PodRequest,
    PodSpec,
)
from ai_trains_ai.testing.fakes.context import FakeClock

LOST_REPLY: Final = "lost reply"
"""A fault: the call does its work, and the caller never hears of it."""


@frozen
class Unlisted:
    """A fault of ``create``: the new pod is missing from the next ``calls`` answers of ``list``."""

    calls: int = 1


Fault = tuple[str, Exception | str | Unlisted]


@define(eq=False)
class _Rented:
    """A machine of air, and what it has cost."""

    pod: Pod
    since: float
    until: float | None = None
    unlisted: int = 0

    def usd(self, begin: float, now: float) -> float:
        end = now if self.until is None else self.until
        return max(0.0, end - max(begin, self.since)) / 3600 * self.pod.offer.usd_per_hour


class FakeGPUProvider(GPUProvider):
    """Rents machines that don't exist, by a clock that a test moves, with faults when a test asks for them.

    >>> provider = FakeGPUProvider(boot_seconds=90.0)
    >>> provider.faults += [("create", LOST_REPLY), ("terminate", Transient("503"))]

    The next ``create`` then makes a pod and raises `AmbiguousCreate`, and the next ``terminate`` fails once. Commands
    and files of a ready pod are this machine's own (`LocalTransport`), so use temporary folders.

    Attributes:
        faults: (method, what happens) in order; a call spends the first one of its method. What happens is an exception
            to raise before anything is done, `LOST_REPLY`, or `Unlisted` for a ``create``.
        stock: how many more of an offer there are, by offer id; what isn't named never runs out.
        unreachable: ids of pods that cost money and answer nobody.
        calls: names of the methods called, in order.
        foreign: a pod of somebody else on the same account.
    """

    def __init__(
        self,
        offers: Sequence[Offer] = (Offer("h100", "H100", 1, 3.60, slots=2), Offer("a100", "A100", 1, 1.80)),
        *,
        clock: Callable[[], float] | None = None,
        boot_seconds: float = 0.0,
        stock: Mapping[str, int] | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.boot_seconds = boot_seconds
        self.stock = dict(stock or {})
        self.faults: deque[Fault] = deque()
        self.unreachable: set[str] = set()
        self.calls: list[str] = []
        self._offers = tuple(offers)
        self._rented: dict[str, _Rented] = {}
        self.foreign = self._rent(self._offers[0], "somebody-else").pod

    @property
    def spent(self) -> float:
        """US dollars that every pod of ours has cost by now; the other end of the ledger's arithmetic."""
        return self._usd(0.0)

    @property
    def alive(self) -> list[str]:
        """Markers of our pods that cost money now."""
        return [
            rented.pod.marker
            for rented in self._rented.values()
            if rented.until is None and rented.pod.id != self.foreign.id
        ]

    def lose(self, pod_id: str) -> None:
        """The service takes a machine away, as it does with a spot instance."""
        self._rented[pod_id].until = self.clock()

    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        self._fault("offers")
        return [
            evolve(offer, available=self.stock.get(offer.id, 1) > 0)
            for offer in self._offers
            if offer.count == request.count and (not request.gpu_types or offer.gpu_type in request.gpu_types)
        ]

    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        fault = self._fault("create")
        if self.stock.get(offer.id, 1) <= 0:
            raise NoCapacity(f"No {offer.gpu_type} is free now. Take another offer, or try later.")
        if offer.id in self.stock:
            self.stock[offer.id] -= 1
        rented = self._rent(offer, spec.marker)
        if isinstance(fault, Unlisted):
            rented.unlisted = fault.calls
        if fault == LOST_REPLY:
            raise AmbiguousCreate(f"The answer to create {spec.marker} was lost. Look for the marker.")
        return self._seen(rented)

    async def get(self, pod_id: str) -> Pod | None:
        self._fault("get")
        rented = self._rented.get(pod_id)
        return None if rented is None or rented.until is not None else self._seen(rented)

    async def list(self, marker: str) -> Sequence[Pod]:
        self._fault("list")
        found = []
        for rented in self._rented.values():
            if rented.until is None and rented.pod.marker.startswith(marker):
                if rented.unlisted:
                    rented.unlisted -= 1
                else:
                    found.append(self._seen(rented))
        return found

    async def terminate(self, pod_id: str) -> None:
        fault = self._fault("terminate")
        rented = self._rented.get(pod_id)
        if rented is not None and rented.until is None:
            rented.until = self.clock()
            if rented.pod.offer.id in self.stock:
                self.stock[rented.pod.offer.id] += 1
        if fault == LOST_REPLY:
            raise Transient(f"The answer to terminate {pod_id} was lost.")

    async def connect(self, pod: Pod) -> Transport:
        self._fault("connect")
        self.require_reachable(pod.id)
        return _PodTransport(self, pod.id)

    async def logs(self, pod_id: str) -> AsyncIterator[str]:
        pod = await self.get(pod_id)
        if pod is not None:
            yield f"{pod.offer.gpu_type} found"
            yield f"{pod.marker} is {pod.status}"

    async def billed(self, since: datetime, pod_ids: Sequence[str] | None = None) -> Money | None:
        return Money(self._usd(since.timestamp(), pod_ids))

    def require_reachable(self, pod_id: str) -> None:
        """Raise `Transient` unless the pod is ready."""
        rented = self._rented.get(pod_id)
        status = "terminated" if rented is None else self._seen(rented).status
        if status != "ready":
            raise Transient(f"Pod {pod_id} is {status}, so nobody gets in.")

    def _fault(self, method: str) -> str | Unlisted | None:
        self.calls.append(method)
        for fault in self.faults:
            if fault[0] == method:
                self.faults.remove(fault)
                if isinstance(fault[1], Exception):
                    raise fault[1]
                return fault[1]
        return None

    def _rent(self, offer: Offer, marker: str) -> _Rented:
        rented = _Rented(Pod(f"pod-{uuid.uuid4().hex[:8]}", marker, offer, "starting"), self.clock())
        self._rented[rented.pod.id] = rented
        return rented

    def _seen(self, rented: _Rented) -> Pod:
        if rented.until is not None:
            return evolve(rented.pod, status="terminated")
        if rented.pod.id in self.unreachable:
            return evolve(rented.pod, status="unreachable")
        ready = self.clock() >= rented.since + self.boot_seconds
        return evolve(rented.pod, status="ready", address="127.0.0.1") if ready else rented.pod

    def _usd(self, since: float, pod_ids: Sequence[str] | None = None) -> float:
        ours = [
            rented
            for rented in self._rented.values()
            if rented.pod.id != self.foreign.id and (pod_ids is None or rented.pod.id in pod_ids)
        ]
        return sum(rented.usd(since, self.clock()) for rented in ours)


class _PodTransport(LocalTransport):
    """This machine's commands and files, for as long as the pod can be reached."""

    def __init__(self, provider: FakeGPUProvider, pod_id: str) -> None:
        self._provider, self._pod_id = provider, pod_id

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> tuple[int | None, bytes]:
        try:
            self._provider.require_reachable(self._pod_id)
        except Transient:
            return None, b""
        return await super().run(argv, stdin=stdin, timeout=timeout)

    async def put(self, files: Mapping[str, bytes], folder: str) -> None:
        self._provider.require_reachable(self._pod_id)
        await super().put(files, folder)

    async def get(self, path: str, limit: int) -> bytes:
        self._provider.require_reachable(self._pod_id)
        return await super().get(path, limit)

    async def tail(self, path: str, offset: int, limit: int = 1 << 20) -> bytes:
        self._provider.require_reachable(self._pod_id)
        return await super().tail(path, offset, limit)
