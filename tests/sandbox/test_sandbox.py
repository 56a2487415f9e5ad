"""What this sandbox promises to its caller beyond the contract: scripts, restarts, no leaks."""
# ruff: noqa: E501 - scripts as text

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from attrs import evolve

from ai_trains_ai.errors import SandboxError, SandboxUnavailable
from ai_trains_ai.records import Limits, SandboxResult
from ai_trains_ai.sandbox import BubblewrapSandbox, detect, wall
from ai_trains_ai.sandbox.channel import Channel, FrameReader, OutputTail
from ai_trains_ai.sandbox.forkserver import ForkServer
from ai_trains_ai.sandbox.script import changed_files

from .conftest import SCRIPT, SMALL, descendants, living, server_pid

CHECK = "ai_trains_ai.sandbox.script:check"
REPOSITORY = Path(wall.__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "script",
    [
        "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 5\nassert asyncio.run(f()) == 5",
        "import threading\nt = threading.Thread(target=print, args=('x',)); t.start(); t.join()",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        "import subprocess\nassert subprocess.run(['/bin/echo', 'hi'], capture_output=True).stdout == b'hi\\n'",
        "import subprocess, sys\nassert subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout == b'1\\n'",
        "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x')\ntempfile.mkdtemp()",
        "import os, shutil\nopen('a', 'w').write('x'); os.chmod('a', 0o755); shutil.copy('a', 'b'); os.mkdir('s'); shutil.move('b', 's/c')",
        "import helper\nassert helper.VALUE == 7",
        "import sys\nassert sys.argv == ['m.py'] and __name__ == '__main__' and sys.stdin.read() == ''",
        "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: assert p.map(abs, [-1]) == [1]",
        "import random, uuid, hashlib, json, re, math, decimal, datetime, sqlite3\nsqlite3.connect('x.db').execute('create table t (a)')",
        "raise SystemExit",
    ],
)
async def test_ordinary_code_works(script, run):
    result = await run(script, files={"helper.py": b"VALUE = 7"})
    assert (result.outcome, result.code) == ("exited", 0), result.output.decode()


async def test_output_and_exit_code_come_back(run):
    result = await run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nraise SystemExit(3)")
    assert (result.outcome, result.code, result.output) == ("exited", 3, b"out\nerr\n")


async def test_a_traceback_starts_in_the_script(run):
    result = await run("def f():\n    return 1 / 0\nf()")
    assert result.code == 1
    assert result.output.startswith(b'Traceback (most recent call last):\n  File "m.py", line 3')
    assert b"ZeroDivisionError" in result.output


async def test_changed_files_come_back_and_unchanged_ones_do_not(run):
    script = "import os\nos.makedirs('out')\nopen('out/new.txt', 'w').write('new')\nopen('old.txt', 'a').write('+')"
    result = await run(script, files={"old.txt": b"old", "same.txt": b"same"})
    assert changed_files(result) == {"out/new.txt": b"new", "old.txt": b"old+"}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"{}\n",
        b'{"path": "x"}',
        b'{"path": 3}\n',
        b'["path"]\n',
        b'"path"\n',
        b"3\n",
        b"\xff\n",
        b'{"path": "\\ud800"}\n',
        b'{"path": ' + b"[" * 900 + b"\n",
        b"[" * 200_000 + b"\n",
        b"9" * 900 + b"\n",
        b'{"path": "%s"}\nx' % (b"x" * 5000),
        b'{"path": "big"}\n' + bytes((256 << 10) + 1),
    ],
)
def test_a_hostile_file_frame_is_passed_over(frame):
    frames = (("file", frame), ("other", b'{"path": "o"}\n'), ("file", b'{"path": "good"}\ntext'))
    assert changed_files(SandboxResult("exited", 0, frames)) == {"good": b"text"}


def test_no_more_files_are_taken_than_a_run_sends():
    frames = tuple(("file", b'{"path": "%d"}\n' % n) for n in range(500))
    assert len(changed_files(SandboxResult("exited", 0, frames))) == 100


