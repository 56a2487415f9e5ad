"""Models that vLLM serves on a pod, sampled from here through the SSH tunnel.

Prompts are in the pod only while they are answered, and nobody else's process is left there then: a model is served
after its job has ended, or on a machine that has no job.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

from ai_trains_ai.convert import to_data
from ai_trains_ai.errors import MissingDependency, ProviderError, StorageError, Transient, TransportError
from ai_trains_ai.fleet import Held
from ai_trains_ai.interfaces import ServedModel
from ai_trains_ai.records import Message, Prompt, SamplingParams
from ai_trains_ai.store import attempt_write
from ai_trains_ai.transport.jobs import HostJob, HostJobs

logger = logging.getLogger(__name__)

AT_ONCE: Final = 64  # requests
TRIES: Final = 4  # of a request whose connection breaks; the same request gets the same reply
REQUEST_SECONDS: Final = 300.0
STARTING: Final = 60.0  # seconds that a server may be late beyond its own deadline


@contextlib.asynccontextmanager
async def served(
    held: Held,
    files: Mapping[str, bytes],
    command: str,
    seconds: float,
    thinking: bool,
    poll: float,
) -> AsyncIterator[ServedModel]:
    """A model on a held machine, for as long as the context lasts.

    Args:
        held: the machine.
        files: what it needs, ``serve.json`` among them.
        command: what starts it.
        seconds: until it is ready, at most.
        thinking: the chat template's switch.
        poll: seconds between two looks at it.

    Raises:
        ProviderError: the machine is gone, or the model is not served on it.
    """
    pod = held.placement.marker
    try:
        try:
            await held.start(files, command)
            port = await asyncio.wait_for(_ready(held, poll), seconds + STARTING)
        except TimeoutError as error:
            raise ProviderError(f"The model server on pod {pod} says nothing.") from error
        except TransportError as error:
            raise ProviderError(f"Pod {pod} can't be used to serve a model: {error}") from error
        yield _Served(held, port, thinking)
    finally:
        with contextlib.suppress(Exception):  # the next job wipes the machine
            await asyncio.wait_for(held.call(lambda host: host.remove(held.beside)), 30.0)


async def _ready(held: Held, poll: float) -> int:
    """The port that the server listens on."""
    said = b""

    async def look(host: HostJobs) -> HostJob:
        return await host.poll(held.beside, len(said))

    while True:
        state = await held.call(look)
        said += state.log
        for event in events(said):
            if event.get("event") == "ready":
                return int(event["port"])
            if event.get("event") == "refused":
                raise ProviderError(f"The model is not served on pod {held.placement.marker}: {event.get('why')}.")
        if state.status in ("ended", "lost", "absent") and not state.log:
            last = said.decode("utf-8", "backslashreplace").strip()[-300:]
            raise ProviderError(f"The model server on pod {held.placement.marker} is {state.status}: {last}")
        await asyncio.sleep(poll)


def events(said: bytes) -> list[dict[str, Any]]:
    """The JSON objects among whole lines of what a program of ours printed."""
    found = []
    for line in said[: said.rfind(b"\n") + 1].splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                found.append(event)
    return found


class _Served(ServedModel):
    def __init__(self, held: Held, port: int, thinking: bool) -> None:
        self._held, self._port, self._thinking = held, port, thinking

    async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
        if not prompts:
            return []
        httpx = _httpx()
        replies: list[str | None] = [None] * len(prompts)
        for attempt in range(TRIES):
            try:
                tunnel = await self._held.call(_opened(self._port))
                async with tunnel as port:
                    await self._ask(httpx, port, prompts, params, replies)
                return [reply or "" for reply in replies]
            except (httpx.TransportError, Transient, TransportError) as error:
                logger.info("Pod %s, attempt %d to sample: %r", self._held.placement.marker, attempt + 1, error)
                await asyncio.sleep(0.5 * 2**attempt)
        raise ProviderError(f"The model server on pod {self._held.placement.marker} can't be reached any more.")

    async def _ask(
        self, httpx: Any, port: int, prompts: Sequence[Prompt], params: SamplingParams, replies: list[str | None]
    ) -> None:
        """Ask for every reply that is missing."""
        gate = asyncio.Semaphore(AT_ONCE)
        limits = httpx.Limits(max_connections=AT_ONCE)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"

        async def one(client: Any, index: int) -> None:
            async with gate:
                answer = await client.post(url, json=self._body(prompts[index], params, index))
            if answer.status_code >= 500:
                raise httpx.ReadError(f"status {answer.status_code}")
            if answer.status_code != 200:
                raise ProviderError(f"The model server refuses a prompt ({answer.status_code}): {answer.text[:300]}")
            replies[index] = answer.json()["choices"][0]["message"]["content"] or ""

        async with httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as client:
            missing = [index for index, reply in enumerate(replies) if reply is None]
            results = await asyncio.gather(*(one(client, index) for index in missing), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _body(self, prompt: Prompt, params: SamplingParams, index: int) -> dict[str, Any]:
        messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        return {
            "model": "policy",
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "seed": (params.seed + index) % 2**31,
            "chat_template_kwargs": {"enable_thinking": self._thinking},
        }


def _opened(port: int) -> Callable[[HostJobs], Awaitable[AbstractAsyncContextManager[int]]]:
    async def call(host: HostJobs) -> AbstractAsyncContextManager[int]:
        return host.forward(port)

    return call


class CachedReplies(ServedModel):
    """Replies of an untrained model, asked for once in a run: they depend on nothing that a job does.

    Args:
        folder: where they are kept, readable for nobody else; prompts are in there as a hash alone.
        about: what they depend on beside prompts and parameters.
        open: starts the model, for what isn't there.
    """

    def __init__(self, folder: Path, about: Sequence[Any], open: Callable[[], Awaitable[ServedModel]]) -> None:
        self._folder, self._about, self._open = folder, list(about), open
        self._model: ServedModel | None = None
        self._opening = asyncio.Lock()

    async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
        if not prompts:
            return []
        asked = json.dumps([self._about, to_data(params), to_data(list(prompts))])
        path = self._folder / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
        with contextlib.suppress(FileNotFoundError, ValueError):
            kept: list[str] = json.loads(await asyncio.to_thread(path.read_text))
            return kept
        async with self._opening:
            if self._model is None:
                self._model = await self._open()
        replies = await self._model.sample(prompts, params)
        try:
            await asyncio.to_thread(attempt_write, path, json.dumps(replies).encode(), 0o600)
        except StorageError as error:
            logger.warning("Replies of the base model are not kept: %s", error)
        return replies


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingDependency(
            "Sampling from a model on a pod needs httpx. Install it: pip install 'ai-trains-ai[prime-rl]'"
        ) from error
    return httpx
