"""Runpod over its official SDK, which speaks GraphQL: of use for spot pods and the account's balance, for as long as
Runpod keeps that API (it says: until early 2027). `ai_trains_ai.providers.runpod.provider` is the way for all else.

The SDK is kept at arm's length. It is imported when first used, and the root logger is put back as it was; its calls
run one after the other in a thread, since its key is a global of its module, which is set for the time of a call only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ai_trains_ai.errors import (
    AiTrainsAiError,
    AmbiguousCreate,
    ConfigurationError,
    Forbidden,
    MissingDependency,
    NoCapacity,
    OutOfFunds,
    ProviderError,
    Transient,
)
from ai_trains_ai.providers.runpod.client import NO_CAPACITY, PER_MINUTE, RateLimit, api_key, repeated
from ai_trains_ai.providers.runpod.pods import IMAGE, PATIENCE, RunpodPods, offer_id, offer_parts, wanted
from ai_trains_ai.records import Money, Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.transport.ssh import Patience

logger = logging.getLogger(__name__)

URL_VARIABLE, URL = "RUNPOD_API_BASE_URL", "https://api.runpod.io"
# the SDK gives up by itself after 30 seconds to connect and 30 to read, and a create is two requests: a call that was
# given up here would otherwise go on, and might still create something
DEADLINE = 130.0
USER = "root"  # of a pod; GraphQL doesn't tell it
STOCK = ("HIGH", "MEDIUM", "LOW")  # the best first
# GraphQL has no codes: what words in a refusal stand for
NO_FUNDS = ("balance", "funds", "credit", "spend limit")
NOT_ALLOWED = ("access denied", "not authorized", "unauthorized", "forbidden", "permission")
TOO_MANY = ("too many requests", "rate limit")
NOT_UNDERSTOOD = ("cannot query field", "syntax error", "unknown argument", "is not defined", "expected type")
GONE = "pod not found to terminate"

_worker = ThreadPoolExecutor(1, "runpod-sdk")


class RunpodSDKProvider(RunpodPods):
    """Rents Runpod pods over the official SDK.

    A spot pod costs what was bid, and may end at any moment without notice: its job is placed again, as after the loss
    of any host. There is no bill and no log of a pod in this API.

    Args:
        max_pods: pods at a time.
        key_variable: the environment variable that holds the API key. The key itself is no argument: arguments are
            written to the run folder.
        image: what a pod runs; it must start an SSH server for the key in its variable PUBLIC_KEY, as Runpod's do.
        disk_gb: container disk. A pod has no volume: nothing outlives it.
        clouds: "SECURE" and "COMMUNITY", in which a pod may be.
        data_centers: ids of those that a pod may be in; empty: any.
        cuda: the CUDA versions that a host's driver may have; the SDK knows no oldest one.
        spot: rent interruptible pods.
        bid_usd_per_gpu_hour: for these; ``None`` bids what is the least when the offers are read.
        env: variables of the pods; AITA_WORKDIR is the folder that jobs live below, /workspace by default. Quotes,
            backslashes and line breaks are refused: the SDK would break them.
        ssh_key: a private key file; default one of this user's own, made when it isn't there.
        base_url: default RUNPOD_API_BASE_URL, else the service.
        per_minute, clock, sleep, patience: of the connections.
    """

    def __init__(
        self,
        max_pods: int = 1,
        key_variable: str = "RUNPOD_API_KEY",
        image: str = IMAGE,
        disk_gb: int = 50,
        clouds: Sequence[str] = ("SECURE",),
        data_centers: Sequence[str] = (),
        cuda: Sequence[str] = ("12.8", "12.9", "13.0", "13.1"),
        spot: bool = False,
        bid_usd_per_gpu_hour: float | None = None,
        env: Mapping[str, str] | None = None,
        ssh_key: str = "",
        base_url: str = "",
        per_minute: float = PER_MINUTE,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        patience: Patience = PATIENCE,
    ) -> None:
        if bid_usd_per_gpu_hour is not None and not (spot and 0 < bid_usd_per_gpu_hour < float("inf")):
            raise ConfigurationError(
                f"bid_usd_per_gpu_hour is a price above 0 for spot pods, not {bid_usd_per_gpu_hour!r} with spot={spot}."
            )
        self._key = api_key(key_variable)
        self._base_url = (base_url or os.environ.get(URL_VARIABLE, "") or URL).rstrip("/")
        super().__init__(
            *(max_pods, image, disk_gb, clouds, data_centers, env, ssh_key),
            *(f"{self._base_url}/v2", clock, sleep, patience),
        )
        self._cuda, self._spot, self._bid = tuple(cuda), spot, bid_usd_per_gpu_hour
        self._limit = RateLimit(per_minute, clock, sleep)
        self._names: dict[str, str] = {}  # ids of the GPU types by the names that pods show

    # ------------------------------------------------------------------------------------------ the account

    async def balance(self) -> Money:
        """What is left in the account."""
        return Money(float((await self._query("query { myself { clientBalance } }"))["myself"]["clientBalance"]))

    # ------------------------------------------------------------------------------------------ offers

    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        """One offer a GPU type, cloud and data center of yours, those with much in stock first."""
        found: list[tuple[int, Offer]] = []
        for cloud in self._wanted_clouds(request):
            for place in self._data_centers or ("",):
                for gpu in await self._catalogue(request.count, cloud, place):
                    offer = self._offer(gpu, request.count, cloud, place)
                    if offer and wanted({"id": gpu["id"], "name": gpu["displayName"]}, request.gpu_types):
                        stock = str((gpu["lowestPrice"] or {}).get("stockStatus")).upper()
                        found.append((STOCK.index(stock) if stock in STOCK else len(STOCK), offer))
        return [offer for _, offer in sorted(found, key=lambda ranked: ranked[0])]

    async def _catalogue(self, count: int, cloud: str, place: str) -> Sequence[dict[str, Any]]:
        """All types in one request; the SDK's own look at a type tells neither stock nor place."""
        where = f"gpuCount: {count:d}, secureCloud: {json.dumps(cloud == 'SECURE')}"
        if place:
            where += f", dataCenterId: {json.dumps(place)}"
        query = (
            "query { gpuTypes { id displayName maxGpuCount secureCloud communityCloud securePrice communityPrice "
            f"lowestPrice(input: {{ {where} }}) {{ minimumBidPrice uninterruptablePrice stockStatus }} }} }}"
        )
        found: list[dict[str, Any]] = (await self._query(query))["gpuTypes"]
        return found

    def _offer(self, gpu: Mapping[str, Any], count: int, cloud: str, place: str) -> Offer | None:
        if not gpu[f"{cloud.lower()}Cloud"] or (gpu["maxGpuCount"] or 0) < count:
            return None
        now = gpu["lowestPrice"] or {}
        least = now.get("minimumBidPrice" if self._spot else "uninterruptablePrice")
        price = (self._bid or least) if self._spot else gpu[f"{cloud.lower()}Price"]
        if not price:
            return None
        available = least is not None and (not self._spot or price >= least)
        name = offer_id(gpu["id"], count, cloud, place)
        return Offer(name, gpu["id"], count, float(price) * count, available=available)

    # ------------------------------------------------------------------------------------------ pods

    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        gpu, count, cloud, place = offer_parts(offer.id)
        env, image = self._variables(spec), spec.image or self._image
        if self._spot:
            made = await self._rent_spot(offer, spec.marker, image, env)
        else:
            for what, text in {"marker": spec.marker, "image": image, **env}.items():
                _check_pasted(what, what + text)
            await self._limit.wait()  # it looks at the GPU type first: two requests
            self._forget()
            made = await self._call(
                lambda sdk: sdk.create_pod(
                    *(spec.marker, image, gpu, cloud),
                    data_center_id=place or None,
                    gpu_count=count,
                    container_disk_in_gb=self._disk_gb,
                    ports="22/tcp",
                    env=env,
                    allowed_cuda_versions=list(self._cuda),
                ),
                creating=True,
            )
        if not isinstance(made, dict) or not made.get("id"):
            raise AmbiguousCreate(f"Runpod's answer to the create of {spec.marker} names no pod.")
        known = {"id": made["id"], "name": spec.marker, "status": "STARTING", "cost": offer.usd_per_hour, "env": env}
        try:
            known |= await self._one(made["id"]) or {}  # the answer to the create tells no price
        except ProviderError as error:
            logger.warning("The price of the new pod %s is unknown (%s); its offer's is taken.", made["id"], error)
        return self._pod({**known, "gpu": {"id": gpu, "count": count}, "cloud": cloud, "dataCenterId": place})

    async def _rent_spot(self, offer: Offer, marker: str, image: str, env: Mapping[str, str]) -> Any:
        """The SDK has no call for it, but runs any query."""
        gpu, count, cloud, place = offer_parts(offer.id)
        given: dict[str, Any] = {
            "name": marker,
            "imageName": image,
            "gpuTypeId": gpu,
            "gpuCount": count,
            "bidPerGpu": offer.usd_per_hour / count,
            "containerDiskInGb": self._disk_gb,
            "volumeInGb": 0,
            "ports": "22/tcp",
            "startSsh": True,
            "supportPublicIp": True,
            "allowedCudaVersions": list(self._cuda),
        }
        if place:
            given["dataCenterId"] = place
        # JSON's strings, numbers and lists are GraphQL's; its objects aren't, and an enumeration's names have no quotes
        fields = [f"{name}: {json.dumps(value)}" for name, value in given.items()] + [f"cloudType: {cloud}"]
        pairs = ", ".join(f"{{ key: {json.dumps(name)}, value: {json.dumps(value)} }}" for name, value in env.items())
        mutation = f"mutation {{ podRentInterruptable(input: {{ {', '.join(fields)}, env: [{pairs}] }}) {{ id }} }}"
        self._forget()
        reply = await self._call(lambda sdk: sdk.api.graphql.run_graphql_query(mutation)["data"], creating=True)
        return reply["podRentInterruptable"] if isinstance(reply, dict) else None

    async def _all(self) -> Sequence[dict[str, Any]]:
        found = await self._look(lambda sdk: sdk.get_pods())
        if not isinstance(found, list):
            raise Transient("Runpod answered the listing with something that is no list of pods.")
        return [await self._as_rest(pod) for pod in found]

    async def _one(self, pod_id: str) -> dict[str, Any] | None:
        found = await self._look(lambda sdk: sdk.get_pod(pod_id))
        return None if found is None else await self._as_rest(found)

    async def _delete(self, pod_id: str) -> None:
        await self._look(lambda sdk: _terminate(sdk, pod_id))

    async def _as_rest(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """A pod in the words of REST v2. Where it is, GraphQL's list doesn't tell; "ALL" is its word for any cloud."""
        name = (pod.get("machine") or {}).get("gpuDisplayName") or "unknown"
        if name not in self._names:
            self._names |= {gpu["displayName"]: gpu["id"] for gpu in await self._look(lambda sdk: sdk.get_gpus())}
            self._names.setdefault(name, name)
        ports = (pod.get("runtime") or {}).get("ports") or []
        door = next((p for p in ports if p["privatePort"] == 22 and p["isIpPublic"]), None)
        direct = {"host": door["ip"], "port": door["publicPort"], "username": USER} if door else None
        status = pod["desiredStatus"]  # what is wanted, not what is
        return {
            "id": pod["id"],
            "name": pod["name"],
            "status": "STARTING" if status in ("CREATED", "RESTARTING") else status,
            "cost": pod["costPerHr"] or 0.0,
            "machineId": pod.get("machineId") or "",
            "cloud": "ALL",
            "gpu": {"id": self._names[name], "count": pod["gpuCount"]},
            "env": dict(pair.split("=", 1) for pair in pod["env"] or [] if "=" in pair),
            "ssh": {"direct": direct},
        }

    # ------------------------------------------------------------------------------------------ calls

    async def _query(self, text: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._look(lambda sdk: sdk.api.graphql.run_graphql_query(text)["data"])
        return found

    async def _look(self, do: Callable[[Any], Any]) -> Any:
        """A call that can be repeated without harm."""
        return await repeated(lambda: self._call(do), self._sleep)

    async def _call(self, do: Callable[[Any], Any], creating: bool = False) -> Any:
        await self._limit.wait()
        waiting = _worker.submit(self._as_us, do, creating)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(waiting), DEADLINE)
        except TimeoutError:
            begun = not waiting.cancel()
        if creating and begun:
            raise AmbiguousCreate(f"Runpod did not answer a create within {DEADLINE:g} seconds.")
        raise Transient(f"Runpod did not answer within {DEADLINE:g} seconds.")

    def _as_us(self, do: Callable[[Any], Any], creating: bool) -> Any:
        """In the worker: the call, with our key and address in the SDK's globals while it lasts."""
        sdk = _sdk()
        key, url = sdk.api_key, os.environ.get(URL_VARIABLE)
        sdk.api_key, os.environ[URL_VARIABLE] = self._key, self._base_url
        try:
            return do(sdk)
        except Exception as error:
            failure = _meaning(sdk, error, creating)
            if failure is None:
                raise
        finally:
            sdk.api_key = key
            if url is None:
                os.environ.pop(URL_VARIABLE, None)
            else:
                os.environ[URL_VARIABLE] = url
        raise failure  # without the SDK's error: its frames hold the key


def _sdk() -> Any:
    """The SDK. Its import gives the root logger a level and a handler, which are taken away again."""
    if "runpod" not in sys.modules:
        root = logging.getLogger()
        level, handlers = root.level, list(root.handlers)
        try:
            import runpod  # noqa: F401
        except ImportError as error:
            raise MissingDependency.of("runpod", "runpod-sdk") from error
        finally:
            root.setLevel(level)
            root.handlers[:] = handlers
    return sys.modules["runpod"]


def _terminate(sdk: Any, pod_id: str) -> None:
    try:
        sdk.terminate_pod(pod_id)
    except sdk.error.QueryError as error:
        if GONE not in str(error).lower():
            raise


def _meaning(sdk: Any, error: Exception, creating: bool) -> AiTrainsAiError | None:
    """Our error for one of the SDK's; ``None``: it is none of these."""
    import requests

    if isinstance(error, sdk.error.AuthenticationError):
        return Forbidden(f"Runpod refuses the API key: {error} Set RUNPOD_API_KEY to a valid one.")
    if isinstance(error, sdk.error.QueryError):
        return _refusal(str(error), creating)
    unread = isinstance(error, requests.exceptions.JSONDecodeError | KeyError | TypeError)  # a page, or another form
    if unread or isinstance(error, requests.RequestException):
        what = "something that is no answer" if unread else f"nothing ({error or type(error).__name__})"
        if creating:
            return AmbiguousCreate(f"Runpod answered a create with {what}.")
        return Transient(f"Runpod answered with {what}.")
    if isinstance(error, ValueError):  # the SDK's own checks
        return ConfigurationError(f"Runpod's SDK refuses: {error}.")
    return None


def _refusal(said: str, creating: bool) -> AiTrainsAiError:
    words, said = said.lower(), said.rstrip(".")

    def speaks_of(known: Sequence[str]) -> bool:
        return any(word in words for word in known)

    if speaks_of(NO_CAPACITY):
        return NoCapacity(f"Runpod: {said}.")
    if speaks_of(NO_FUNDS):
        return OutOfFunds(f"Runpod's account has no funds left: {said}. Add credit to go on.")
    if speaks_of(TOO_MANY):
        return Transient(f"Runpod asks for a pause: {said}.")
    if speaks_of(NOT_ALLOWED):
        return Forbidden(f"Runpod's API key may not do this: {said}. Give the key write access to pods.")
    if "something went wrong" in words:
        return AmbiguousCreate(f"Runpod answered a create: {said}.") if creating else Transient(f"Runpod: {said}.")
    if creating or speaks_of(NOT_UNDERSTOOD):
        return ConfigurationError(f"Runpod refuses the request: {said}.")
    return Transient(f"Runpod: {said}.")


def _check_pasted(what: str, text: str) -> None:
    """The SDK pastes values into its query as they are. The value isn't shown: it may be a secret."""
    if '"' in text or "\\" in text or not text.isprintable():
        raise ConfigurationError(
            f"{what!r} of a pod holds a quote, a backslash or a line break, which Runpod's SDK would break. "
            "Encode it, or choose the provider 'runpod'."
        )