async def test_long_output_keeps_its_beginning_and_end(run):
    result = await run("print('first'); print('x' * 9000); print('last')", evolve(SMALL, output_bytes=1000))
    assert result.outcome == "exited"
    assert result.output.startswith(b"first")
    assert result.output.endswith(b"last\n")
    assert b"bytes left out" in result.output
    assert len(result.output) < 1100


async def test_what_on_frame_raises_ends_the_run_and_reaches_the_caller(sandbox):
    script = "from ai_trains_ai.sandbox.channel import Channel\nimport time\nChannel(3).send('x', b'')\ntime.sleep(30)"

    def refuse(kind, data):
        raise LookupError(kind)

    with pytest.raises(LookupError):
        await sandbox.run(SCRIPT, b'{"path": "m.py"}', files={"m.py": script.encode()}, on_frame=refuse)


async def test_an_unknown_target_is_an_exit_with_a_traceback(sandbox):
    result = await sandbox.run("ai_trains_ai.nowhere:run", b"")
    assert (result.outcome, result.code) == ("exited", 1)
    assert b"ModuleNotFoundError" in result.output


async def test_a_cancelled_run_is_dead_when_the_cancel_arrives(sandbox, run):
    before = len(descendants(server_pid(sandbox)))
    task = asyncio.create_task(run("import os, time\nos.fork()\ntime.sleep(60)"))
    await asyncio.sleep(0.3)
    assert len(descendants(server_pid(sandbox))) == before + 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(descendants(server_pid(sandbox))) == before


async def test_a_dead_server_is_infrastructure_and_starts_again():
    async with BubblewrapSandbox() as box:
        run = asyncio.create_task(box.run(SCRIPT, b'{"path": "m.py"}', files={"m.py": b"import time; time.sleep(60)"}))
        await asyncio.sleep(0.3)
        inside = descendants(server_pid(box))
        os.kill(server_pid(box), 9)
        assert (await run).outcome == "sandbox_error"
        assert (await box.run(CHECK, b"")).outcome == "exited"
        assert box.restarts == 1
        assert not any(map(living, inside))


async def kill_server(box):
    os.kill(server_pid(box), 9)
    for _ in range(500):
        if not box._server.alive:
            return
        await asyncio.sleep(0.01)


async def test_a_server_that_stays_dead_says_how_often_and_its_last_words(monkeypatch):
    async with BubblewrapSandbox() as box:
        for deaths in (1, 2):
            os.pwrite(box._server._log.fileno(), b"noise\nSegmentation fault", 0)
            await kill_server(box)
            if deaths == 1:
                assert (await box.run(CHECK, b"")).outcome == "exited"
        monkeypatch.setattr(wall, "find_bwrap", lambda: "/bin/false")
        for _ in range(2):
            with pytest.raises(SandboxError, match=r"died 2 times and does not start again(.|\n)*Segmentation fault"):
                await box.run(CHECK, b"")
        monkeypatch.undo()
        assert (await box.run(CHECK, b"")).outcome == "exited"
        assert box.restarts == 2


async def test_a_run_whose_server_dies_tells_what_the_server_said():
    async with BubblewrapSandbox() as box:
        run = asyncio.create_task(box.run(SCRIPT, b'{"path": "m.py"}', files={"m.py": b"import time; time.sleep(60)"}))
        await asyncio.sleep(0.3)
        os.pwrite(box._server._log.fileno(), b"out of luck", 0)
        os.kill(server_pid(box), 9)
        assert (await run).detail == "the sandbox's server died: out of luck"


async def test_a_server_that_is_unsafe_to_fork_is_logged(caplog, monkeypatch):
    async with BubblewrapSandbox(preload=("fractions",)) as box:
        assert (box.warnings, caplog.text) == ("", "")
        real = ForkServer.start

        async def threaded(*arguments):
            server = await real(*arguments)
            server.threads = 3
            return server

        monkeypatch.setattr(ForkServer, "start", threaded)
        await kill_server(box)
        await box.start()
        assert "the server has 3 threads, forking is unsafe; preloaded: fractions" in caplog.text
        assert "died (1 so far)" in caplog.text


