"""The harness: a chat with the model inside of the env server's own process.

The stock one starts a Python process for every rollout, seconds of CPU each. This one posts the conversation to the
rollout's endpoint, which adds the sampling, asks the model and records the turn. A conversation of several turns is
resumed by verifiers: it calls `Chat.launch` again with all that was said. The engine finds it as ``ata_harness``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Chat"]

CONNECTIONS = 512  # to the endpoint, which is in this process: more rollouts than that wait for one
CONNECT_SECONDS = 30.0


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncIterator[Any]]]
_clients = WeakKeyDictionary()  # of the module: verifiers makes a harness for every rollout


class ChatConfig(vf.HarnessConfig):
    """Nothing of its own."""


class Chat(vf.Harness[ChatConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> vf.ProgramResult:
        """Sample one reply. A refusal is a failed program: verifiers knows whether it stopped the rollout itself."""
        system, prompt = self.resolve_prompt(data)
        opening = [vf.SystemMessage(content=system)] if system else []
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
        client = await _client()
        async with client.post(
            f"{endpoint}/chat/completions",
            headers={"Authorization": f"Bearer {secret}"},
            json={"model": ctx.model, "messages": [message_to_wire(message) for message in (*opening, *said)]},
        ) as answer:
            text = await answer.text()
        if answer.status == 200:
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")
        return vf.ProgramResult(exit_code=1, stdout="", stderr=f"The model's endpoint says {answer.status}: {text}")


async def _client() -> aiohttp.ClientSession:
    """The one of this event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        opened = _open()
        _clients[loop] = await anext(opened), opened
    return _clients[loop][0]


async def _open() -> AsyncIterator[aiohttp.ClientSession]:
    """A client for as long as the loop lives, which closes what is left of its generators at its end.

    The time of a rollout is bounded by whoever started it, and nothing is retried.
    """
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        yield client
