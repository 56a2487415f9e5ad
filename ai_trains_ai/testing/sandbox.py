"""What every sandbox promises, tried by code inside (`ai_trains_ai.testing.probes`) and looked at from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from ai_trains_ai.errors import SandboxError
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.records import Guarantees, Limits, SandboxResult
from ai_trains_ai.testing.expect import no_error, raises

T = TypeVar("T")

PROBES = "ai_trains_ai.testing.probes"


class SandboxContract:
    """Subclass it and give a sandbox, started or not. It stays yours: the tests start it, and close only others.

    >>> class TestMySandbox(SandboxContract):
    ...     @pytest_asyncio.fixture
    ...     async def sandbox(self):
    ...         sandbox = MySandbox()
    ...         yield sandbox
    ...         await sandbox.close()

    One that is slow to start may be shared by all tests; give the fixture ``scope="session", loop_scope="session"``
    and set pytest's option ``asyncio_default_test_loop_scope = "session"``.

    A guarantee is tested where it is given: what ``guarantees`` denies is skipped. The package must be importable in
    the sandbox, and processes be seen in this machine's /proc where tests look for them.

    Class attributes:
        patience: Seconds after which something that doesn't end counts as hanging.
    """

    patience: float = 60.0

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        raise NotImplementedError("override the fixture 'sandbox' and return your Sandbox")

    @pytest_asyncio.fixture
    async def other(self, sandbox: Sandbox) -> AsyncIterator[Sandbox]:
        """One that a test may close."""
        other = sandbox.another()
        yield other
        with contextlib.suppress(Exception):  # that it may be repeated is said by a test of its own
            await other.close()

    @pytest.fixture
    def marker(self) -> Iterator[str]:
        """A word that a process carries on its command line, so that it is found; none is left in the end."""
        marker = f"probe-{uuid.uuid4().hex}"
        yield marker
        for pid in _carrying(marker):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    @pytest.fixture
    def bystander(self, marker: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the host that has nothing to do with the sandbox."""
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)", marker]
        with subprocess.Popen(command) as process:
            yield process
            process.kill()

    def test_guarantees_name_the_backend(self, sandbox: Sandbox) -> None:
        assert isinstance(sandbox.guarantees, Guarantees), "guarantees is an ai_trains_ai.records.Guarantees"
        assert sandbox.guarantees.backend, "Guarantees.backend is the name that is shown and stored with a run"

    # -------------------------------------------------------------------------------------- what comes out

    @pytest.mark.asyncio
    async def test_a_return_is_an_exit_with_code_0(self, sandbox: Sandbox) -> None:
        result = await self._run(sandbox, "echo")
        assert (result.outcome, result.code) == ("exited", 0), result.output.decode(errors="replace")

    @pytest.mark.asyncio
    async def test_the_payload_arrives_whole(self, sandbox: Sandbox) -> None:
        for payload in (b"", bytes(range(256)), b"\x00\n" * 500_000):
            result = await self._run(sandbox, "echo", payload)
            whole = result.frames == (("echo", payload),)  # apart: in CI pytest would write out the difference
            assert whole, f"{len(payload)} bytes go in and come out as they were"

    @pytest.mark.asyncio
    async def test_frames_come_back_in_order(self, sandbox: Sandbox) -> None:
        result = await self._run(sandbox, "count", b"300")
        kinds = [kind for kind, _ in result.frames]
        assert kinds == [f"frame-{number}" for number in range(300)], "result.frames are all frames, in order"

    @pytest.mark.asyncio
    async def test_on_frame_gets_every_frame_in_order(self, sandbox: Sandbox) -> None:
        seen: list[tuple[str, bytes]] = []
        await self._run(sandbox, "count", b"300", on_frame=lambda kind, data: seen.append((kind, data)))
        expected = [(f"frame-{number}", b"x" * 1_000) for number in range(300)]
        same = seen == expected
        assert same, f"on_frame(kind, data) gets the frames that result.frames has, in order; it got {len(seen)}"

    @pytest.mark.asyncio
    async def test_frames_arrive_while_the_run_goes_on(self, sandbox: Sandbox, marker: str) -> None:
        await sandbox.start()
        started = asyncio.Event()
        limits = Limits(wall_seconds=600)
        run = asyncio.create_task(
            sandbox.run(f"{PROBES}:become", marker.encode(), limits=limits, on_frame=lambda kind, data: started.set())
        )
        try:
            await self._soon(started.wait(), "on_frame is called when the frame arrives, not at the end of the run")
        finally:
            await _cancel(run)

    @pytest.mark.asyncio
    async def test_what_is_printed_comes_back(self, sandbox: Sandbox) -> None:
        result = await self._run(sandbox, "talk", b"9")
        lines = sorted(result.output.split())
        assert lines == [b"e" * 9, b"o" * 9], "result.output holds both streams, stdout and stderr"

    # -------------------------------------------------------------------------------------- how it ends

    @pytest.mark.asyncio
    async def test_an_exit_code_is_an_outcome(self, sandbox: Sandbox) -> None:
        result = await self._run(sandbox, "stop", b"3")
        assert (result.outcome, result.code) == ("exited", 3), "a non-zero exit is an outcome, with its code"

    @pytest.mark.asyncio
    async def test_an_exception_is_an_exit_with_another_code(self, sandbox: Sandbox) -> None:
        result = await self._run(sandbox, "fail")
        assert (result.outcome, bool(result.code)) == ("exited", True), "an exception inside is an outcome, not 0"

    @pytest.mark.asyncio
    async def test_a_crash_is_an_outcome(self, sandbox: Sandbox) -> None:
        result = await self._run(sandbox, "crash")
        assert result.outcome == "signalled", "a segmentation fault inside is an outcome of its own"

    @pytest.mark.asyncio
    async def test_the_wall_limit_ends_a_run(self, sandbox: Sandbox) -> None:
        result = await self._run(sandbox, "sleep", b"60", limits=Limits(wall_seconds=0.3))
        assert result.outcome == "timeout", "Limits.wall_seconds ends a run that sleeps"

    @pytest.mark.asyncio
    async def test_the_cpu_limit_ends_a_run(self, sandbox: Sandbox) -> None:
        result = await self._run(sandbox, "spin", limits=Limits(cpu_seconds=1, wall_seconds=600))
        assert result.outcome == "cpu_limit", "Limits.cpu_seconds ends a run that computes"

    @pytest.mark.asyncio
    async def test_memory_is_capped(self, sandbox: Sandbox) -> None:
        limits = Limits(memory_bytes=128 << 20, wall_seconds=100.0)  # no other limit may be what ends it
        result = await self._run(sandbox, "allocate", b"%d" % (256 << 20), limits=limits)
        assert not result.frames, "a run gets no more than Limits.memory_bytes; it fails, or ends as memory_limit"

    @pytest.mark.asyncio
    async def test_output_is_capped(self, sandbox: Sandbox) -> None:
        result = await self._run(sandbox, "talk", b"100000", limits=Limits(output_bytes=4_096))
        assert 0 < len(result.output) < 4_096 + 500, "result.output keeps about Limits.output_bytes of what is printed"

    @pytest.mark.asyncio
    async def test_frames_are_capped(self, sandbox: Sandbox) -> None:
        result = await self._run(sandbox, "count", b"100", limits=Limits(result_bytes=10_000))
        assert result.outcome == "result_limit", "Limits.result_bytes ends a run that sends more"
        assert sum(len(data) for _, data in result.frames) <= 10_000, "and no more than that is kept"

    # -------------------------------------------------------------------------------------- its working folder

    @pytest.mark.asyncio
    async def test_files_arrive(self, sandbox: Sandbox) -> None:
        files = {"job.toml": b"steps = 3\n", "deep/er/data.bin": bytes(range(256)), "empty": b""}
        result = await self._run(sandbox, "files", files=files)
        assert _files(result) == files, "the working folder holds the files that were passed in, as they are"

    @pytest.mark.asyncio
    async def test_the_files_passed_in_are_left_as_they_are(self, sandbox: Sandbox) -> None:
        files = {"job.toml": b"steps = 3\n"}
        await self._run(sandbox, "litter", b"job.toml-2", files=files)
        assert files == {"job.toml": b"steps = 3\n"}, "the mapping is the caller's: what a run writes isn't put there"

    @pytest.mark.asyncio
    async def test_a_working_folder_has_nothing_of_an_earlier_run(self, sandbox: Sandbox, marker: str) -> None:
        with _removed(Path(tempfile.gettempdir(), marker)):
            await self._run(sandbox, "litter", marker.encode())
            result = await self._run(sandbox, "files")
        assert _files(result) == {}, "every run has a working folder of its own"

    @pytest.mark.asyncio
    async def test_runs_at_the_same_time_do_not_mix(self, sandbox: Sandbox) -> None:
        async def one(number: int) -> tuple[list[str], dict[str, bytes]]:
            seen: list[str] = []
            files = {f"{number}-{part}": b"%d" % number for part in range(20)}
            options: dict[str, Any] = {"files": files, "on_frame": lambda kind, data: seen.append(data.decode())}
            return seen, _files(await self._run(sandbox, "files", restart=False, **options))

        await sandbox.start()
        results = await asyncio.gather(*(one(number) for number in range(6)))
        for number, (seen, found) in enumerate(results):
            expected = {f"{number}-{part}": b"%d" % number for part in range(20)}
            assert found == expected, "each of several runs has its own files and frames"
            assert [_decoded(data) for data in seen] == [expected], "each on_frame gets the frames of its own run"

    @pytest.mark.asyncio
    async def test_variables_of_this_process_are_not_visible(
        self, other: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PROBE_API_KEY", "probe-secret")
        result = await self._run(other, "variables")
        assert _sent(result, "variables"), "the run came to its end"
        said = str(result.frames)
        assert "PROBE_API_KEY" not in said, "keys stand in the environment: give the child a new, empty one"
        assert "probe-secret" not in said

    # -------------------------------------------------------------------------------------- what it guarantees

    @pytest.mark.asyncio
    async def test_no_connection_leads_out(self, sandbox: Sandbox) -> None:
        _needs(sandbox.guarantees.network, "network")
        with socket.create_server(("127.0.0.1", 0)) as server:
            result = await self._run(sandbox, "connect", b"%d" % server.getsockname()[1])
        assert not _sent(result, "connected"), "guarantees.network: a run reached a server on this machine"

    @pytest.mark.asyncio
    async def test_files_of_the_host_cant_be_read(self, sandbox: Sandbox, tmp_path: Path) -> None:
        _needs(sandbox.guarantees.files, "files")
        with contextlib.ExitStack() as stack:
            folders = [tmp_path]
            with contextlib.suppress(OSError):  # no home, or none to write to
                folders.append(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.home()))))
            for folder in folders:
                secret = folder / "secret"
                secret.write_text("secret")
                result = await self._run(sandbox, "read", str(secret).encode())
                assert not _sent(result, "read"), f"guarantees.files: a run read {secret} of this machine"

    @pytest.mark.asyncio
    async def test_files_of_the_host_cant_be_written(self, sandbox: Sandbox, tmp_path: Path) -> None:
        _needs(sandbox.guarantees.files, "files")
        precious = tmp_path / "precious"
        precious.write_text("precious")
        await self._run(sandbox, "overwrite", str(precious).encode())
        assert precious.read_text() == "precious", f"guarantees.files: a run wrote {precious} of this machine"

    @pytest.mark.asyncio
    async def test_temporary_files_do_not_outlive_a_run(self, sandbox: Sandbox, marker: str) -> None:
        _needs(sandbox.guarantees.files, "files")
        with _removed(Path(tempfile.gettempdir(), marker)):
            await self._run(sandbox, "litter", marker.encode())
            result = await self._run(sandbox, "temporary", marker.encode())
        assert _sent(result, "found") == [b"False"], "guarantees.files: a run found a file of an earlier one"

    @pytest.mark.asyncio
    async def test_processes_of_the_host_are_out_of_sight(
        self, sandbox: Sandbox, bystander: subprocess.Popen[bytes], marker: str
    ) -> None:
        _needs(sandbox.guarantees.processes, "processes")
        result = await self._run(sandbox, "processes")
        seen = [line for line in _sent(result, "process") if marker.encode() in line]
        assert not seen, "guarantees.processes: a run saw the command line of another process"

    @pytest.mark.asyncio
    async def test_processes_of_the_host_cant_be_killed(
        self, sandbox: Sandbox, bystander: subprocess.Popen[bytes]
    ) -> None:
        _needs(sandbox.guarantees.processes, "processes")
        await self._run(sandbox, "kill", b"%d" % bystander.pid)
        await asyncio.sleep(0.2)  # dying takes a moment
        assert bystander.poll() is None, "guarantees.processes: a run killed another process"

    @pytest.mark.asyncio
    async def test_no_process_outlives_a_run(self, sandbox: Sandbox, marker: str) -> None:
        _needs(sandbox.guarantees.processes, "processes")
        await self._run(sandbox, "leave", marker.encode())
        await self._gone(marker, "guarantees.processes: a process that a run had started went on after it")

    # -------------------------------------------------------------------------------------- cancelling

    @pytest.mark.asyncio
    async def test_cancelling_kills_the_child(self, sandbox: Sandbox, marker: str) -> None:
        await sandbox.start()
        await _cancel(await self._sleeper(sandbox, marker))
        await self._gone(marker, "when the awaiting task is cancelled, the child is killed")

    @pytest.mark.asyncio
    async def test_cancelling_leaves_other_runs_alone(self, sandbox: Sandbox, marker: str) -> None:
        await sandbox.start()
        run = await self._sleeper(sandbox, marker)
        lasting = asyncio.create_task(self._run(sandbox, "sleep", b"0.2", restart=False))
        await asyncio.sleep(0.1)
        await _cancel(run)
        assert (await lasting).outcome == "exited", "cancelling one run ended another"

    # -------------------------------------------------------------------------------------- starting and closing

    @pytest.mark.asyncio
    async def test_another_is_separate(self, sandbox: Sandbox) -> None:
        other = sandbox.another()
        assert (await self._run(other, "echo", b"1")).frames == (("echo", b"1"),), "another() gives one that runs"
        await other.close()
        with no_error("closing the sandbox that another() gave ended the first as well"):
            assert (await self._run(sandbox, "echo", b"2", restart=False)).frames == (("echo", b"2"),)

    @pytest.mark.asyncio
    async def test_another_preloads_what_it_is_told(self, sandbox: Sandbox) -> None:
        async with contextlib.AsyncExitStack() as stack:
            other = sandbox.another((f"{PROBES}:warm",))
            stack.push_async_callback(other.close)
            result = await self._run(other, "is_warm")
        assert _sent(result, "warm") == [b"True"], "another(preload): the function was not called before the run"

    @pytest.mark.asyncio
    async def test_a_target_is_preloaded(self, other: Sandbox) -> None:
        other.preload(f"{PROBES}:warm")
        result = await self._run(other, "is_warm")
        assert _sent(result, "warm") == [b"True"], "preload(): the function was not called before the run"

    @pytest.mark.asyncio
    async def test_starting_again_changes_nothing(self, other: Sandbox) -> None:
        await other.start()
        run = asyncio.create_task(self._run(other, "sleep", b"0.2", restart=False))
        await asyncio.sleep(0.1)
        await other.start()
        assert (await run).outcome == "exited", "start() is idempotent: a run goes on while it is called again"

    @pytest.mark.asyncio
    async def test_close_may_be_repeated(self, other: Sandbox) -> None:
        await self._run(other, "echo")
        await other.close()
        with no_error("close() is idempotent"):
            await other.close()

    @pytest.mark.asyncio
    async def test_a_sandbox_that_never_started_can_be_closed(self, sandbox: Sandbox) -> None:
        with no_error("close() is also called when start() failed"):
            await sandbox.another().close()

    @pytest.mark.asyncio
    async def test_close_kills_every_child(self, other: Sandbox, marker: str) -> None:
        await other.start()
        run = await self._sleeper(other, marker)
        await self._soon(other.close(), "close() kills what runs, and doesn't wait for it")
        await self._gone(marker, "close() kills every child")
        with contextlib.suppress(SandboxError):
            await self._soon(run, "a run that close() ended comes back, as sandbox_error or with SandboxError")

    @pytest.mark.asyncio
    async def test_a_closed_sandbox_runs_nothing(self, other: Sandbox) -> None:
        await self._run(other, "echo")
        await other.close()
        with raises(SandboxError, "a run in a closed sandbox is refused, not started"):
            await self._run(other, "echo", restart=False)

    # -------------------------------------------------------------------------------------- helpers

    async def _run(
        self, sandbox: Sandbox, probe: str, payload: bytes = b"", *, restart: bool = True, **options: Any
    ) -> SandboxResult:
        if restart:
            await self._soon(sandbox.start(), "start() ends")
        run = sandbox.run(f"{PROBES}:{probe}", payload, **options)
        return await self._soon(run, f"run() ends, when its child ends or at a limit ({probe})")

    async def _sleeper(self, sandbox: Sandbox, marker: str) -> asyncio.Task[SandboxResult]:
        """A run that sleeps, and is seen from here."""
        limits = Limits(wall_seconds=600)
        run = asyncio.create_task(sandbox.run(f"{PROBES}:become", marker.encode(), limits=limits))
        for _ in range(500):
            if _carrying(marker):
                return run
            await asyncio.sleep(0.01)
        await _cancel(run)
        pytest.skip("processes of the sandbox are not seen in /proc of this machine")

    async def _gone(self, marker: str, sentence: str) -> None:
        """Wait until no process carries the marker; killing takes a moment."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(self.patience, 10.0)
        while _carrying(marker):
            if loop.time() > deadline:
                pytest.fail(sentence)
            await asyncio.sleep(0.01)

    async def _soon(self, what: Awaitable[T], sentence: str) -> T:
        try:
            return await asyncio.wait_for(what, self.patience)
        except TimeoutError:
            pytest.fail(f"{sentence}; nothing came for {self.patience:g} s")


def _needs(given: bool, name: str) -> None:
    if not given:
        pytest.skip(f"guarantees.{name} is False")


async def _cancel(run: asyncio.Task[SandboxResult]) -> None:
    run.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await run


def _sent(result: SandboxResult, kind: str) -> list[bytes]:
    return [data for name, data in result.frames if name == kind]


def _files(result: SandboxResult) -> dict[str, bytes]:
    sent = _sent(result, "files")
    assert len(sent) == 1, f"one frame was sent, {len(sent)} came back: {result}"
    return _decoded(sent[0].decode())


def _decoded(text: str) -> dict[str, bytes]:
    return {path: content.encode("latin-1") for path, content in json.loads(text).items()}


def _carrying(marker: str) -> list[int]:
    """Living processes with this word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def _removed(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
