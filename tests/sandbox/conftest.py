"""One sandbox for all tests, and helpers that look at it from the outside."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from ai_trains_ai.records import Limits
from ai_trains_ai.sandbox import BubblewrapSandbox, wall

SCRIPT = "ai_trains_ai.sandbox.script:run"
CANARY = "CANARY-7f3a91"
SMALL = Limits(wall_seconds=6, cpu_seconds=4, memory_bytes=256 << 20, disk_bytes=16 << 20, processes=24)


@pytest.fixture(scope="session", autouse=True)
def _needs_namespaces():
    """Skip where this machine can't do it, tried without any code of ours; whatever fails beyond that is a bug."""
    command = [
        wall.find_bwrap(),
        "--unshare-pid",
        "--unshare-net",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "/bin/true",
    ]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        pytest.skip(f"no namespaces here: {answer.stderr}")


@pytest.fixture(scope="session")
async def sandbox():
    os.environ["SECRET_API_KEY"] = CANARY
    async with BubblewrapSandbox() as box:
        yield box


@pytest.fixture
def run(sandbox):
    """Run a script in the sandbox."""

    async def run_script(script, limits=SMALL, files=None, **options):
        payload = json.dumps({"path": "m.py"}).encode()
        return await sandbox.run(
            SCRIPT, payload, files={"m.py": script.encode(), **(files or {})}, limits=limits, **options
        )

    return run_script


def descendants(pid):
    """All living processes below ``pid``, as the host sees them."""
    found, pending = [], [pid]
    while pending:
        parent = pending.pop()
        for thread in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = [int(word) for word in thread.read_text().split()]
            except OSError:
                continue
            found += children
            pending += children
    return found


def server_pid(sandbox):
    return sandbox._server._process.pid


def living(pid):
    """Whether a process is there and no zombie that its init has yet to reap."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
