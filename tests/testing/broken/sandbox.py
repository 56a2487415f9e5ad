"""Sandboxes with one fault each: a plain fork that isolates nothing and says so, written a little worse."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from attrs import evolve

from ai_trains_ai.errors import SandboxError
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.records import Guarantees, Limits, SandboxOutcome, SandboxResult
from ai_trains_ai.sandbox.channel import Channel, FrameReader, OutputTail
from ai_trains_ai.testing import SandboxContract
from ai_trains_ai.testing import probes as probes  # so that no child has to import them

OnFrame = Callable[[str, bytes], None] | None


class Fork(Sandbox):
    """Forks this process. Good enough to keep every promise but the guarantees, which it doesn't give.

    Its limits are in tenths of seconds, so that the whole file is quick.
    """

    guarantees = Guarantees("fork", network=False, files=False, processes=False)

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._closed = False
        self._children: set[int] = set()

    def preload(self, *targets: str) -> None:
        self._preload += targets

    def another(self, preload: Sequence[str] = ()) -> Sandbox:
        return type(self)(preload)

    async def start(self) -> None:
        self._closed = False

    async def run(
        self,
        target: str,
        payload: bytes,
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits = Limits(),
        on_frame: OnFrame = None,
    ) -> SandboxResult:
        self._refuse_when_closed()
        folder = self._new_folder()
        try:
            self._lay(Path(folder), files or {})
            return await self._fork(target, payload, folder, limits, on_frame)
        finally:
            self._remove(folder)

    async def close(self) -> None:
        self._closed = True
        for pid in self._children:
            self._kill(pid)

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise SandboxError("The sandbox is closed.")

    def _lay(self, folder: Path, files: Mapping[str, bytes]) -> None:
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    async def _fork(self, target: str, payload: bytes, folder: str, limits: Limits, on_frame: OnFrame) -> SandboxResult:
        loop, reader, output = asyncio.get_running_loop(), self._reader(limits), self._output(limits)
        frames: list[tuple[str, bytes]] = []
        ended: list[SandboxOutcome] = []

        def end(outcome: SandboxOutcome) -> None:
            ended.append(outcome)
            self._kill(pid)

        def take(data: bytes) -> None:
            for kind, content in reader.feed(data):
                frames.append((kind, content))
                self._show(on_frame, kind, content)
            if reader.broken and not ended:
                end("result_limit")

        pipes = {os.pipe(): take, os.pipe(): output.feed}
        pid = os.fork()
        if pid == 0:
            self._child(target, payload, folder, limits, *(writer for _, writer in pipes))
        self._children.add(pid)
        done = asyncio.Event()
        descriptor = os.pidfd_open(pid)
        loop.add_reader(descriptor, done.set)
        for (source, writer), feed in pipes.items():
            os.close(writer)
            os.set_blocking(source, False)
            loop.add_reader(source, _drain, source, feed, 1)
        timer = loop.call_later(self._wall(limits), end, "timeout")
        try:
            await done.wait()
        finally:
            timer.cancel()
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._children.discard(pid)
            if not done.is_set():
                self._cancelled(pid)
            for (source, _), feed in pipes.items():
                loop.remove_reader(source)
                if done.is_set():
                    _drain(source, feed)
                os.close(source)
        code = os.waitstatus_to_exitcode(_reap(pid))
        return SandboxResult(self._outcome(ended, code), code, tuple(frames), output.value())

    def _child(self, target: str, payload: bytes, folder: str, limits: Limits, frames: int, output: int) -> NoReturn:
        code = 1
        try:
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            faulthandler.disable()  # pytest's would write to a copy of the real stderr
            os.closerange(3, frames)
            os.closerange(frames + 1, 1 << 10)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.chdir(folder)
            self._clear_environment()
            self._limit(limits)
            for preload in self._preload:
                module, _, name = preload.partition(":")
                getattr(importlib.import_module(module), name)()
            channel = Channel(frames)
            channel.ready()
            module, _, name = target.partition(":")
            getattr(importlib.import_module(module), name)(payload, channel)
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    # one method for each thing that is broken below

    def _new_folder(self) -> str:
        return tempfile.mkdtemp()

    def _remove(self, folder: str) -> None:
        shutil.rmtree(folder)

    def _reader(self, limits: Limits) -> FrameReader:
        return FrameReader(limits.result_bytes)

    def _output(self, limits: Limits) -> OutputTail:
        return OutputTail(limits.output_bytes)

    def _show(self, on_frame: OnFrame, kind: str, data: bytes) -> None:
        if on_frame:
            on_frame(kind, data)

    def _wall(self, limits: Limits) -> float:
        return limits.wall_seconds / 10

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)

    def _cancelled(self, pid: int) -> None:
        self._kill(pid)
        os.waitpid(pid, 0)

    def _outcome(self, ended: Sequence[SandboxOutcome], code: int) -> SandboxOutcome:
        if ended:
            return ended[0]
        if code == -signal.SIGPROF:
            return "cpu_limit"
        return "signalled" if code < 0 else "exited"

    def _clear_environment(self) -> None:
        os.environ.clear()

    def _limit(self, limits: Limits) -> None:
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds / 10)
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + limits.memory_bytes,) * 2)


def _reap(pid: int) -> int:
    return os.waitpid(pid, 0)[1]


def _drain(source: int, feed: Callable[[bytes], None], most: int = 1 << 20) -> None:
    """Read what is there, at most so many blocks."""
    for _ in range(most):
        try:
            data = os.read(source, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(source)
            return
        feed(data)


class Contract(SandboxContract):
    patience = 5.0


class TestWhole(Contract):
    fails: set[str] = set()

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Fork()


class Nameless(Fork):
    guarantees = evolve(Fork.guarantees, backend="")


class TestHasNoName(Contract):
    fails = {"test_guarantees_name_the_backend"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Nameless()


class Online(Fork):
    guarantees = evolve(Fork.guarantees, network=True)


class TestClaimsToHaveNoNetwork(Contract):
    fails = {"test_no_connection_leads_out"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Online()


class Open(Fork):
    guarantees = evolve(Fork.guarantees, files=True)


class TestClaimsToHideFiles(Contract):
    fails = {
        "test_files_of_the_host_cant_be_read",
        "test_files_of_the_host_cant_be_written",
        "test_temporary_files_do_not_outlive_a_run",
    }

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Open()


class Loose(Fork):
    guarantees = evolve(Fork.guarantees, processes=True)


class TestClaimsToHoldProcesses(Contract):
    patience = 1.0
    fails = {
        "test_processes_of_the_host_are_out_of_sight",
        "test_processes_of_the_host_cant_be_killed",
        "test_no_process_outlives_a_run",
    }

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Loose()


class Textual(Fork):
    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        return await super().run(target, payload.decode(errors="replace").encode(), **options)


class TestTakesThePayloadForText(Contract):
    fails = {"test_the_payload_arrives_whole"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Textual()


class Sorted(Fork):
    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        result = await super().run(target, payload, **options)
        return evolve(result, frames=tuple(sorted(result.frames)))


class TestSortsItsFrames(Contract):
    fails = {"test_frames_come_back_in_order"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Sorted()


class Deaf(Fork):
    def __init__(self, preload: Sequence[str] = ()) -> None:
        super().__init__(preload)
        self._shown: set[bytes] = set()

    def _show(self, on_frame: OnFrame, kind: str, data: bytes) -> None:
        if data not in self._shown:
            self._shown.add(data)
            super()._show(on_frame, kind, data)


class TestShowsFramesOnceEach(Contract):
    fails = {"test_on_frame_gets_every_frame_in_order"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Deaf()


class Late(Fork):
    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        on_frame = options.pop("on_frame", None)
        result = await super().run(target, payload, **options)
        for frame in result.frames:
            self._show(on_frame, *frame)
        return result


class TestShowsFramesAtTheEnd(Contract):
    patience = 1.0
    fails = {"test_frames_arrive_while_the_run_goes_on"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Late()


class Quiet(Fork):
    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        result = await super().run(target, payload, **options)
        return evolve(result, output=result.output.replace(b"e", b""))


class TestKeepsStderrToItself(Contract):
    fails = {"test_what_is_printed_comes_back"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Quiet()


class Checking(Fork):
    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        result = await super().run(target, payload, **options)
        if result.outcome == "exited" and result.code:
            raise SandboxError(f"exit code {result.code}")
        return result


class TestRaisesOnANonZeroExit(Contract):
    fails = {
        "test_an_exit_code_is_an_outcome",
        "test_an_exception_is_an_exit_with_another_code",
        "test_memory_is_capped",
    }

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Checking()


class Swallowing(Fork):
    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        result = await super().run(target, payload, **options)
        return evolve(result, code=0) if result.code == 1 else result


class TestTakesAnExceptionForAReturn(Contract):
    fails = {"test_an_exception_is_an_exit_with_another_code"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Swallowing()


class Shell(Fork):
    def _outcome(self, ended: Sequence[SandboxOutcome], code: int) -> SandboxOutcome:
        outcome = super()._outcome(ended, code)
        return "exited" if outcome == "signalled" else outcome


class TestCountsSignalsAsExitCodes(Contract):
    fails = {"test_a_crash_is_an_outcome"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Shell()


class Vague(Fork):
    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        result = await super().run(target, payload, **options)
        return evolve(result, code=None) if result.code == 0 else result


class TestSaysDoneForExited(Contract):
    fails = {"test_a_return_is_an_exit_with_code_0"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Vague()


class Patient(Fork):
    def _wall(self, limits: Limits) -> float:
        return 60.0


class TestHasNoWallLimit(Contract):
    patience = 1.0
    fails = {"test_the_wall_limit_ends_a_run"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Patient()


class Busy(Fork):
    def _limit(self, limits: Limits) -> None:
        super()._limit(limits)
        signal.setitimer(signal.ITIMER_PROF, 0)


class TestHasNoCpuLimit(Contract):
    patience = 1.0
    fails = {"test_the_cpu_limit_ends_a_run"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Busy()


class Roomy(Fork):
    def _limit(self, limits: Limits) -> None:
        super()._limit(evolve(limits, memory_bytes=8 << 30))


class TestHasNoMemoryLimit(Contract):
    fails = {"test_memory_is_capped"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Roomy()


class Chatty(Fork):
    def _output(self, limits: Limits) -> OutputTail:
        return OutputTail(1 << 30)


class TestKeepsAllOutput(Contract):
    fails = {"test_output_is_capped"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Chatty()


class Hoarding(Fork):
    def _reader(self, limits: Limits) -> FrameReader:
        return FrameReader(1 << 30)


class TestKeepsAllFrames(Contract):
    fails = {"test_frames_are_capped"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Hoarding()


class Shallow(Fork):
    def _lay(self, folder: Path, files: Mapping[str, bytes]) -> None:
        super()._lay(folder, {Path(path).name: data for path, data in files.items()})


class TestLaysFilesWithoutTheirFolders(Contract):
    fails = {"test_files_arrive"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Shallow()


class Merging(Fork):
    async def _fork(self, target: str, payload: bytes, folder: str, limits: Limits, on_frame: OnFrame) -> SandboxResult:
        result = await super()._fork(target, payload, folder, limits, on_frame)
        self._merge(Path(folder))
        return result

    def _merge(self, folder: Path) -> None:
        self._files |= {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def _lay(self, folder: Path, files: Mapping[str, bytes]) -> None:
        super()._lay(folder, files)
        self._files = files if isinstance(files, dict) else {}


class TestPutsWhatARunWroteIntoItsArguments(Contract):
    fails = {"test_the_files_passed_in_are_left_as_they_are"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Merging()


class Shared(Fork):
    def __init__(self, preload: Sequence[str] = ()) -> None:
        super().__init__(preload)
        self._folder = tempfile.TemporaryDirectory()

    def _new_folder(self) -> str:
        return self._folder.name

    def _remove(self, folder: str) -> None:
        pass


class TestHasOneWorkingFolder(Contract):
    fails = {
        "test_a_working_folder_has_nothing_of_an_earlier_run",
        "test_runs_at_the_same_time_do_not_mix",
    }

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Shared()


class Single(Fork):
    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        self._receiver = options.pop("on_frame", None)
        return await super().run(target, payload, on_frame=lambda *frame: self._show(self._receiver, *frame), **options)


class TestHasOneReceiver(Contract):
    fails = {"test_runs_at_the_same_time_do_not_mix"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Single()


class Inheriting(Fork):
    def _clear_environment(self) -> None:
        os.environ.pop("AWS_SECRET_ACCESS_KEY", None)


class TestPassesTheEnvironmentOn(Contract):
    fails = {"test_variables_of_this_process_are_not_visible"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Inheriting()


class Lenient(Fork):
    def _cancelled(self, pid: int) -> None:
        pass


class TestLeavesACancelledChild(Contract):
    patience = 1.0
    fails = {"test_cancelling_kills_the_child"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Lenient()


class Sweeping(Fork):
    def _cancelled(self, pid: int) -> None:
        super()._cancelled(pid)
        for other in self._children:
            self._kill(other)


class TestCancelsAllAtOnce(Contract):
    fails = {"test_cancelling_leaves_other_runs_alone"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Sweeping()


class Same(Fork):
    def another(self, preload: Sequence[str] = ()) -> Sandbox:
        self._preload += tuple(preload)
        return self


class TestGivesItselfForAnother(Contract):
    fails = {"test_another_is_separate"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Same()


class Forgetting(Fork):
    def another(self, preload: Sequence[str] = ()) -> Sandbox:
        return type(self)()


class TestForgetsWhatAnotherPreloads(Contract):
    fails = {"test_another_preloads_what_it_is_told"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Forgetting()


class Cold(Fork):
    def preload(self, *targets: str) -> None:
        pass


class TestPreloadsNothing(Contract):
    fails = {"test_a_target_is_preloaded"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Cold()


class Restarting(Fork):
    async def start(self) -> None:
        await self.close()
        await super().start()


class TestEndsRunsWhenItIsStartedAgain(Contract):
    fails = {"test_starting_again_changes_nothing"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Restarting()


class Once(Fork):
    async def close(self) -> None:
        self._refuse_when_closed()
        await super().close()


class TestCanBeClosedOnce(Contract):
    fails = {"test_close_may_be_repeated"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Once()


class Begun(Fork):
    async def start(self) -> None:
        await super().start()
        self._started = time.monotonic()

    async def close(self) -> None:
        self.lived = time.monotonic() - self._started
        await super().close()


class TestCanBeClosedOnceStarted(Contract):
    fails = {"test_a_sandbox_that_never_started_can_be_closed"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Begun()


class Abandoning(Fork):
    async def close(self) -> None:
        self._closed = True


class TestLeavesItsChildrenAtTheEnd(Contract):
    patience = 1.0
    fails = {"test_close_kills_every_child"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Abandoning()


class Eternal(Fork):
    def _refuse_when_closed(self) -> None:
        pass


class TestRunsOnAfterItsEnd(Contract):
    fails = {"test_a_closed_sandbox_runs_nothing"}

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        return Eternal()
