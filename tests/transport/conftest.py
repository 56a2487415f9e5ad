"""Hosts to reach over SSH."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fakes.sshd import QUICK, SSHD, Server

from ai_trains_ai.transport.ssh import SSHTransport


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if not SSHD:
        pytest.skip("sshd is not installed")
    server = Server(tmp_path / "sshd")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def shell(server: Server) -> AsyncIterator[SSHTransport]:
    transport = SSHTransport(server.host, QUICK)
    yield transport
    await asyncio.wait_for(transport.close(), 20)
