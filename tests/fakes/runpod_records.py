"""What the local Runpod keeps: GPU types, pods with their meters, faults, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from fakes.pods import Machine

CAPACITY = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)
MISLEADING = "no instances available"  # what a create without gpu.count is told, whatever the stock
OCI = "OCI runtime create failed: nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8"
LIVE = ("PROVISIONING", "STARTING", "RUNNING", "ERROR")  # statuses that cost the full price
HOUR = 3600.0
DISK = {"running": 0.0, "stopped": 0.20 / 730}  # dollars per GB and hour; the pod's price includes the running disk


@frozen
class GPU:
    """One type in the catalog; dollars per hour of one GPU, and how many fit on one pod."""

    name: str
    memory: int
    secure: float
    community: float
    max_secure: int = 8
    max_community: int = 4

    @property
    def least_bid(self) -> float:
        """For a spot pod, per GPU."""
        return round((self.community or self.secure) / 2, 3)


GPUS = {
    "NVIDIA A40": GPU("A40", 48, 0.49, 0.35),
    "NVIDIA GeForce RTX 4090": GPU("RTX 4090", 24, 0.74, 0.34),
    "NVIDIA RTX A5000": GPU("RTX A5000", 24, 0.27, 0.16),
    "NVIDIA RTX A6000": GPU("RTX A6000", 48, 0.53, 0.33),
    "NVIDIA H100 80GB HBM3": GPU("H100 SXM", 80, 3.49, 2.69),
}
DATACENTERS = {"US-KS-2": "NORTH_AMERICA", "CA-MTL-1": "NORTH_AMERICA", "EU-RO-1": "EUROPE"}


@frozen(init=False)
class Fault:
    """Goes wrong once. ``on``: create, list, get, delete, logs, action, catalog, billing, graphql, any; or boot.

    Requests, before anything happens: ``capacity`` (text), ``402``, ``403``, ``422``, ``429`` (retry_after), ``500``,
    ``html``, ``lost_before``, ``slow`` (seconds, real ones). After it happened: ``lost_after``, ``500_after``.
    Creates: ``lag`` (seconds in which neither list nor GET show the pod; also a detail of a create's other faults),
    ``duplicate`` (a second pod of the same name). Boots, where ``at`` counts from a listening sshd: ``stuck``,
    ``error``, ``no_direct``, ``refuse``, ``pull`` (seconds), ``gpus`` (count), ``ecc`` (count), ``busy`` (mib),
    ``silent`` (nvidia-smi finds nothing), ``remap`` (at), ``die`` (at), ``freeze`` (at, seconds), ``end`` (at).
    """

    on: str
    do: str
    details: Mapping[str, Any]

    def __init__(self, on: str, do: str, **details: Any) -> None:
        self.__attrs_init__(on, str(do), details)


class Refused(Exception):
    """An answer that isn't a success; the faces turn it into theirs."""

    def __init__(self, status: int, detail: str, errors: list[str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.errors = status, detail, errors


@define(eq=False)
class PodState:
    """One pod, from create to for ever. `meter`: (from, until or None, "gpu" or "disk", dollars per hour)."""

    id: str
    name: str
    gpu: str
    count: int
    cloud: str
    datacenter: str
    image: str
    args: str
    disk: int
    ports: list[str]
    env: dict[str, str]
    mounts: dict[str, Any]
    price: float
    created: float
    spot: bool = False
    status: str = "PROVISIONING"
    started: float | None = None
    ended: float | None = None
    foreign: bool = False
    touched: bool = False  # by a request that would change it
    hidden_until: float = 0.0
    direct: bool = False
    boot: Fault | None = None
    machine: Machine | None = None
    plans: list[tuple[float, Any]] = field(factory=list)
    meter: list[tuple[float, float | None, str, float]] = field(factory=list)
    log: list[tuple[float, str, str]] = field(factory=list)

    @property
    def cost(self) -> float:
        return self.price if self.status in LIVE else 0.0

    @property
    def host_port(self) -> int:
        return self.machine.port if self.machine else 0

    @property
    def workspace(self) -> Path:
        """The pod's disk as this machine sees it."""
        assert self.machine is not None
        return self.machine.workspace

    def spent(self, kind: str, start: float, end: float) -> float:
        """Dollars for what lies between two moments."""
        spans = ((max(a, start), min(end if b is None else b, end), rate) for a, b, k, rate in self.meter if k == kind)
        return sum(max(0.0, until - since) * rate / HOUR for since, until, rate in spans)

    def bill(self, now: float, kind: str = "", rate: float = 0.0) -> None:
        """From now on it costs this, or nothing."""
        if self.meter and self.meter[-1][1] is None:
            since, _, what, price = self.meter[-1]
            self.meter[-1] = (since, now, what, price)
        if kind:
            self.meter.append((now, None, kind, rate))


def actions(pod: PodState) -> list[str]:
    running, stopped = ["stop", "restart", "terminate"], ["start", "terminate"]
    return {"RUNNING": running, "EXITED": stopped, "ERROR": stopped, "TERMINATED": []}.get(
        pod.status, ["stop", "terminate"]
    )
