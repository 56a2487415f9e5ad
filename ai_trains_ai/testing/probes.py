"""What `SandboxContract` runs inside: each looks, or misbehaves, in one way. Light to import; payloads are text."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ai_trains_ai.sandbox.channel import Channel

_SLEEP = "import time; time.sleep(60)"
_warm = False


def echo(payload: bytes, channel: Channel) -> None:
    """Send the payload back."""
    channel.send("echo", payload)


def count(payload: bytes, channel: Channel) -> None:
    """Send so many frames of 1 kB, numbered in their kinds."""
    for number in range(int(payload)):
        channel.send(f"frame-{number}", b"x" * 1_000)


def talk(payload: bytes, channel: Channel) -> None:
    """Print so many characters to each of the two streams."""
    print("o" * int(payload), flush=True)
    print("e" * int(payload), flush=True, file=sys.stderr)


def stop(payload: bytes, channel: Channel) -> None:
    """Exit with this code."""
    raise SystemExit(int(payload))


def fail(payload: bytes, channel: Channel) -> None:
    raise RuntimeError("a probe that fails")


def crash(payload: bytes, channel: Channel) -> None:
    """A segmentation fault: the kernel spares no process this one, not even pid 1."""
    ctypes.string_at(0)


def sleep(payload: bytes, channel: Channel) -> None:
    """Sleep so many seconds."""
    time.sleep(float(payload))


def spin(payload: bytes, channel: Channel) -> None:
    while True:
        pass


def allocate(payload: bytes, channel: Channel) -> None:
    """Write so many bytes of memory, and say so."""
    block = bytearray(b"x") * int(payload)
    channel.send("allocated", str(len(block)).encode())


def files(payload: bytes, channel: Channel) -> None:
    """Send every file of the working folder, as JSON with the bytes as Latin-1."""
    found = {str(path): path.read_bytes().decode("latin-1") for path in Path().rglob("*") if path.is_file()}
    channel.send("files", json.dumps(found).encode())


def litter(payload: bytes, channel: Channel) -> None:
    """Leave a file of this name in the working folder, and in the folder for temporary files."""
    for folder in (Path(), Path(tempfile.gettempdir())):
        (folder / payload.decode()).write_text("left")


def temporary(payload: bytes, channel: Channel) -> None:
    """Whether a file of this name is in the folder for temporary files."""
    channel.send("found", str(Path(tempfile.gettempdir(), payload.decode()).exists()).encode())


def variables(payload: bytes, channel: Channel) -> None:
    """Send the environment, as JSON."""
    channel.send("variables", json.dumps(dict(os.environ)).encode())


def connect(payload: bytes, channel: Channel) -> None:
    """Try to reach this port of 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", int(payload)), 2).close()
    except OSError:
        return
    channel.send("connected", b"")


def read(payload: bytes, channel: Channel) -> None:
    """Try to read this file."""
    try:
        channel.send("read", Path(payload.decode()).read_bytes())
    except OSError:
        return


def overwrite(payload: bytes, channel: Channel) -> None:
    """Try to overwrite this file."""
    try:
        Path(payload.decode()).write_text("overwritten")
    except OSError:
        return


def processes(payload: bytes, channel: Channel) -> None:
    """Send the command lines of all processes that can be seen."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            channel.send("process", path.read_bytes())
        except OSError:
            continue  # ended meanwhile


def kill(payload: bytes, channel: Channel) -> None:
    """Try to kill the process of this number."""
    try:
        os.kill(int(payload), signal.SIGKILL)
    except OSError:
        return


def become(payload: bytes, channel: Channel) -> None:
    """Say so, and turn into a process that sleeps, with the payload on its command line: it is seen from outside."""
    channel.send("started", b"")
    os.execv(sys.executable, [sys.executable, "-S", "-c", _SLEEP, payload.decode()])


def leave(payload: bytes, channel: Channel) -> None:
    """Leave such a process behind, in a session of its own."""
    null = subprocess.DEVNULL
    subprocess.Popen(
        [sys.executable, "-S", "-c", _SLEEP, payload.decode()],
        stdin=null,
        stdout=null,
        stderr=null,
        start_new_session=True,
    )


def warm() -> None:
    """A target to preload."""
    global _warm
    _warm = True


def is_warm(payload: bytes, channel: Channel) -> None:
    """Whether `warm` was called in this process, or in the one that it was forked from."""
    channel.send("warm", str(_warm).encode())
