"""What the local Runpod's REST v2 shows: pods, the catalog, and bills."""

from __future__ import annotations

import datetime
import getpass
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fakes.runpod_records import DATACENTERS, PodState, Refused, actions

if TYPE_CHECKING:
    from fakes.runpod import LocalRunpod

Query = Mapping[str, str]
SECONDS = {"hour": 3600, "day": 86400, "week": 604800, "month": 2592000, "year": 31536000}


def stamp(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def moment(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def pod_json(pod: PodState, now: float) -> dict[str, Any]:
    direct = proxy = runtime = None
    if pod.status == "RUNNING":
        user = f"{pod.id}-64411eb2"
        proxy = {"host": "ssh.runpod.io", "port": 22, "username": user, "command": f"ssh {user}@ssh.runpod.io"}
        ports: list[dict[str, Any]] = []
        if pod.direct:
            user, port = getpass.getuser(), pod.host_port
            direct = {"host": "127.0.0.1", "port": port, "username": user, "command": f"ssh {user}@127.0.0.1 -p {port}"}
            ports = [{"private": 22, "public": port, "type": "tcp", "ip": "127.0.0.1"}]
        runtime = {"uptime": int(now - (pod.started or now)), "gpus": [{"util": 0, "memoryUtil": 0}] * pod.count}
        runtime["ports"] = ports
    return {
        "id": pod.id,
        "name": pod.name,
        "status": pod.status,
        "actions": actions(pod),
        "image": pod.image,
        "args": pod.args,
        "disk": pod.disk,
        "mounts": pod.mounts,
        "ports": pod.ports,
        "env": pod.env,
        "registry": None,
        "cloud": pod.cloud,
        "dataCenterId": pod.datacenter,
        "cudaVersion": "12.8" if pod.started else None,
        "ssh": {"proxy": proxy, "direct": direct},
        "template": None,
        "gpu": {"id": pod.gpu, "count": pod.count},
        "cost": pod.cost,
        "locked": False,
        "globalNetworking": {"enabled": False},
        "runtime": runtime,
        "createdAt": stamp(pod.created),
        "startedAt": stamp(pod.started) if pod.started else None,
    }


def row(pod: PodState, now: float) -> dict[str, Any]:
    names = (
        "id",
        "name",
        "status",
        "price",
        "created",
        "started",
        "ended",
        "foreign",
        "gpu",
        "count",
        "cloud",
        "host_port",
    )
    return {**{n: getattr(pod, n) for n in names}, "spent": pod.spent("gpu", 0, now) + pod.spent("disk", 0, now)}


def level(stock: int) -> str:
    return "NONE" if stock <= 0 else "LOW" if stock <= 5 else "MEDIUM" if stock <= 15 else "HIGH"


def gpus(cloud: LocalRunpod, query: Query) -> list[dict[str, Any]]:
    wanted, count = query.get("cloud"), int(query.get("count", "1"))
    found = []
    for gpu, kind in cloud.gpus.items():
        stock = dict.fromkeys(DATACENTERS, 0)
        for (g, place, dc), n in list(cloud.stock.items()):
            if g == gpu and wanted in (None, place):
                stock[dc] = max(stock.get(dc, 0), n // count)
        item: dict[str, Any] = {"id": gpu, "name": kind.name, "pool": None, "manufacturer": "NVIDIA"}
        item |= {"memory": kind.memory, "secure": kind.secure > 0, "community": kind.community > 0}
        item["price"] = {"secure": kind.secure, "community": kind.community}
        item["maxCount"] = {"secure": kind.max_secure, "community": kind.max_community}
        if query.get("include") == "AVAILABILITY":
            item["availability"] = level(sum(stock.values()))
            item["dataCenters"] = [{"id": dc, "name": dc, "availability": level(n)} for dc, n in stock.items()]
            item["cudaVersions"] = [{"version": "12.8", "available": True}]
        found.append(item)
    return found


def datacenters(cloud: LocalRunpod, query: Query) -> list[dict[str, Any]]:
    found = []
    for dc, region in DATACENTERS.items():
        if region not in query.get("regions", region).split(","):
            continue
        item: dict[str, Any] = {"id": dc, "name": dc, "region": region, "networkVolumeTypes": ["STANDARD"]}
        item |= {"compliance": [], "globalNetwork": True}
        if "GPU_AVAILABILITY" in query.get("include", ""):
            stock = {
                gpu: sum(n for (g, _, d), n in list(cloud.stock.items()) if (g, d) == (gpu, dc)) for gpu in cloud.gpus
            }
            names = {gpu: kind.name for gpu, kind in cloud.gpus.items()}
            item["gpuAvailability"] = [{"id": g, "name": names[g], "availability": level(n)} for g, n in stock.items()]
        found.append(item)
    return found


def billing(cloud: LocalRunpod, query: Query) -> dict[str, Any]:
    """One record a pod and bucket. Pods that have ended stay in the bills."""
    now, wanted, size = cloud.clock(), query.get("podId"), query.get("bucketSize", "day")
    if size not in SECONDS:
        raise Refused(422, "Request validation failed.", ["$.bucketSize: not one of the allowed values"])
    width = SECONDS[size]
    end = moment(query["endTime"]) if "endTime" in query else now
    start = moment(query["startTime"]) if "startTime" in query else end - 30 * 86400
    if "lastN" in query:
        start = (end // width - int(query["lastN"]) + 1) * width
    records = []
    for pod in list(cloud.pods.values()):
        bucket = max(start, pod.created) // width * width
        while wanted in (None, pod.id) and bucket < min(end, pod.ended or now):
            gpu, disk = (pod.spent(kind, max(bucket, start), min(bucket + width, end)) for kind in ("gpu", "disk"))
            amounts = {"totalAmount": gpu + disk, "gpuAmount": gpu, "cpuAmount": 0.0, "diskAmount": disk}
            records.append((pod.id, {"startTime": stamp(bucket), "endTime": stamp(bucket + width)}, amounts))
            bucket += width
    names = ("totalAmount", "gpuAmount", "cpuAmount", "diskAmount")
    return {
        "records": [{"podId": pod_id, **span, **amounts} for pod_id, span, amounts in records],
        "metadata": {
            "query": {"startTime": stamp(start), "endTime": stamp(end), "bucketSize": size, "podId": wanted},
            "recordCount": len(records),
            "uniquePodCount": len({pod_id for pod_id, _, _ in records}),
            "totals": {name: sum(amounts[name] for _, _, amounts in records) for name in names},
        },
    }
