"""What both ways to Runpod share: pods in the words of REST v2, one listing for everybody who looks, and how they end.

What is rented is terminated, never stopped: a stopped pod costs money and rarely starts again.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from ai_trains_ai.errors import ConfigurationError, Transient
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.providers.runpod.keys import key_pair
from ai_trains_ai.records import Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.transport.ssh import Host, Patience, SSHTransport

IMAGE = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
CLOUDS = ("SECURE", "COMMUNITY")
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
# ends the pod from within, with the key of its own that Runpod puts there
END_POD = (
    "[ -f /etc/rp_environment ] && . /etc/rp_environment; "
    '[ -n "$RUNPOD_POD_ID" ] || for v in RUNPOD_POD_ID RUNPOD_API_KEY; do '
    'export "$v=$(tr "\\0" "\\n" </proc/1/environ | sed -n "s/^$v=//p")"; done; '
    # the key goes in by a pipe: a command line is readable for everybody
    'printf "Authorization: Bearer %s" "$RUNPOD_API_KEY" | curl -fsS --retry 5 -X DELETE -H @- -A ai-trains-ai '
    '"{url}/pods/$RUNPOD_POD_ID" || runpodctl remove pod "$RUNPOD_POD_ID"'
)


class RunpodPods(GPUProvider):
    """Finds, reaches and ends pods; a subclass says how the service is asked, and in which words.

    Args:
        rest_url: of REST v2, which a pod asks to end itself.
    """

    def __init__(
        self,
        max_pods: int,
        image: str,
        disk_gb: int,
        clouds: Sequence[str],
        data_centers: Sequence[str],
        env: Mapping[str, str] | None,
        ssh_key: str,
        rest_url: str,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        patience: Patience,
    ) -> None:
        if isinstance(max_pods, bool) or not isinstance(max_pods, int) or max_pods < 1:
            raise ConfigurationError(f"max_pods of Runpod is a whole number from 1 on, not {max_pods!r}.")
        if isinstance(clouds, str) or not clouds or set(clouds) - set(CLOUDS):
            raise ConfigurationError(f"clouds of Runpod is a list of {' and '.join(CLOUDS)}, not {clouds!r}.")
        if isinstance(data_centers, str):
            raise ConfigurationError(f"data_centers of Runpod is a list of ids, not {data_centers!r}.")
        self.max_pods = max_pods
        self._image, self._disk_gb, self._rest_url = image, disk_gb, rest_url
        self._clouds, self._data_centers = tuple(clouds), tuple(data_centers)
        self._env, self._ssh_key = dict(env or {}), ssh_key
        self._clock, self._sleep, self._patience = clock, sleep, patience
        self._listed: Sequence[dict[str, Any]] = ()
        self._listed_at = float("-inf")
        self._listing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_pods={self.max_pods}, clouds={self._clouds})"

    @abstractmethod
    async def _all(self) -> Sequence[dict[str, Any]]:
        """Every pod of the account, with the fields of REST v2."""

    @abstractmethod
    async def _one(self, pod_id: str) -> dict[str, Any] | None:
        """One of them, also one that is too new for the list; ``None``: there is none."""

    @abstractmethod
    async def _delete(self, pod_id: str) -> None:
        """Idempotent."""

    async def get(self, pod_id: str) -> Pod | None:
        listed = {pod["id"]: pod for pod in await self._pods()}
        # a new pod may be missing in the listing for a while
        found = listed.get(pod_id) or await self._one(safe(pod_id))
        return None if found is None or found["status"] == "TERMINATED" else self._pod(found)

    async def list(self, marker: str) -> Sequence[Pod]:
        mine = (pod for pod in await self._pods() if pod["name"].startswith(marker))
        return [self._pod(pod) for pod in mine if pod["status"] != "TERMINATED"]

    async def terminate(self, pod_id: str) -> None:
        """Delete a pod, and see that it is gone.

        Raises:
            Transient: it is still there after a minute; try again.
        """
        await self._delete(safe(pod_id))
        give_up, pause = self._clock() + VANISH, 1.0
        while True:
            left = await self._one(safe(pod_id))
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

    def end_command(self, pod: Pod) -> str:
        """Ends the pod with the key that Runpod puts into it. That this key may delete its own pod through this API is
        not verified on the real service; the live tests check it.
        """
        return END_POD.replace("{url}", self._rest_url)

    # ------------------------------------------------------------------------------------------ for subclasses

    def _wanted_clouds(self, request: PodRequest) -> Sequence[str]:
        clouds = (request.cloud,) if request.cloud else self._clouds
        if set(clouds) - set(CLOUDS):
            raise ConfigurationError(f"Runpod has no cloud {request.cloud!r}; it has {' and '.join(CLOUDS)}.")
        return clouds

    def _variables(self, spec: PodSpec) -> dict[str, str]:
        """Of the pod's environment; with the key that opens it."""
        if not spec.marker:
            raise ConfigurationError("A pod needs a marker: it is found by it again.")
        _, public = key_pair(self._ssh_key)
        return {**self._env, **spec.env, "PUBLIC_KEY": public}

    async def _pods(self) -> Sequence[dict[str, Any]]:
        """All pods of the account, from one listing for everybody who asks at about the same time."""
        async with self._listing:
            asked = self._clock()
            if asked - self._listed_at > FRESH:
                self._listed, self._listed_at = await self._all(), asked
            return self._listed

    def _forget(self) -> None:
        self._listed_at = float("-inf")

    def _user(self, pod_id: str) -> str:
        direct = next((_direct(pod) for pod in self._listed if pod["id"] == pod_id), None)
        return str(direct["username"]) if direct else "root"

    def _pod(self, found: Mapping[str, Any]) -> Pod:
        gpu, direct = found.get("gpu") or {}, _direct(found)
        kind, count = gpu.get("id", "cpu"), gpu.get("count", 0)
        where = offer_id(kind, count, found["cloud"], found.get("dataCenterId") or "")
        offer = Offer(where, kind, count, float(found["cost"]), available=False)
        status = STATUS.get(found["status"], "unreachable")
        if status == "ready" and direct is None:
            status = "starting"
        address = f"{direct['host']}:{direct['port']}" if direct else ""
        workdir = (found.get("env") or {}).get("AITA_WORKDIR", "/workspace")
        return Pod(
            found["id"], found["name"], offer, status, address,
            host=found.get("machineId", ""), root=f"{workdir.rstrip('/')}/ai-trains-ai",
        )  # fmt: skip


def _direct(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    direct: Mapping[str, Any] | None = (pod.get("ssh") or {}).get("direct")
    return direct


def wanted(gpu: Mapping[str, Any], types: Sequence[str]) -> bool:
    names = {name.lower() for name in types}
    return not names or gpu["id"].lower() in names or gpu["name"].lower() in names


def offer_id(gpu: str, count: int, cloud: str, place: str) -> str:
    return f"{gpu}/{count}/{cloud}/{place or 'any'}"


def offer_parts(name: str) -> tuple[str, int, str, str]:
    try:
        gpu, count, cloud, place = name.rsplit("/", 3)
        return gpu, int(count), cloud, "" if place == "any" else place
    except ValueError:
        raise ConfigurationError(f"{name!r} is no offer of Runpod.") from None


def safe(pod_id: str) -> str:
    if not pod_id.replace("-", "").replace("_", "").isalnum():
        raise ConfigurationError(f"{pod_id!r} is no id of a Runpod pod.")
    return pod_id
