"""The local Runpod's GraphQL, as far as the official SDK uses it: fields, arguments and selections, no more."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from fakes.runpod_records import PodState, Refused
from fakes.runpod_views import level

if TYPE_CHECKING:
    from fakes.runpod import LocalRunpod

TOKEN = re.compile(r'\s+|,|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<word>[\w.+-]+)|(?P<mark>[{}()\[\]:$!])')


def answer(cloud: LocalRunpod, document: str) -> dict[str, Any]:
    try:
        selection = Parser(document).operation()
    except (ValueError, IndexError):  # the SDK pastes values unescaped, so a quote in one breaks the document
        raise Refused(500, "Something went wrong. Please try again later or contact support.") from None
    return {name: select(resolve(cloud, name, arguments), inner) for name, arguments, inner in selection}


Selection = list[tuple[str, dict[str, Any], Any]]


class Parser:
    def __init__(self, document: str) -> None:
        self.tokens: list[str] = []
        at = 0
        while at < len(document):
            match = TOKEN.match(document, at)
            if match is None:
                raise ValueError(f"unexpected character at {at}")
            at = match.end()
            self.tokens += [match.group()] if match.lastgroup else []

    def next(self, want: str = "") -> str:
        token = self.tokens.pop(0)
        if want and token != want:
            raise ValueError(f"{want} expected, not {token}")
        return token

    def operation(self) -> Selection:
        while self.tokens[0] != "{":
            self.next()
        found = self.selection()
        if self.tokens:
            raise ValueError("more after the end")
        return found

    def selection(self) -> Selection:
        found: Selection = []
        self.next("{")
        while self.tokens[0] != "}":
            name, arguments, inner = self.next(), {}, None
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"not a field: {name}")
            if self.tokens[0] == "(":
                arguments = self.pairs("(", ")")
            if self.tokens[0] == "{":
                inner = self.selection()
            found.append((name, arguments, inner))
        self.next("}")
        return found

    def pairs(self, opening: str, closing: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.next(opening)
        while self.tokens[0] != closing:
            name = self.next()
            self.next(":")
            found[name] = self.value()
        self.next(closing)
        return found

    def value(self) -> Any:
        if self.tokens[0] == "{":
            return self.pairs("{", "}")
        if self.tokens[0] == "[":
            self.next("[")
            items = []
            while self.tokens[0] != "]":
                items.append(self.value())
            self.next("]")
            return items
        token = self.next()
        if token.startswith('"'):
            return json.loads(token)  # the escapes are the same; an unknown one breaks the document
        if token in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[token]
        if re.fullmatch(r"-?\d+", token):
            return int(token)
        return float(token) if re.fullmatch(r"-?\d+\.?\d*([eE][+-]?\d+)?", token) else token


def select(value: Any, inner: Any) -> Any:
    """Only what was asked for. A callable is a field with arguments."""
    if inner is None or value is None:
        return value
    if isinstance(value, list):
        return [select(item, inner) for item in value]
    found = {name: (value.get(name), arguments.get("input", {}), deeper) for name, arguments, deeper in inner}
    return {name: select(v(given) if callable(v) else v, deeper) for name, (v, given, deeper) in found.items()}


def resolve(cloud: LocalRunpod, name: str, arguments: dict[str, Any]) -> Any:
    given = arguments.get("input", {})
    if name == "myself":
        spend = sum(pod.cost for pod in cloud.listed)
        money = {"clientBalance": cloud.balance, "currentSpendPerHr": spend, "spendLimit": cloud.spend_limit}
        pods = [pod_fields(cloud, pod) for pod in cloud.listed]
        return {"id": "user_local", "pubKey": "", "networkVolumes": [], "podTemplates": [], "pods": pods, **money}
    if name == "gpuTypes":
        return [gpu_fields(cloud, gpu) for gpu in cloud.gpus if given.get("id") in (None, gpu)]
    if name == "pod":
        try:
            return pod_fields(cloud, cloud.find(given["podId"]))
        except Refused:
            return None
    if name == "podFindAndDeployOnDemand":
        return pod_fields(cloud, create(cloud, given, None))
    if name == "podRentInterruptable":
        return pod_fields(cloud, create(cloud, given, float(given["bidPerGpu"])))
    if name == "podTerminate":
        try:
            cloud.act(cloud.find(given["podId"]), "terminate")
        except Refused:
            raise Refused(200, "pod not found to terminate") from None
        return None
    if name in ("podStop", "podResume"):
        pod = cloud.find(given["podId"])
        cloud.act(pod, "stop" if name == "podStop" else "start")
        return pod_fields(cloud, pod)
    if name == "updateUserSettings":
        return {"id": "user_local"}
    raise Refused(400, f'Cannot query field "{name}".')


def create(cloud: LocalRunpod, given: dict[str, Any], bid: float | None) -> PodState:
    kind = cloud.gpus.get(given.get("gpuTypeId", ""))
    place = "SECURE" if given.get("cloudType", "ALL") == "ALL" and kind else given.get("cloudType", "SECURE")
    return cloud.create(
        *(given["name"], given.get("gpuTypeId", ""), given.get("gpuCount", 1), place),
        [given["dataCenterId"]] if given.get("dataCenterId") else [],
        bid,
        image=given.get("imageName", ""),
        args=given.get("dockerArgs", ""),
        disk=given.get("containerDiskInGb", 20),
        ports=[port for port in given.get("ports", "").split(",") if port],
        env={item["key"]: item["value"] for item in given.get("env", [])},
        mounts={},
    )


def pod_fields(cloud: LocalRunpod, pod: PodState) -> dict[str, Any]:
    runtime = None
    if pod.status == "RUNNING" and pod.direct:
        port = {"ip": "127.0.0.1", "isIpPublic": True, "privatePort": 22, "publicPort": pod.host_port, "type": "tcp"}
        runtime = {"ports": [port], "uptimeInSeconds": int(cloud.clock() - (pod.started or 0))}
    intent = pod.status if pod.status in ("EXITED", "TERMINATED") else "RUNNING"  # desiredStatus is no readiness
    return {
        "id": pod.id,
        "name": pod.name,
        "desiredStatus": intent,
        "imageName": pod.image,
        "costPerHr": pod.price,
        "env": [f"{key}={value}" for key, value in pod.env.items()],
        "gpuCount": pod.count,
        "runtime": runtime,
        "machineId": f"m-{pod.id[:6]}",
        "containerDiskInGb": pod.disk,
        "ports": ",".join(pod.ports),
        "podType": "INTERRUPTABLE" if pod.spot else "RESERVED",
        "machine": {"gpuDisplayName": cloud.gpus[pod.gpu].name, "podHostId": f"{pod.id}-64411eb2"},
        "dockerArgs": pod.args,
        "dockerId": None,
        "lastStatusChange": "",
        "memoryInGb": 32,
        "vcpuCount": 8,
        "port": None,
        "uptimeSeconds": int(cloud.clock() - pod.started) if pod.started else 0,
        "volumeInGb": 0,
        "volumeMountPath": "/workspace",
    }


def gpu_fields(cloud: LocalRunpod, gpu: str) -> dict[str, Any]:
    kind = cloud.gpus[gpu]

    def lowest(given: dict[str, Any]) -> dict[str, Any]:
        """Now, for so many GPUs, in one cloud and data center or in any."""
        clouds = {True: ("SECURE",), False: ("COMMUNITY",), None: ("SECURE", "COMMUNITY")}[given.get("secureCloud")]
        place, stock = given.get("dataCenterId"), list(cloud.stock.items())
        there = {c: n for (g, c, dc), n in sorted(stock, key=lambda s: s[1]) if g == gpu and place in (None, dc)}
        prices = {"SECURE": kind.secure, "COMMUNITY": kind.community}
        free = {c: prices[c] for c in clouds if there.get(c, 0) >= given.get("gpuCount", 1) and prices[c]}
        words = {"HIGH": "High", "MEDIUM": "Medium", "LOW": "Low"}
        return {
            "minimumBidPrice": kind.least_bid if free else None,
            "uninterruptablePrice": min(free.values(), default=None),
            "stockStatus": words.get(level(max((there[c] for c in free), default=0))),
        }

    return {
        "id": gpu,
        "displayName": kind.name,
        "manufacturer": "Nvidia",
        "memoryInGb": kind.memory,
        "cudaCores": 0,
        "maxGpuCount": kind.max_secure,
        "secureCloud": kind.secure > 0,
        "communityCloud": kind.community > 0,
        "securePrice": kind.secure,
        "communityPrice": kind.community,
        "secureSpotPrice": kind.least_bid,
        "communitySpotPrice": kind.least_bid,
        "lowestPrice": lowest,
    }
