"""The local Runpod's REST v2 and its side door, after the service's OpenAPI description."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web
from attrs import asdict

from fakes import runpod_views as views
from fakes.runpod_graphql import answer
from fakes.runpod_records import CAPACITY, MISLEADING, Fault, Refused
from fakes.runpod_views import moment, pod_json, stamp

if TYPE_CHECKING:
    from fakes.runpod import LocalRunpod

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    402: "Payment Required",
    403: "Forbidden",
    404: "Not Found",
    409: "Conflict",
    422: "Unprocessable Entity",
    429: "Too Many Requests",
    500: "Internal Server Error",
}
REFUSALS = {
    "402": (402, "insufficient balance"),
    "403": (403, "you do not have access to this pool"),
    "404": (404, "resource not found"),
    "409": (409, "the resource is locked"),
    "422": (422, "Request validation failed."),
    "500": (500, "Something went wrong. Please try again later or contact support."),
    "503": (503, "Service Unavailable"),
}
CREATE = {
    "name": str,
    "image": str,
    "args": str,
    "disk": int,
    "env": dict,
    "ports": list,
    "registry": str,
    "cloud": str,
    "cpu": dict,
    "dataCenterIds": list,
    "globalNetworking": bool,
    "gpu": dict,
    "mounts": dict,
    "startJupyter": bool,
    "startSsh": bool,
    "templateId": str,
}
FIELDS = {  # of GraphQL
    "podFindAndDeployOnDemand": "create",
    "podRentInterruptable": "create",
    "podTerminate": "delete",
    "pods": "list",
    "pod": "get",
    "gpuTypes": "catalog",
}
GPU_KEYS = {"id": str, "count": int, "allowedCudaVersions": list, "minCudaVersion": str}


def application(cloud: LocalRunpod) -> web.Application:
    face = Face(cloud)
    app = web.Application(middlewares=[face.gate])
    app.add_routes(
        [
            web.get("/v2/pods", face.list),
            web.post("/v2/pods", face.create),
            web.get("/v2/pods/{id}", face.get),
            web.delete("/v2/pods/{id}", face.delete),
            web.post("/v2/pods/{id}/action", face.action),
            web.get("/v2/pods/{id}/logs", face.logs),
            web.get("/v2/catalog/gpus", face.catalog),
            web.get("/v2/catalog/datacenters", face.datacenters),
            web.get("/v2/billing/pods", face.billing),
            web.post("/graphql", face.graphql),
            web.post("/_admin", face.admin),
        ]
    )
    return app


def problem(status: int, detail: str, errors: list[str] | None = None) -> web.Response:
    body: dict[str, Any] = {"title": TITLES.get(status, "Error"), "status": status, "detail": detail}
    if errors:
        body["errors"] = errors
    return web.Response(status=status, text=json.dumps(body), content_type="application/problem+json")


class Face:
    def __init__(self, cloud: LocalRunpod) -> None:
        self.cloud = cloud

    # ------------------------------------------------------------------------------------------ every request

    @web.middleware
    async def gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/_admin":
            return await handler(request)
        arrived = self.cloud.clock()
        self.cloud.tick()
        try:
            response = await self._admit(request, handler)
        except web.HTTPException as missing:
            response = problem(missing.status, "resource not found" if missing.status == 404 else missing.reason)
        except Refused as refused:
            response = self._refusal(refused, request)
        except ConnectionAbortedError:
            self.cloud.requests.append((arrived, request.method, request.path, 0))
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None
        self.cloud.requests.append((arrived, request.method, request.path, response.status))
        if not response.prepared:
            self._limits(response)
        return response

    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        agent = request.headers.get("User-Agent", "")
        if not agent or agent.startswith("Python-urllib"):
            return web.Response(status=403, text="<html><body>error code: 1010</body></html>", content_type="text/html")
        self._authenticate(request)
        if not self._token():
            return self._slow_down(math.ceil(60 / self.cloud.per_minute))
        fault = self.cloud._take(*await _kinds(request), "any")
        if fault is None:
            return await handler(request)
        return await self._wrong(fault, request, handler)

    async def _wrong(self, fault: Fault, request: web.Request, handler: Handler) -> web.StreamResponse:
        do, details = fault.do, fault.details
        if do == "slow":
            await asyncio.sleep(float(details.get("seconds", 1.0)))
        elif do == "lost_before":
            raise ConnectionAbortedError
        elif do == "429":
            return self._slow_down(int(details.get("retry_after", 2)))
        elif do == "html":
            text = "<html><head><title>502 Bad Gateway</title></head></html>"
            return web.Response(status=int(details.get("status", 502)), text=text, content_type="text/html")
        elif do == "capacity":
            raise Refused(400, str(details.get("text", CAPACITY)))
        elif do in REFUSALS:
            status, text = REFUSALS[do]
            raise Refused(status, str(details.get("text", text)))
        elif do == "duplicate":
            await handler(request)
        known = set(self.cloud.pods)
        response = await handler(request)
        lag = float(details.get("seconds", 30) if do == "lag" else details.get("lag", 0))
        for pod_id in set(self.cloud.pods) - known:
            self.cloud.pods[pod_id].hidden_until = self.cloud.clock() + lag
        if do == "lost_after":
            raise ConnectionAbortedError
        elif do == "500_after":
            raise Refused(*REFUSALS["500"])
        elif do not in ("slow", "lag", "duplicate"):
            raise RuntimeError(f"The local Runpod knows no fault {do!r} for {fault.on!r}.")
        return response

    def _authenticate(self, request: web.Request) -> None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not key:
            raise Refused(401, "missing bearer token")
        if key == self.cloud.key:
            return
        owner = self.cloud.pods.get(key.removeprefix("rpp_")) if key.startswith("rpp_") else None
        if owner is None or owner.status == "TERMINATED":
            raise Refused(401, "invalid bearer token")
        own = request.method == "DELETE" and request.path == f"/v2/pods/{owner.id}"
        if not own or not self.cloud.key_may_delete:
            raise Refused(403, "access denied")

    def _token(self) -> bool:
        cloud = self.cloud
        now, rate = cloud.clock(), cloud.per_minute / 60
        cloud.tokens = min(float(cloud.per_minute), cloud.tokens + (now - cloud.refilled) * rate)
        cloud.refilled = now
        if cloud.tokens < 1:
            return False
        cloud.tokens -= 1
        return True

    def _slow_down(self, seconds: int) -> web.Response:
        response = problem(429, "rate limit exceeded for the minute window")
        response.headers["Retry-After"] = str(seconds)
        return response

    def _limits(self, response: web.StreamResponse) -> None:
        cloud = self.cloud
        reset = math.ceil((cloud.per_minute - cloud.tokens) * 60 / cloud.per_minute)
        response.headers["RateLimit"] = f'"minute";r={int(cloud.tokens)};t={reset}'
        response.headers["RateLimit-Policy"] = f'"minute";q={cloud.per_minute};w=60'

    # ------------------------------------------------------------------------------------------ pods

    async def list(self, request: web.Request) -> web.Response:
        return web.json_response({"pods": [pod_json(pod, self.cloud.clock()) for pod in self.cloud.listed]})

    async def create(self, request: web.Request) -> web.Response:
        body = await _json(request)
        _check(body, CREATE, {"name"} if "templateId" in body else {"name", "image"})
        gpu = body.get("gpu")
        if gpu is None:
            raise Refused(400, "only GPU pods are known here")
        _check(gpu, GPU_KEYS, {"id"}, "$.gpu")
        if body.get("cloud", "SECURE") not in ("SECURE", "COMMUNITY"):
            raise Refused(422, "Request validation failed.", ["$.cloud: value must be one of 'SECURE', 'COMMUNITY'"])
        env = body.get("env", {})
        if not all(isinstance(value, str) for value in env.values()):
            raise Refused(422, "Request validation failed.", ["$.env: values must be strings"])
        if len(env) > 50:
            raise Refused(400, "a pod may have at most 50 environment variables")
        if "count" not in gpu:
            raise Refused(400, MISLEADING)
        mounts = body.get("mounts", {})
        if mounts.get("persistent", {}).get("size", 10) < 10:
            raise Refused(422, "Request validation failed.", ["$.mounts.persistent.size: must be at least 10"])
        pod = self.cloud.create(
            *(body["name"], gpu["id"], gpu["count"], body.get("cloud", "SECURE"), body.get("dataCenterIds", [])),
            image=body.get("image", "runpod/template"),
            args=body.get("args", ""),
            disk=body.get("disk", 20),
            ports=body.get("ports", []),
            env=dict(env),
            mounts=mounts,
        )
        return web.json_response(pod_json(pod, self.cloud.clock()), status=201)

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response(pod_json(self.cloud.find(request.match_info["id"]), self.cloud.clock()))

    async def delete(self, request: web.Request) -> web.Response:
        self.cloud.act(self.cloud.find(request.match_info["id"]), "terminate")
        return web.Response(status=204)

    async def action(self, request: web.Request) -> web.Response:
        body = await _json(request)
        _check(body, {"action": str}, {"action"})
        if body["action"] not in ("start", "stop", "restart", "terminate"):
            raise Refused(422, "Request validation failed.", ["$.action: not one of the allowed values"])
        pod = self.cloud.find(request.match_info["id"])
        self.cloud.act(pod, body["action"])
        if body["action"] == "terminate":
            return web.Response(status=204)
        return web.json_response(pod_json(pod, self.cloud.clock()))

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the last lines, then what comes, until the pod has ended."""
        pod = self.cloud.find(request.match_info["id"])
        source, tail = request.query.get("source"), int(request.query.get("tail", "100"))
        resumed, _, number = request.headers.get("Last-Event-ID", "").partition("/")
        since = max([moment(text) for text in (request.query.get("since"), resumed) if text], default=0.0)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        response.headers["X-Accel-Buffering"] = "no"
        self._limits(response)
        await response.prepare(request)
        last = int(number or 0)
        while True:
            lines = [(n, *line) for n, line in enumerate(list(pod.log), 1) if n > last]
            last = lines[-1][0] if lines else last
            fit = [line for line in lines if int(line[1]) >= since and source in (None, line[2])]
            for n, at, origin, text in fit[max(0, len(fit) - tail) :]:
                data = json.dumps({"ts": stamp(at), "source": origin, "line": text})
                await response.write(f"id: {stamp(at)}/{n:012d}\ndata: {data}\n\n".encode())
            tail = 5000  # of what was there before; what comes is shown whole
            if pod.status == "TERMINATED":
                return response
            await asyncio.sleep(0.02)

    # ------------------------------------------------------------------------------------------ catalog and bills

    async def catalog(self, request: web.Request) -> web.Response:
        return web.json_response({"gpus": views.gpus(self.cloud, request.query)})

    async def datacenters(self, request: web.Request) -> web.Response:
        return web.json_response({"dataCenters": views.datacenters(self.cloud, request.query)})

    async def billing(self, request: web.Request) -> web.Response:
        return web.json_response(views.billing(self.cloud, request.query))

    # ------------------------------------------------------------------------------------------ the other doors

    async def graphql(self, request: web.Request) -> web.Response:
        body = await _json(request)
        try:
            return web.json_response({"data": answer(self.cloud, str(body.get("query", "")))})
        except Refused as refused:
            return self._refusal(refused, request)

    def _refusal(self, refused: Refused, request: web.Request) -> web.Response:
        if request.path != "/graphql" or refused.status == 401:
            return problem(refused.status, refused.detail, refused.errors)
        code = "INTERNAL_SERVER_ERROR" if refused.status == 500 else "RUNPOD"
        error = {"message": refused.detail, "extensions": {"code": code}}
        return web.json_response({"errors": [error], "data": None})

    async def admin(self, request: web.Request) -> web.Response:
        """The side door of a cloud in another process: faults, ends, losses; the state is always in the answer."""
        body, cloud = await request.json(), self.cloud
        if "fault" in body:
            cloud.faults.append(Fault(**body["fault"]))
        for name in ("end", "kill", "freeze", "thaw", "remap", "add_foreign"):
            if name in body:
                getattr(cloud, name)(body[name])
        if "stock" in body:
            cloud.stock = {(gpu, kind, dc): n for gpu, kind, dc, n in body["stock"]}
        with cloud.lock:
            pods = [views.row(pod, cloud.clock()) for pod in cloud.pods.values()]
        state = {"clock": cloud.clock(), "spent": cloud.spent, "alive": cloud.alive, "processes": cloud.processes}
        state |= {"foreign_untouched": cloud.foreign_untouched, "balance": cloud.balance, "pods": pods}
        return web.json_response(
            {**state, "requests": len(cloud.requests), "faults": [asdict(f) for f in cloud.faults]}
        )


