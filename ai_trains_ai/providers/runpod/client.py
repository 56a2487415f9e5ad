"""A small client of Runpod's REST API, version 2: deadlines, a rate limit, and one exception for every kind of refusal.

Source of paths, fields and status codes: Runpod's OpenAPI description 2.0.0. Only what can be repeated without harm is
repeated: reads and deletes, never a create.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from ai_trains_ai.errors import (
    AmbiguousCreate,
    ConfigurationError,
    Forbidden,
    MissingDependency,
    NoCapacity,
    OutOfFunds,
    ProviderError,
    Transient,
)

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)
T = TypeVar("T")

BASE_URL = "https://api.runpod.io/v2"
PER_MINUTE = 50  # requests; the service allows 60 per user, and the user may have a browser open
TRIES = 5  # of a call that can be repeated
PAUSE = 1.0  # seconds before the second try; doubles
LONGEST_PAUSE = 60.0
CONNECT_SECONDS, REPLY_SECONDS = 10.0, 60.0
# details of status 400 that mean "not now"; the service has no code for it
NO_CAPACITY = (
    "no longer any instances available",
    "no instances available",
    "no instances currently available",
    "does not have the resources",
    "not enough free gpus",
    "insufficient capacity",
)


class RateLimit:
    """At most ``per_minute`` requests a minute, a quarter of them at once; waits, and never refuses."""

    def __init__(
        self, per_minute: float, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._rate, self._burst = per_minute / 60, max(1.0, per_minute / 4)
        self._clock, self._sleep = clock, sleep
        self._tokens, self._at = self._burst, clock()
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        async with self._turn:  # first come, first served
            while True:
                now = self._clock()
                self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
                self._at = now
                if self._tokens >= 1:
                    self._tokens -= 1
                    return
                await self._sleep((1 - self._tokens) / self._rate)

    def pause(self, seconds: float) -> None:
        """The service asked for a pause: no request before it is over, whoever makes it."""
        self._tokens = min(self._tokens, 1 - seconds * self._rate)


def api_key(variable: str) -> str:
    """The key in an environment variable; it is never shown or stored."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise Forbidden(f"There is no Runpod API key. Set the environment variable {variable}.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise Forbidden(f"The Runpod API key holds a blank or a strange character. Set {variable} anew.")
    return key


async def repeated(call: Callable[[], Awaitable[T]], sleep: Callable[[float], Awaitable[None]]) -> T:
    """The result of a call that can be repeated without harm; the last of a few `Transient` errors is raised."""
    for attempt in range(TRIES):
        try:
            return await call()
        except Transient as error:
            if attempt == TRIES - 1:
                raise
            # jitter keeps several controllers from coming back all at once
            pause = min(LONGEST_PAUSE, PAUSE * 2**attempt) * random.uniform(0.5, 1.0)
            logger.debug("%s; again in %.1f s", error, pause)
            await sleep(pause)
    raise AssertionError("unreachable")