async def test_close_kills_everything_and_may_be_repeated():
    box = BubblewrapSandbox()
    await box.start()
    await box.start()
    run = asyncio.create_task(box.run(SCRIPT, b'{"path": "m.py"}', files={"m.py": b"import time; time.sleep(60)"}))
    await asyncio.sleep(0.3)
    inside = [server_pid(box), *descendants(server_pid(box))]
    await box.close()
    await box.close()
    assert (await run).outcome == "sandbox_error"
    assert not any(map(living, inside))
    with pytest.raises(SandboxError, match="closed"):
        await box.run(CHECK, b"")


async def test_two_hundred_runs_leak_no_descriptor_and_no_zombie(sandbox):
    async def one():
        script = b"import os\nif os.fork() == 0:\n    os.setsid()\n    os.execv('/bin/sleep', ['sleep', '60'])"
        return await sandbox.run(SCRIPT, b'{"path": "m.py"}', files={"m.py": script}, limits=SMALL)

    await one()
    before = len(os.listdir("/proc/self/fd")), len(descendants(server_pid(sandbox)))
    server = descendants(server_pid(sandbox))[-1]
    server_before = len(os.listdir(f"/proc/{server}/fd"))
    for _ in range(25):
        results = await asyncio.gather(*(one() for _ in range(8)))
        assert {result.outcome for result in results} == {"exited"}
    assert (len(os.listdir("/proc/self/fd")), len(descendants(server_pid(sandbox)))) == before
    assert len(os.listdir(f"/proc/{server}/fd")) == server_before


async def test_an_empty_run_is_fast(sandbox):
    times = []
    for _ in range(10):
        started = time.perf_counter()
        await sandbox.run(CHECK, b"")
        times.append(time.perf_counter() - started)
    assert min(times) < 0.05  # the others share their cores with whatever else runs here


def test_it_works_from_a_loop_of_another_thread():
    outcomes = []

    async def use():
        async with BubblewrapSandbox() as box:
            outcomes.append((await box.run(CHECK, b"")).outcome)

    thread = threading.Thread(target=lambda: asyncio.run(use()))
    thread.start()
    thread.join()
    assert outcomes == ["exited"]


async def test_a_preloaded_module_is_there_before_the_run():
    async with BubblewrapSandbox(preload=("fractions",)) as box:
        script = b"import sys; print('fractions' in sys.modules)"
        result = await box.run(SCRIPT, b'{"path": "m.py"}', files={"m.py": script})
    assert result.output == b"True\n"


async def test_a_broken_preload_names_its_reason():
    with pytest.raises(SandboxUnavailable, match="No module named 'no_such_module'"):
        await BubblewrapSandbox(preload=("no_such_module",)).start()


async def test_a_second_instance_is_separate(sandbox):
    other = sandbox.another(preload=("decimal",))
    other.preload("fractions", "decimal")
    assert other._preload == ("decimal", "fractions")
    assert other._server is None


async def test_detect_really_tries():
    guarantees = await detect()
    assert (guarantees.network, guarantees.files, guarantees.processes) == (True, True, True)
    assert "bubblewrap" in guarantees.text()


def _script(body):
    return textwrap.dedent(
        """
        import asyncio
        from ai_trains_ai.sandbox import BubblewrapSandbox
        async def main():
            async with BubblewrapSandbox() as box:
                result = await box.run("ai_trains_ai.sandbox.script:run", b'{"path": "m.py"}', files={"m.py": BODY})
                print(result.outcome, result.code, result.output)
        asyncio.run(main())
        """
    ).replace("BODY", repr(body.encode()))


def test_a_script_without_a_main_guard_works(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_script("print(6 * 7)"))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    answer = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)
    assert answer.stdout == "exited 0 b'42\\n'\n", answer.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="the tests run as an ordinary user already")
