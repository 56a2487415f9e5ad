"""The job protocol, on this machine and over SSH: submitted once, never falsely ended, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import stat
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.sshd import Server

from ai_trains_ai.errors import ConfigurationError, Fenced, TransportError, UntrustedDataError
from ai_trains_ai.providers.local import LocalTransport
from ai_trains_ai.transport.jobs import HostJob, HostJobs
from ai_trains_ai.transport.ssh import SSHTransport


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[HostJobs]:
    found = HostJobs(LocalTransport(), str(tmp_path / "host"))
    await found.prepare()
    yield found
    await found.disarm()
    await found.wipe()


async def until(jobs: HostJobs, job_id: str, holds: Callable[[HostJob], bool], seconds: float = 20.0) -> HostJob:
    deadline = time.monotonic() + seconds
    while True:
        state = await jobs.poll(job_id)
        if holds(state):
            return state
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.05)


def living(group: int) -> list[int]:
    """Processes of a group; those that are dead and not yet reaped don't count."""
    found = []
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat_file.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                found.append(int(stat_file.parent.name))
    return found


def ended(state: HostJob) -> bool:
    return state.status == "ended"


async def test_a_job_from_submit_to_result(jobs: HostJobs) -> None:
    files = {"data/in.txt": b"41\n", "run.sh": b"read n < data/in.txt; echo $((n + 1)) > out/answer\n"}
    assert (await jobs.poll("job-1")).status == "absent"
    assert await jobs.submit("job-1", files, "mkdir out; echo working; sh run.sh; exit 3")
    state = await until(jobs, "job-1", ended)
    assert (state.exit, state.log) == (3, b"working\n")
    assert await jobs.result("job-1", 1 << 20) == {"answer": b"42\n"}
    with pytest.raises(TransportError, match="larger than 10 bytes"):
        await jobs.result("job-1", 10)


async def test_a_repeated_submit_starts_nothing(jobs: HostJobs, tmp_path: Path) -> None:
    count = f"echo x >> {tmp_path}/count; sleep 0.3"
    started = await asyncio.gather(*(jobs.submit("job", {}, count) for _ in range(5)))
    assert sorted(started) == [False, False, False, False, True]
    await until(jobs, "job", ended)
    assert not await jobs.submit("job", {}, count)
    assert (tmp_path / "count").read_text() == "x\n"
    assert not list((tmp_path / "host").glob("stage-*"))


async def test_a_submit_that_broke_between_publishing_and_starting_is_mended_by_the_next(
    jobs: HostJobs, tmp_path: Path
) -> None:
    await jobs.submit("other", {}, "true")
    folder = tmp_path / "host/jobs/job"
    folder.mkdir()
    (folder / "files").mkdir()
    (folder / "job.sh").write_bytes((tmp_path / "host/job.sh").read_bytes())
    (folder / "command").write_text("echo mended")
    assert await jobs.submit("job", {}, "echo again")
    assert (await until(jobs, "job", ended)).log == b"mended\n"


async def test_the_log_by_offset_loses_and_repeats_nothing(jobs: HostJobs) -> None:
    await jobs.submit("job", {}, "for i in 1 2 3 4 5; do echo line $i; sleep 0.1; done")
    read = b""
    while True:
        state = await jobs.poll("job", len(read), 7)
        read += state.log
        if state.status == "ended" and not state.log:
            break
    assert read == b"".join(b"line %d\n" % n for n in range(1, 6))


async def test_a_job_that_is_killed_from_outside_is_lost_and_never_ended(jobs: HostJobs, tmp_path: Path) -> None:
    await jobs.submit("job", {}, "sleep 60")
    await until(jobs, "job", lambda state: state.status == "running")
    wrapper, group = map(int, (tmp_path / "host/jobs/job/pid").read_text().split())
    os.kill(wrapper, 9)
    state = await until(jobs, "job", lambda state: state.status != "running")
    assert (state.status, state.exit) == ("lost", None)
    os.killpg(group, 9)


