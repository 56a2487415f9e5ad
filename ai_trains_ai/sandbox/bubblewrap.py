"""`BubblewrapSandbox`: a pre-warmed fork server inside bubblewrap, one jailed child per run."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from attrs import asdict

from ai_trains_ai.errors import SandboxError, SandboxUnavailable
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.records import Guarantees, Limits, SandboxOutcome, SandboxResult
from ai_trains_ai.sandbox.bundle import pack_bundle
from ai_trains_ai.sandbox.channel import FrameReader, OutputTail
from ai_trains_ai.sandbox.forkserver import ForkServer

# A run is ended for its output only well past what is kept of it: a chatty script is no attack.
_OUTPUT_FACTOR = 64
_FORK_SECONDS = 60.0
_KILL_SECONDS = 10.0
_CHUNK = 1 << 16
_logger = logging.getLogger(__name__)

_GUARANTEES = Guarantees(
    backend="bubblewrap",
    network=True,
    files=True,
    processes=True,
    notes=(
        "own user, mount, pid, network, ipc and uts namespaces for every run; no capabilities",
        "memory and CPU time of a run with many processes are polled every 0.2 s",
        "shares the host's kernel, with a deny-list of system calls on x86_64 and aarch64",
    ),
)


class BubblewrapSandbox(Sandbox):
    """Runs untrusted code in children of a fork server that bubblewrap walls off.

    The server imports ``preload`` once; a run then costs a fork. Belongs to the event loop that started it; runs may
    overlap, the caller bounds how many. Works as root (the code inside then is uid 65534) and as an ordinary user.

    Args:
        preload: Modules, or ``"module:function"`` to call too, that the server imports before any run.
        python: Interpreter of the server; this package and what it needs must be installed for it.

    Attributes:
        restarts: How often a server died; the next run starts another.
        warnings: What the server found wrong with itself at its start (logged too); empty when all is well.
    """

    guarantees = _GUARANTEES

    def __init__(self, preload: Sequence[str] = (), python: str = sys.executable) -> None:
        self.restarts = 0
        self.warnings = ""
        self._last_words = ""
        self._preload = tuple(preload)
        self._python = python
        self._server: ForkServer | None = None
        self._closed = False
        self._lock = asyncio.Lock()
        self._ids = itertools.count(1)

    async def __aenter__(self) -> BubblewrapSandbox:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def preload(self, *targets: str) -> None:
        self._preload += tuple(target for target in targets if target not in self._preload)

    def another(self, preload: Sequence[str] = ()) -> BubblewrapSandbox:
        return BubblewrapSandbox(preload, self._python)

    async def start(self) -> None:
        self._closed = False
        await self._running_server()

    async def run(
        self,
        target: str,
        payload: bytes,
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits = Limits(),
        on_frame: Callable[[str, bytes], None] | None = None,
    ) -> SandboxResult:
        server = await self._running_server()
        run = _Run(server, next(self._ids), limits, on_frame)
        return await run.result(target, pack_bundle(payload, files or {}))

    async def close(self) -> None:
        self._closed = True
        async with self._lock:
            server, self._server = self._server, None
            if server is not None:
                await server.close()

    async def _running_server(self) -> ForkServer:
        async with self._lock:
            if self._closed:
                raise SandboxError("The sandbox is closed; start it again before the next run.")
            if self._server is not None and not self._server.alive:
                server, self._server = self._server, None
                self.restarts += 1
                await server.close()
                self._last_words = server.last_words()
                _logger.warning("the sandbox's server died (%d so far): %s", self.restarts, self._last_words)
            if self._server is None:
                self._server = await self._new_server()
            return self._server

    async def _new_server(self) -> ForkServer:
        try:
            server = await ForkServer.start(self._python, self._preload)
        except SandboxUnavailable as error:
            if not self.restarts:
                raise
            times = "once" if self.restarts == 1 else f"{self.restarts} times"
            raise SandboxError(
                f"The sandbox's server died {times} and does not start again. {error}\n"
                f"The last that the dead one said: {self._last_words}"
            ) from error
        threads = server.threads
        self.warnings = f"the server has {threads} threads, forking is unsafe" if threads != 1 else ""
        if self.warnings:
            _logger.warning("sandbox: %s; preloaded: %s", self.warnings, ", ".join(self._preload) or "nothing")
        return server


class _Run:
    """One run on the trusted side: reads the child's pipes, enforces the limits, and decides how it ended."""

    def __init__(
        self, server: ForkServer, run_id: int, limits: Limits, on_frame: Callable[[str, bytes], None] | None
    ) -> None:
        self._server = server
        self._id = run_id
        self._limits = limits
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(limits.result_bytes)
        self._output = OutputTail(limits.output_bytes)
        self._frames: list[tuple[str, bytes]] = []
        self._ended: tuple[SandboxOutcome, str] | None = None
        self._error: BaseException | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def result(self, target: str, bundle: bytes) -> SandboxResult:
        started = time.monotonic()
        request = {"id": self._id, "target": target, "limits": asdict(self._limits)}
        pipes = _Pipes(self._loop)
        report: dict[str, Any] | None = None
        try:
            descriptors = [_memory_file(bundle), pipes.open(self._output_came), pipes.open(self._result_came)]
            try:
                done = await self._server.send(request, descriptors)
            finally:
                for fd in descriptors:
                    os.close(fd)
            self._timer = self._loop.call_later(_FORK_SECONDS, self._end, "sandbox_error", "the child did not start")
            report = await self._wait(done)
            await pipes.drained()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            pipes.close()
        if self._error is not None:
            raise self._error
        outcome, code, detail = self._verdict(report)
        return SandboxResult(
            outcome=outcome,
            code=code,
            frames=tuple(self._frames),
            output=self._output.value(),
            wall_seconds=time.monotonic() - started,
            cpu_seconds=report["cpu"] if report and "cpu" in report else 0.0,
            detail=detail,
        )

    async def _wait(self, done: asyncio.Future[dict[str, Any] | None]) -> dict[str, Any] | None:
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            self._end("cancelled", "cancelled by the caller")
            # The child is dead within milliseconds; whoever cancels may rely on that, but not wait for a lost server.
            await asyncio.wait([done], timeout=_KILL_SECONDS)
            raise

    def _output_came(self, data: bytes) -> None:
        self._output.feed(data)
        if self._output.total > _OUTPUT_FACTOR * self._limits.output_bytes:
            self._end("output_limit", f"more than {_OUTPUT_FACTOR * self._limits.output_bytes} bytes of output")

    def _result_came(self, data: bytes) -> None:
        was_ready = self._reader.ready
        frames = self._reader.feed(data)
        if self._reader.ready and not was_ready and self._ended is None:
            assert self._timer is not None
            self._timer.cancel()
            wall = self._limits.wall_seconds
            self._timer = self._loop.call_later(wall, self._end, "timeout", f"more than {wall:g} s")
        for kind, content in frames:
            self._frames.append((kind, content))
            if self._on_frame is not None and self._error is None:
                try:
                    self._on_frame(kind, content)
                except BaseException as error:
                    self._error = error
                    self._end("cancelled", "on_frame raised")
        if self._reader.broken == "result_limit":
            self._end("result_limit", f"more than {self._limits.result_bytes} bytes of frames")
        elif self._reader.broken:
            self._end("signalled", "wrote a malformed frame")

    def _end(self, outcome: SandboxOutcome, detail: str) -> None:
        """Kill the child for this reason; the first reason counts."""
        if self._ended is not None:
            return
        self._ended = (outcome, detail)
        if self._timer is not None:
            self._timer.cancel()
        self._server.kill(self._id)
        # A server that can't kill its child is broken: give it up, so that nobody waits for ever.
        self._timer = self._loop.call_later(_KILL_SECONDS, self._server.abandon)

    def _verdict(self, report: dict[str, Any] | None) -> tuple[SandboxOutcome, int | None, str]:
        if report is None:
            return "sandbox_error", None, f"the sandbox's server died: {self._server.last_words()}"
        if "error" in report:
            return "sandbox_error", None, report["error"]
        code: int = report["code"]
        if self._ended is not None:
            return self._ended[0], code, self._ended[1]
        if not self._reader.ready:
            return (
                "sandbox_error",
                code,
                "the jail could not be built: " + self._output.value()[-500:].decode(errors="replace"),
            )
        if report["over_memory"]:
            return "memory_limit", code, f"more than {self._limits.memory_bytes} bytes of memory"
        if report["over_cpu"] or (code == -9 and report["cpu"] >= self._limits.cpu_seconds - 0.5):
            return "cpu_limit", code, f"more than {self._limits.cpu_seconds} s of CPU"
        if code < 0:
            return "signalled", code, f"signal {-code}"
        return "exited", code, ""