def test_it_works_as_an_ordinary_user(tmp_path):
    """As uid 65534 with an interpreter that this user can read (AI_TRAINS_AI_USER_PYTHON: with attrs installed)."""
    python = os.environ.get("AI_TRAINS_AI_USER_PYTHON", sys.executable)
    user = {"user": 65534, "group": 65534, "extra_groups": (), "cwd": "/", "capture_output": True, "text": True}
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    try:
        probe = subprocess.run([python, "-c", "import attrs, ai_trains_ai.records"], env=environment, **user)
    except PermissionError:
        pytest.skip(f"uid 65534 may not run {python}")
    if probe.returncode:
        pytest.skip(f"uid 65534 can't use {python}: {probe.stderr[-200:]}")
    body = "import os\nprint(os.getuid(), os.path.exists('/etc/shadow'), os.access('/dev', os.W_OK))"
    answer = subprocess.run([python, "-c", _script(body)], env=environment, timeout=60, **user)
    assert answer.stdout == "exited 0 b'65534 False False\\n'\n", answer.stderr


@pytest.mark.parametrize(
    ("report", "fix"),
    [
        ("bwrap: setting up uid map: Permission denied", "apparmor_restrict_unprivileged_userns"),
        ("bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", "apparmor_restrict_unprivileged_userns"),
        ("bwrap: No permissions to create new namespace", "seccomp=unconfined"),
        ("OSError: unshare(0x30020000): Operation not permitted", "--privileged"),
    ],
)
def test_a_failure_names_its_fix(report, fix):
    assert fix in wall.explain(report)
    assert report in wall.explain(report)


def test_a_missing_bubblewrap_names_the_package(monkeypatch):
    monkeypatch.setattr(wall.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wall.shutil, "which", lambda name: None)
    with pytest.raises(SandboxUnavailable, match=r"ai-trains-ai\[embedded\]"):
        wall.find_bwrap()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_is_refused_with_a_way_out(monkeypatch, platform):
    monkeypatch.setattr(wall.sys, "platform", platform)
    with pytest.raises(SandboxUnavailable, match="WSL"):
        wall.find_bwrap()


async def test_a_bubblewrap_that_fails_is_explained(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(wall, "find_bwrap", lambda: str(fake))
    with pytest.raises(SandboxUnavailable, match="Ubuntu"):
        await BubblewrapSandbox().start()


def test_the_environment_inside_has_nothing_of_the_host():
    host = {"OPENBLAS_CORETYPE": "Haswell", "AWS_SECRET": "x", "PATH": "/secret", "HOME": "/home/me"}
    inside = wall.environment("/opt/python/bin/python", host)
    assert inside["OPENBLAS_CORETYPE"] == "Haswell"
    assert not {"x", "/secret", "/home/me"} & set(inside.values())


def test_a_frame_survives_any_split():
    reader, writer = os.pipe()
    channel = Channel(writer)
    channel.ready()
    channel.send("a", b"1")
    channel.send("b.c-d_e", b"")
    data = os.read(reader, 1000)
    frames = FrameReader(1000)
    assert [f for byte in data for f in frames.feed(bytes([byte]))] == [("a", b"1"), ("b.c-d_e", b"")]
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("kind", ["", "x" * 33, "a b", "ä"])
def test_a_bad_frame_kind_is_refused(kind):
    with pytest.raises(ValueError):
        Channel(0).send(kind, b"")


@pytest.mark.parametrize("n", [0, 1, 9, 10, 11, 25, 1000])
def test_an_output_tail_keeps_short_output_whole_and_long_output_short(n):
    tail = OutputTail(10)
    for index in range(n):
        tail.feed(b"%d" % (index % 10))
    value = tail.value()
    assert tail.total == n
    assert (len(value) == n) if n <= 10 else (b"left out" in value)


def test_limits_have_a_default_for_every_cap():
    assert Limits().wall_seconds > 0