async def test_a_job_that_is_looked_at_while_it_starts_is_not_lost(jobs: HostJobs, tmp_path: Path) -> None:
    folder = tmp_path / "host/jobs/early"
    (folder / "started").mkdir(parents=True)
    os.mkfifo(folder / "pid")  # whoever reads it waits: the look is in the middle of its way
    looking = asyncio.ensure_future(jobs.poll("early"))
    writer = await asyncio.to_thread(os.open, folder / "pid", os.O_WRONLY)
    (folder / "hb").write_text(f"{time.time():.0f}\n")  # the job came so far meanwhile
    os.close(writer)
    assert (await looking).status == "starting"


async def test_a_program_that_is_killed_has_the_status_of_its_signal(jobs: HostJobs) -> None:
    await jobs.submit("job", {}, "kill -9 $$")
    assert (await until(jobs, "job", ended)).exit == 137


async def test_cancel_ends_everything_that_a_job_started(jobs: HostJobs, tmp_path: Path) -> None:
    deaf = "trap '' TERM; sleep 61 & sleep 61 & echo ready; while :; do sleep 61; done"
    await jobs.submit("job", {}, deaf)
    await until(jobs, "job", lambda state: state.log == b"ready\n" and state.status == "running")
    _, group = map(int, (tmp_path / "host/jobs/job/pid").read_text().split())
    await jobs.cancel("job", grace=1)
    state = await until(jobs, "job", ended)
    assert state.exit == 137
    assert not living(group)
    await jobs.cancel("job", grace=0)
    await jobs.cancel("never-submitted")
    assert await jobs.poll("job") == state


async def test_a_job_that_is_cancelled_at_its_start_does_not_go_on(jobs: HostJobs, tmp_path: Path) -> None:
    for number in range(10):
        await jobs.submit(f"job-{number}", {}, f"sleep 1; touch {tmp_path}/went-on-{number}")
        await jobs.cancel(f"job-{number}", grace=1)
        state = await until(jobs, f"job-{number}", ended)
        assert state.exit in (137, 143)
    await asyncio.sleep(1.5)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("went-on")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a job as somebody else")
async def test_a_job_of_another_user_can_not_read_the_dead_mans_key(jobs: HostJobs, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    await jobs.arm(3600, "key=secret-of-the-pod")
    command = f"id -un; cat number; mkdir out; cp number out; cat {tmp_path}/host/deadman.command /proc/1/environ"
    await jobs.submit("job", {"number": b"7\n"}, command, user="nobody")
    state = await until(jobs, "job", ended)
    assert state.log.startswith(b"nobody\n7\n")
    assert b"secret" not in state.log
    assert state.log.count(b"Permission denied") == 2
    assert await jobs.result("job", 1 << 16) == {"number": b"7\n"}


async def test_large_files_are_sent_once_and_a_job_has_its_own_copy(jobs: HostJobs, tmp_path: Path) -> None:
    sent: list[int] = []
    kept = jobs._transport.put

    async def put(files: Any, folder: str) -> None:
        sent.append(sum(map(len, files.values())))
        await kept(files, folder)

    jobs._transport.put = put  # type: ignore[method-assign]
    model = os.urandom(200_000)
    for name in ("one", "two"):
        command = "sha256sum <deep/model; echo spoiled >deep/model; cat small"
        assert await jobs.submit(name, {"deep/model": model, "small": b"s\n"}, command)
        assert (await until(jobs, name, ended)).log == f"{hashlib.sha256(model).hexdigest()}  -\ns\n".encode()
    assert sum(sent) < 250_000


async def test_a_large_file_that_was_changed_on_the_host_is_not_used(jobs: HostJobs, tmp_path: Path) -> None:
    model = os.urandom(100_000)
    await jobs.submit("one", {"model": model}, "true")
    (tmp_path / "host/blobs" / hashlib.sha256(model).hexdigest()).write_bytes(b"spoiled")
    with pytest.raises(TransportError, match="a file changed on the host"):
        await jobs.submit("two", {"model": model}, "true")
    assert await jobs.submit("two", {"model": model}, "true")  # it is sent anew


async def test_an_older_controller_is_shut_out(tmp_path: Path) -> None:
    older, newer = (HostJobs(LocalTransport(), str(tmp_path / "host"), epoch) for epoch in (7, 8))
    await older.prepare()
    await older.submit("job", {}, "sleep 60")
    await newer.prepare()
    assert (await newer.poll("job")).status in ("starting", "running")
    for call in (older.poll("job"), older.cancel("job"), older.wipe(), older.beat(), older.submit("more", {}, "true")):
        with pytest.raises(Fenced, match="took the machine over"):
            await call
    assert (await newer.poll("more")).status == "absent"
    await newer.wipe()


async def test_what_a_job_leaves_behind_ends_with_it(jobs: HostJobs, tmp_path: Path) -> None:
    await jobs.submit("job", {}, "sleep 62 & sleep 62 & echo $$")
    group = int((await until(jobs, "job", ended)).log)
    assert not living(group)


async def test_a_wiped_host_knows_nothing(jobs: HostJobs, tmp_path: Path) -> None:
    await jobs.submit("running", {"secret.txt": b"s"}, "sleep 63")
    await jobs.submit("done", {}, "true")
    await until(jobs, "done", ended)
    await until(jobs, "running", lambda state: state.status == "running")
    _, group = map(int, (tmp_path / "host/jobs/running/pid").read_text().split())
    await jobs.wipe()
    await jobs.wipe()
    assert (await jobs.poll("running")).status == (await jobs.poll("done")).status == "absent"
    assert not list((tmp_path / "host").rglob("secret.txt"))
    assert not living(group)
    assert await jobs.submit("running", {}, "true")


@pytest.mark.parametrize("job_id", ["", "../x", "a b", "-x", "a/b", "x" * 200, ".hidden"])
async def test_a_job_id_that_is_no_name(jobs: HostJobs, job_id: str) -> None:
    with pytest.raises(ConfigurationError, match="can't name a job"):
        await jobs.submit(job_id, {}, "true")


async def test_a_result_that_a_job_forged(jobs: HostJobs, tmp_path: Path) -> None:
    await jobs.submit("job", {}, "mkdir out; ln -s /etc/passwd out/link")
    await until(jobs, "job", ended)
    with pytest.raises(UntrustedDataError, match="out/link"):
        await jobs.result("job", 1 << 20)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("out/../../up"))
    (tmp_path / "host/jobs/job/result.tar").write_bytes(archive.getvalue())
    with pytest.raises(UntrustedDataError, match="no plain file"):
        await jobs.result("job", 1 << 20)
    (tmp_path / "host/jobs/job/result.tar").write_bytes(b"x" * 600)
    with pytest.raises(UntrustedDataError, match="no archive"):
        await jobs.result("job", 1 << 20)


