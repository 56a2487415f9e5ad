"""Runpod as a provider of machines, over its REST API version 2.

What is rented is terminated, never stopped: a stopped pod costs money and rarely starts again. One listing serves
every look at a pod. There are no spot pods in this API.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from ai_trains_ai.errors import ConfigurationError, Transient
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.providers.runpod.client import PER_MINUTE, RunpodClient
from ai_trains_ai.providers.runpod.keys import key_pair
from ai_trains_ai.records import Money, Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.transport.ssh import Host, Patience, SSHTransport

logger = logging.getLogger(__name__)

IMAGE = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
CLOUDS = ("SECURE", "COMMUNITY")
AVAILABILITY = ("HIGH", "MEDIUM", "LOW")  # of the catalogue, the best first; NONE is no offer to be had now
STATUS: Mapping[str, Literal["starting", "ready", "unreachable", "terminated"]] = {
    "PROVISIONING": "starting",
    "STARTING": "starting",
    "RUNNING": "ready",  # once it has an address
    "EXITED": "unreachable",
    "ERROR": "unreachable",
    "TERMINATED": "terminated",
}
FRESH = 2.0  # seconds that a listing serves
PATIENCE = Patience()
VANISH = 60.0  # longest time from a delete until the pod is gone
LOG_LINES, LOG_SILENCE = 500, 3.0  # of a pod's log, and the seconds without a line that end it
# ends the pod from within, with the key of its own that Runpod puts there
END_POD = (
    "[ -f /etc/rp_environment ] && . /etc/rp_environment; "
    '[ -n "$RUNPOD_POD_ID" ] || for v in RUNPOD_POD_ID RUNPOD_API_KEY; do '
    'export "$v=$(tr "\\0" "\\n" </proc/1/environ | sed -n "s/^$v=//p")"; done; '
    'curl -fsS --retry 5 -X DELETE -H "Authorization: Bearer $RUNPOD_API_KEY" -A ai-trains-ai '
    '"{url}/pods/$RUNPOD_POD_ID" || runpodctl remove pod "$RUNPOD_POD_ID"'
)


class RunpodProvider(GPUProvider):
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
        if isinstance(max_pods, bool) or not isinstance(max_pods, int) or max_pods < 1:
            raise ConfigurationError(f"max_pods of Runpod is a whole number from 1 on, not {max_pods!r}.")
        if isinstance(clouds, str) or not clouds or set(clouds) - set(CLOUDS):
            raise ConfigurationError(f"clouds of Runpod is a list of {' and '.join(CLOUDS)}, not {clouds!r}.")
        if isinstance(data_centers, str):
            raise ConfigurationError(f"data_centers of Runpod is a list of ids, not {data_centers!r}.")
        self.max_pods = max_pods
        self._client = RunpodClient(key_variable, base_url, per_minute, clock, sleep)
        self._image, self._disk_gb, self._min_cuda, self._args = image, disk_gb, min_cuda, args
        self._clouds, self._data_centers = tuple(clouds), tuple(data_centers)
        self._env, self._ssh_key = dict(env or {}), ssh_key
        self._clock, self._sleep, self._patience = clock, sleep, patience
        self._listed: list[dict[str, Any]] = []
        self._listed_at = float("-inf")
        self._listing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"RunpodProvider(max_pods={self.max_pods}, clouds={self._clouds})"

    # ------------------------------------------------------------------------------------------ offers

    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        """One offer a GPU type, cloud and data center, those with much in stock first.

        The community cloud, and a type that the catalogue names no data centers of, have one offer for all of them.
        """
        clouds = (request.cloud,) if request.cloud else self._clouds
        if set(clouds) - set(CLOUDS):
            raise ConfigurationError(f"Runpod has no cloud {request.cloud!r}; it has {' and '.join(CLOUDS)}.")
        found: list[tuple[int, Offer]] = []
        for cloud in clouds:
            catalogue = await self._client.get(
                "/catalog/gpus",
                include="AVAILABILITY",
                product="POD",
                count=request.count,
                cloud=cloud,
                minCudaVersion=self._min_cuda,
            )
            for gpu in catalogue["gpus"]:
                if _wanted(gpu, request.gpu_types) and gpu["maxCount"][cloud.lower()] >= request.count:
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
            name = _offer_id(gpu["id"], count, cloud, place)
            offers.append((rank, Offer(name, gpu["id"], count, usd, available=rank < len(AVAILABILITY))))
        return offers

    # ------------------------------------------------------------------------------------------ pods

    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        gpu, count, cloud, place = _offer_parts(offer.id)
        if not spec.marker:
            raise ConfigurationError("A pod needs a marker: it is found by it again.")
        _, public = key_pair(self._ssh_key)
        body: dict[str, Any] = {
            "name": spec.marker,
            "image": spec.image or self._image,
            "cloud": cloud,
            # without a count every create is refused as if nothing were available
            "gpu": {"id": gpu, "count": count, "minCudaVersion": self._min_cuda},
            "disk": self._disk_gb,
            "ports": ["22/tcp"],
            "env": {**self._env, **spec.env, "PUBLIC_KEY": public},
        }
        if place:
            body["dataCenterIds"] = [place]
        if self._args:  # empty ones would replace the image's own start command
            body["args"] = self._args
        self._forget()
        return self._pod(await self._client.create("/pods", body))

    async def get(self, pod_id: str) -> Pod | None:
        listed = {pod["id"]: pod for pod in await self._pods()}
        # a new pod may be missing in the listing for a while
        found = listed.get(pod_id) or await self._client.get(f"/pods/{_safe(pod_id)}")
        return None if found is None or found["status"] == "TERMINATED" else self._pod(found)

    async def list(self, marker: str) -> Sequence[Pod]:
        mine = (pod for pod in await self._pods() if pod["name"].startswith(marker))
        return [self._pod(pod) for pod in mine if pod["status"] != "TERMINATED"]

    async def terminate(self, pod_id: str) -> None:
        """Delete a pod, and see that it is gone.

        Raises:
            Transient: it is still there after a minute; try again.
        """
        await self._client.delete(f"/pods/{_safe(pod_id)}")
        give_up, pause = self._clock() + VANISH, 1.0
        while True:
            left = await self._client.get(f"/pods/{_safe(pod_id)}")
            if left is None or left["status"] == "TERMINATED":
                break
            if self._clock() >= give_up:
                raise Transient(f"Runpod still has pod {pod_id} ({left['status']}) after its delete; try again.")
            await self._sleep(pause)
            pause = min(2 * pause, 10.0)
        self._forget()
        while any(pod["id"] == pod_id and pod["status"] != "TERMINATED" for pod in await self._pods()):
            if self._clock() >= give_up:
                raise Transient(f"Runpod still lists pod {pod_id} after its delete; try again.")
            await self._sleep(pause)

    async def connect(self, pod: Pod) -> Transport:
        async def where() -> Host:
            """The address now: a pod that was reset has another port."""
            self._forget()
            there = await self.get(pod.id)
            if there is None or there.status != "ready":
                state = "gone" if there is None else there.status
                raise Transient(f"Pod {pod.id} can't be reached: it is {state}.")
            host, _, port = there.address.rpartition(":")
            private, _ = key_pair(self._ssh_key)
            return Host(host, int(port), key=str(private), user=self._user(pod.id))

        return SSHTransport(await where(), self._patience, where)

    async def logs(self, pod_id: str) -> AsyncIterator[str]:
        for source in ("system", "container"):
            events = self._client.lines(
                f"/pods/{_safe(pod_id)}/logs", silence=LOG_SILENCE, source=source, tail=LOG_LINES
            )
            async with contextlib.aclosing(events):
                async for event in events:
                    yield f"{event.get('ts', '')} {event.get('source', source)}: {event.get('line', '')}"

    async def billed(self, since: datetime, pod_ids: Sequence[str] | None = None) -> Money | None:
        """Runpod's bill in buckets of an hour, of which the newest comes up to an hour late."""
        reply = await self._client.get("/billing/pods", startTime=_moment(since), bucketSize="hour")
        records = reply["records"] if reply else []
        return Money(sum(r["totalAmount"] for r in records if pod_ids is None or r["podId"] in pod_ids))

    def end_command(self, pod: Pod) -> str:
        """Ends the pod with the key that Runpod puts into it. That this key may delete its own pod through this API is
        not verified on the real service; the live tests check it.
        """
        return END_POD.replace("{url}", self._client.base_url)

    async def close(self) -> None:
        await self._client.close()

    # ------------------------------------------------------------------------------------------ listing

    async def _pods(self) -> Sequence[dict[str, Any]]:
        """All pods of the account, from one listing for everybody who asks at about the same time."""
        async with self._listing:
            asked = self._clock()
            if asked - self._listed_at > FRESH:
                reply = await self._client.get("/pods")
                if not isinstance(reply, dict) or not isinstance(reply.get("pods"), list):
                    raise Transient("Runpod answered the listing with something that is no list of pods.")
                self._listed, self._listed_at = reply["pods"], asked
            return self._listed

    def _forget(self) -> None:
        self._listed_at = float("-inf")

    def _user(self, pod_id: str) -> str:
        direct = next((_direct(pod) for pod in self._listed if pod["id"] == pod_id), None)
        return str(direct["username"]) if direct else "root"

    def _pod(self, found: Mapping[str, Any]) -> Pod:
        gpu, direct = found.get("gpu") or {}, _direct(found)
        offer_id = _offer_id(gpu.get("id", "cpu"), gpu.get("count", 0), found["cloud"], found.get("dataCenterId") or "")
        offer = Offer(offer_id, gpu.get("id", "cpu"), gpu.get("count", 0), float(found["cost"]), available=False)
        status = STATUS.get(found["status"], "unreachable")
        if status == "ready" and direct is None:
            status = "starting"
        address = f"{direct['host']}:{direct['port']}" if direct else ""
        workdir = (found.get("env") or {}).get("AITA_WORKDIR", "/workspace")
        return Pod(
            found["id"], found["name"], offer, status, address,
            host=direct["host"] if direct else "", root=f"{workdir.rstrip('/')}/ai-trains-ai",
        )  # fmt: skip


def _direct(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    direct: Mapping[str, Any] | None = (pod.get("ssh") or {}).get("direct")
    return direct


def _wanted(gpu: Mapping[str, Any], types: Sequence[str]) -> bool:
    wanted = {name.lower() for name in types}
    return not wanted or gpu["id"].lower() in wanted or gpu["name"].lower() in wanted


def _offer_id(gpu: str, count: int, cloud: str, place: str) -> str:
    return f"{gpu}/{count}/{cloud}/{place or 'any'}"


def _offer_parts(offer_id: str) -> tuple[str, int, str, str]:
    try:
        gpu, count, cloud, place = offer_id.rsplit("/", 3)
        return gpu, int(count), cloud, "" if place == "any" else place
    except ValueError:
        raise ConfigurationError(f"{offer_id!r} is no offer of Runpod.") from None


def _safe(pod_id: str) -> str:
    if not pod_id.replace("-", "").replace("_", "").isalnum():
        raise ConfigurationError(f"{pod_id!r} is no id of a Runpod pod.")
    return pod_id


def _moment(when: datetime) -> str:
    return (
        when.astimezone().isoformat(timespec="seconds") if when.tzinfo is None else when.isoformat(timespec="seconds")
    )
