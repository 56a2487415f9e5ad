"""The controller's handle of one fork server: its process, its control socket, and who waits for which run."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ai_trains_ai.errors import SandboxUnavailable
from ai_trains_ai.sandbox import wall

START_SECONDS = 180.0
_CLOSE_SECONDS = 2.0
_LAST_BYTES = 600
_MAX_MESSAGE = 1 << 16
# -X utf8 and -B because -I makes the interpreter ignore the variables of the same meaning.
_FLAGS = ("-I", "-B", "-X", "utf8", "-c")
_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys; sys.path.count({path!r}) or sys.path.insert(0, {path!r}); "
    "from ai_trains_ai.sandbox.server import main; main()"
)


class ForkServer:
    """One server process. Belongs to the event loop that started it.

    Attributes:
        threads: Threads of the server after its preload; more than one makes forking unsafe.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, log: Any) -> None:
        self.threads = 0
        self._process = process
        self._control = control
        self._log = log
        self._last_words = ""
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        self._alive = True
        self._loop.add_reader(control.fileno(), self._receive)

    @classmethod
    async def start(cls, python: str, preload: Sequence[str]) -> ForkServer:
        """Start a server and wait until its preload is done. Raises `SandboxUnavailable`."""
        bwrap = wall.find_bwrap()
        trees = await asyncio.to_thread(wall.interpreter_trees, python)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        passwd, watch, status = _memory_file(wall.PASSWD), *os.pipe()
        boot = _BOOT.format(path=_ROOT)
        config = {"preload": list(preload), "binds": trees, "watch": watch}
        arguments = wall.bwrap_arguments(trees, wall.environment(python, os.environ), passwd, status)
        command = [bwrap, *arguments, "--", python, *_FLAGS, boot, str(theirs.fileno()), json.dumps(config)]
        try:
            # On this thread: the kernel ties "die with parent" to the thread that forks, and pool threads end early.
            process = subprocess.Popen(  # noqa: ASYNC220 - milliseconds
                command,
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), passwd, watch, status),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            log.close()
            raise SandboxUnavailable(f"{bwrap} does not start: {error}") from error
        finally:
            theirs.close()
            for fd in (passwd, watch, status):
                os.close(fd)
        server = cls(process, ours, log)
        try:
            await asyncio.wait_for(asyncio.shield(server._started), START_SECONDS)
        except TimeoutError:
            await server.close()
            raise SandboxUnavailable(
                f"The sandbox's server was not ready after {START_SECONDS:.0f} s. It said: {server.last_words()}"
            ) from None
        except BaseException:
            server._started.cancel()  # nobody waits for it any more
            await server.close()
            raise
        return server

    @property
    def alive(self) -> bool:
        """Whether runs can be sent."""
        return self._alive

    async def send(self, request: dict[str, Any], descriptors: Sequence[int]) -> asyncio.Future[dict[str, Any] | None]:
        """Send a run. The future gives the server's report, or ``None`` when the server died."""
        done: asyncio.Future[dict[str, Any] | None] = self._loop.create_future()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self._waiting[request["id"]] = done
        try:
            while self._alive:
                try:
                    self._control.sendmsg([json.dumps(request).encode()], rights)
                    return done
                except BlockingIOError:
                    await asyncio.sleep(0.005)
                except OSError:
                    break
        except asyncio.CancelledError:
            del self._waiting[request["id"]]
            raise
        self._lost()
        return done

    def kill(self, run_id: int) -> None:
        """Kill one run; its report still comes."""
        if not self._alive:
            return
        try:
            self._control.send(json.dumps({"kill": run_id}).encode())
        except BlockingIOError:
            self._loop.call_later(0.01, self.kill, run_id)
        except OSError:
            self._lost()

    def abandon(self) -> None:
        """Give up a server that doesn't do what it is told; every run in it ends."""
        self._process.kill()
        self._lost()

    async def close(self) -> None:
        """Kill the server and everything in it. Idempotent."""
        self._lost()
        await asyncio.to_thread(self._end_process)
        self._last_words = self.last_words()
        self._log.close()

    def last_words(self) -> str:
        """The end of what the server and bubblewrap wrote to stderr; nothing in there comes from untrusted code."""
        if self._log.closed:
            return self._last_words
        # The server writes through the same open file: its offset must stay where it is.
        size = os.fstat(self._log.fileno()).st_size
        said = os.pread(self._log.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES))
        return said.decode(errors="replace").strip() or "nothing"

    def _end_process(self) -> None:
        # The end of its control socket ends a server in good order; a kill is for one that hangs.
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> None:
        try:
            data = self._control.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        message = json.loads(data)
        if "id" in message:
            if (done := self._waiting.pop(message["id"], None)) is not None and not done.done():
                done.set_result(message)
        elif not self._started.done():
            self.threads = message.get("threads", 0)
            self._finish_start(message.get("failed"))

    def _finish_start(self, failure: str | None) -> None:
        if failure is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(SandboxUnavailable(wall.explain(failure)))

    def _lost(self) -> None:
        if not self._alive:
            return
        self._alive = False
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        if not self._started.done():
            self._log.seek(0)
            self._finish_start(self._log.read().decode(errors="replace"))
        waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            if not done.done():
                done.set_result(None)


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("passwd")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