class RunpodClient:
    """Calls by path, and their replies as JSON values.

    Args:
        key_variable: the environment variable that holds the API key, which is never shown or stored.
        base_url: default RUNPOD_REST_V2_API_URL, else the service.
        per_minute: requests a minute at most.
        clock, sleep: of the rate limit and of the pauses, in seconds.
    """

    def __init__(
        self,
        key_variable: str = "RUNPOD_API_KEY",
        base_url: str = "",
        per_minute: float = PER_MINUTE,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._key = api_key(key_variable)
        self.base_url = (base_url or os.environ.get("RUNPOD_REST_V2_API_URL", "") or BASE_URL).rstrip("/")
        self._sleep = sleep
        self._limit = RateLimit(per_minute, clock, sleep)
        self._http: httpx.AsyncClient | None = None

    def __repr__(self) -> str:
        return f"RunpodClient({self.base_url!r})"

    async def get(self, path: str, **query: Any) -> Any:
        """The reply to a read. ``None``: there is no such thing (404)."""
        return await repeated(lambda: self._once("GET", path, query), self._sleep)

    async def delete(self, path: str) -> None:
        """Idempotent: what isn't there counts as deleted."""
        await repeated(lambda: self._once("DELETE", path, {}), self._sleep)

    async def create(self, path: str, body: Mapping[str, Any]) -> Any:
        """The reply to a create, which is never repeated.

        Raises:
            NoCapacity: nothing of the kind is free, or its pool is closed to this account; nothing was created.
            AmbiguousCreate: it may have been created.
        """
        httpx = _httpx()
        await self._limit.wait()
        try:
            response = await self._client().request("POST", path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise Transient(f"Runpod can't be reached ({_what(error)}); nothing was created.") from error
        except httpx.HTTPError as error:
            raise AmbiguousCreate(f"Runpod's answer to the create of {path} was lost ({_what(error)}).") from error
        self._heed(response)
        if response.status_code >= 500:
            raise AmbiguousCreate(f"Runpod answered the create of {path} with status {response.status_code}.")
        if response.is_success:
            try:
                return response.json()
            except ValueError:
                raise AmbiguousCreate(f"Runpod's answer to the create of {path} is no JSON.") from None
        raise _refusal(response, path, creating=True)

    async def lines(self, path: str, silence: float, **query: Any) -> AsyncGenerator[Any]:
        """The data of a stream of events, until it ends or nothing comes for ``silence`` seconds."""
        httpx = _httpx()
        await self._limit.wait()
        timeout = httpx.Timeout(CONNECT_SECONDS, read=silence)
        try:
            async with self._client().stream("GET", path, params=_query(query), timeout=timeout) as response:
                self._heed(response)
                if response.status_code == 404:
                    return
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response, path)
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        yield json.loads(line.removeprefix("data:"))
        except httpx.ReadTimeout:
            return
        except (httpx.HTTPError, ValueError) as error:
            raise Transient(f"Runpod's stream {path} broke ({_what(error)}).") from error

    async def close(self) -> None:
        """Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def _once(self, method: str, path: str, query: Mapping[str, Any]) -> Any:
        httpx = _httpx()
        await self._limit.wait()
        try:
            response = await self._client().request(method, path, params=_query(query))
        except httpx.HTTPError as error:
            raise Transient(f"Runpod did not answer {method} {path} ({_what(error)}).") from error
        self._heed(response)
        if response.status_code == 404 and _is_problem(response):
            return None
        if not response.is_success:
            raise _refusal(response, path)
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise Transient(f"Runpod answered {method} {path} with something that is no JSON.") from None

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            httpx = _httpx()
            self._http = httpx.AsyncClient(
                base_url=self.base_url,
                # without a name of its own a client is turned away by the firewall before the service
                headers={"Authorization": f"Bearer {self._key}", "User-Agent": f"ai-trains-ai/{_version()}"},
                timeout=httpx.Timeout(REPLY_SECONDS, connect=CONNECT_SECONDS),
            )
        return self._http

    def _heed(self, response: httpx.Response) -> None:
        """Wait as long as the service asks."""
        if response.status_code == 429:
            asked = response.headers.get("Retry-After", "")
            # not for hours, whatever is asked: pods have to be ended
            self._limit.pause(min(float(asked), 2 * LONGEST_PAUSE) if asked.isdigit() else PAUSE)


def _refusal(response: httpx.Response, path: str, *, creating: bool = False) -> ProviderError | ConfigurationError:
    """The error that a status stands for, with the service's own words."""
    status, said = response.status_code, _detail(response)
    if status == 429:
        return Transient(f"Runpod asks for a pause: {said}.")
    if not _is_problem(response) and status in (401, 403, 404):
        return Transient(f"A firewall before Runpod turned the request away with status {status}, not the API key.")
    if status == 401:
        return Forbidden(f"Runpod refuses the API key: {said}. Set RUNPOD_API_KEY to a valid one.")
    if status == 402:
        return OutOfFunds(f"Runpod's account has no funds left: {said}. Add credit to go on.")
    if status == 403 and creating and "pool" in said.lower():
        return NoCapacity(f"Runpod: {said}.")
    if status == 403:
        return Forbidden(f"Runpod's API key may not do this: {said}. Give the key write access to pods.")
    if status == 400 and any(words in said.lower() for words in NO_CAPACITY):
        return NoCapacity(f"Runpod: {said}.")
    if status in (400, 404, 405, 422):
        return ConfigurationError(f"Runpod refuses the request to {path}: {said}.")
    return Transient(f"Runpod answered {path} with status {status}: {said}.")


def _is_problem(response: httpx.Response) -> bool:
    """Whether the service itself speaks (RFC 9457), and not a proxy before it."""
    return "json" in response.headers.get("Content-Type", "")


def _detail(response: httpx.Response) -> str:
    try:
        problem = response.json()
        errors = "; ".join(map(str, problem.get("errors") or []))
        said = str(problem.get("detail") or problem.get("title") or "")
    except (ValueError, AttributeError):
        return f"a page that is no JSON ({len(response.content)} bytes)"
    return f"{said.rstrip('.')}: {errors}" if errors else said.rstrip(".") or "no detail"


def _query(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value not in (None, "")}


def _what(error: Exception) -> str:
    return str(error) or type(error).__name__


def _version() -> str:
    try:
        return version("ai-trains-ai")
    except PackageNotFoundError:  # a checkout that isn't installed
        return "0"


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingDependency.of("httpx", "runpod") from error
    return httpx
