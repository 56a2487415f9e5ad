"""What goes wrong with requests, as a list that a test fills and the server works off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web
from attrs import define, field

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@define(eq=False)
class Fault:
    """What happens to the next requests of an endpoint.

    Args:
        path: part of the endpoint's path.
        times: how many requests it meets.
        skip: how many pass before it.
        status: HTTP status of the answer, with ``body``.
        drop: "before" the request was taken or "after" it: the connection is closed without an answer.
        hang: the result of what was asked for is never ready.
        error: the result is an error with this category, "user", "server" or "unknown".
        nan: log-probabilities of the result are not finite.
        delay: seconds before anything else.
    """

    path: str
    times: int = 1
    skip: int = 0
    status: int = 0
    body: str = '{"detail": "injected"}'
    headers: dict[str, str] = field(factory=dict)
    drop: str = ""
    hang: bool = False
    error: str = ""
    nan: bool = False
    delay: float = 0.0

    def meets(self, path: str) -> bool:
        """Whether it happens to this request; counts."""
        if self.path not in path or self.times <= 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


FAULT = web.RequestKey("fault", Fault)
"""What happens to a request, for its handler to see."""


async def answer(faults: list[Fault], request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's answer, or what the first fault that meets the request makes of it."""
    fault = next((fault for fault in faults if fault.meets(request.path)), None)
    if fault is None:
        return await handler(request)
    request[FAULT] = fault
    if fault.delay:
        await asyncio.sleep(fault.delay)
    if fault.drop == "before":
        return _cut(request)
    if fault.status:
        headers = {"Content-Type": "application/json", **fault.headers}
        return web.Response(status=fault.status, text=fault.body, headers=headers)
    done = await handler(request)
    return _cut(request) if fault.drop == "after" else done


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.close()
    return web.Response()