class _Pipes:
    """The pipes of one run, read by the event loop into callbacks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: dict[int, asyncio.Future[None]] = {}

    def open(self, on_data: Callable[[bytes], None]) -> int:
        """A new pipe; returns the end to write."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._open[reader] = self._loop.create_future()
        self._loop.add_reader(reader, self._read, reader, on_data)
        return writer

    async def drained(self) -> None:
        """Wait for the end of every pipe: all writers are dead, so this is what is left in the kernel's buffers."""
        await asyncio.wait(self._open.values(), timeout=2)

    def close(self) -> None:
        for reader in self._open:
            self._loop.remove_reader(reader)
            os.close(reader)
        self._open.clear()

    def _read(self, reader: int, on_data: Callable[[bytes], None]) -> None:
        try:
            data = os.read(reader, _CHUNK)
        except BlockingIOError:
            return
        if data:
            on_data(data)
        else:
            self._loop.remove_reader(reader)
            if not self._open[reader].done():
                self._open[reader].set_result(None)


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("bundle")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


async def detect(python: str = sys.executable) -> Guarantees:
    """Really try this backend in a throw-away server. Raises `SandboxUnavailable` with the reason and the fix."""
    async with BubblewrapSandbox(python=python) as sandbox:
        result = await sandbox.run("ai_trains_ai.sandbox.script:check", b"")
        if (result.outcome, result.code, result.frames) != ("exited", 0, (("isolated", b""),)):
            said = result.output.decode(errors="replace")
            raise SandboxUnavailable(
                f"A trial run in the sandbox failed: {result.outcome}. {result.detail} {said}".strip()
            )
        return sandbox.guarantees