async def _kinds(request: web.Request) -> list[str]:
    """What faults call such a request."""
    parts = request.path.strip("/").split("/")[1:]
    if parts == ["pods"]:
        return ["list" if request.method == "GET" else "create"]
    if len(parts) == 2 and parts[0] == "pods":
        return [request.method.lower()]
    if len(parts) == 3:
        return [parts[2]]
    if parts:
        return [parts[0]]
    document = await request.text()
    return ["graphql", *(kind for field, kind in FIELDS.items() if re.search(rf"\b{field}\b", document))]


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        raise Refused(400, "request could not be processed") from None
    if not isinstance(body, dict):
        raise Refused(422, "Request validation failed.", ["$: got array, want object"])
    return body


def _check(body: dict[str, Any], keys: dict[str, type], required: set[str], path: str = "$") -> None:
    errors = [f"{path}: additional properties '{key}' not allowed" for key in body if key not in keys]
    errors += [f"{path}: missing property '{key}'" for key in sorted(required - set(body))]
    for key, want in keys.items():
        value = body.get(key)
        counts = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if key in body and not (counts if want is int else isinstance(value, want)):
            errors.append(f"{path}.{key}: not a valid {want.__name__}")
        if want is str and key in ("name", "id", "templateId") and value == "":
            errors.append(f"{path}.{key}: must not be empty")
    if errors:
        raise Refused(422, "Request validation failed.", errors)