# ------------------------------------------------------------------------------------------ the dead-man switch


async def test_without_a_controller_the_host_ends_its_jobs_and_itself(jobs: HostJobs, tmp_path: Path) -> None:
    await jobs.submit("job", {}, "sleep 64")
    await until(jobs, "job", lambda state: state.status == "running")
    await jobs.arm(2, f"echo gone > {tmp_path}/gone")
    command = tmp_path / "host/deadman.command"
    assert stat.S_IMODE(command.stat().st_mode) == 0o600
    deadline = time.monotonic() + 20
    while not (tmp_path / "gone").exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert (await jobs.poll("job")).status == "absent"


async def test_a_controller_that_polls_keeps_the_host(jobs: HostJobs, tmp_path: Path) -> None:
    await jobs.arm(2, f"echo gone > {tmp_path}/gone")
    for _ in range(8):
        await jobs.poll("none")
        await asyncio.sleep(0.5)
    await jobs.disarm()
    await asyncio.sleep(3.5)
    assert not (tmp_path / "gone").exists()


# ------------------------------------------------------------------------------------------ over SSH


async def test_a_job_outlives_the_connection_and_the_controller(
    server: Server, shell: SSHTransport, tmp_path: Path
) -> None:
    jobs = HostJobs(shell, str(tmp_path / "host"))
    await jobs.prepare()
    assert await jobs.submit(
        "job", {"x": b"1"}, "for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done; mkdir out; cp x out"
    )
    await until(jobs, "job", lambda state: state.status == "running")
    server.stop()  # its sessions die; the job has a session of its own
    server.start()
    assert not await jobs.submit("job", {"x": b"1"}, "true")
    again = SSHTransport(server.host)
    taken_over = HostJobs(again, str(tmp_path / "host"))
    state = await until(taken_over, "job", ended)
    assert (state.exit, state.log) == (0, b"1\n2\n3\n4\n5\n6\n")
    assert await taken_over.result("job", 1 << 20) == {"x": b"1"}
    await taken_over.wipe()
    await again.close()
