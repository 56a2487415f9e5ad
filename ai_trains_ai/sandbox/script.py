"""The target of the agent's ``run_python`` tool: runs a workspace file as ``__main__`` and sends changed files."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import threading
import traceback

from ai_trains_ai.records import SandboxResult
from ai_trains_ai.sandbox.channel import Channel

_MAX_FILE_BYTES = 256 << 10
_MAX_FILES = 100
_MAX_HEADER = 1 << 10


def run(payload: bytes, channel: Channel) -> None:
    """Run the file that ``payload`` (JSON ``{"path": …, "argv": […]}``) names; frames of kind "file" follow.

    A frame is one line of JSON (``{"path": …}``) and then the bytes. Only regular files that are new or changed, and
    small, are sent; links are not followed.
    """
    request = json.loads(payload)
    before = _scan()
    sys.argv = [request["path"], *request.get("argv", ())]
    sys.path.insert(0, os.getcwd())
    code: object = 0
    try:
        runpy.run_path(request["path"], run_name="__main__")
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException as error:
        _print_error(error)
        code = 1
    _send_changed(before, channel)
    raise SystemExit(code)


def check(payload: bytes, channel: Channel) -> None:
    """Self-test of the jail: send "isolated" when no interface leads out and nothing of the host can be written."""
    try:
        names = [name for _, name in socket.if_nameindex() if name != "lo"]
    except OSError:
        names = []  # not even a socket
    writable = [path for path in ("/", "/usr", "/dev", "/etc") if os.access(path, os.W_OK)]
    if names or writable or os.getpid() != 1:
        raise SystemExit(f"not isolated: interfaces {names}, writable {writable}, pid {os.getpid()}")
    channel.send("isolated", b"")


def changed_files(result: SandboxResult) -> dict[str, bytes]:
    """The files that a `run` sent back. Untrusted: names and sizes are `Workspace.merge`'s to check."""
    files: dict[str, bytes] = {}
    for kind, data in result.frames:
        end = data.find(b"\n", 0, _MAX_HEADER)
        if kind != "file" or end < 0 or len(data) - end - 1 > _MAX_FILE_BYTES:
            continue
        try:
            path = json.loads(data[:end])["path"]
            path.encode()  # JSON can name half of a character, which no file or answer can be written with
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        files[path] = data[end + 1 :]
        if len(files) == _MAX_FILES:
            break  # `run` sends no more
    return files


def _print_error(error: BaseException) -> None:
    """The traceback from the script's own first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _scan() -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for folder, _, names in os.walk("."):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), ".")
            status = os.lstat(path)
            found[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return found


def _send_changed(before: dict[str, tuple[int, int, int]], channel: Channel) -> None:
    changed = sorted(path for path, mark in _scan().items() if before.get(path) != mark)
    for path in changed[:_MAX_FILES]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        with os.fdopen(fd, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) <= _MAX_FILE_BYTES:
            channel.send("file", json.dumps({"path": path}).encode() + b"\n" + data)
