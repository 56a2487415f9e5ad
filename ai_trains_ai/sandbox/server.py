"""The fork server: the trusted process inside the outer wall that forks one jailed child per run.

Started by `ForkServer` as ``bwrap … python -I -c … CONTROL_FD CONFIG``. It becomes an ordinary user in a user
namespace of its own, imports the preload list once, and then answers requests on its control socket (SEQPACKET, one
JSON object a message). Untrusted code never runs in this process.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

from ai_trains_ai.sandbox import jail, kernel
from ai_trains_ai.sandbox.account import CpuAccount

NOBODY = 65534
_MAX_MESSAGE = 1 << 16
_POLL_SECONDS = 0.2
# A single process is ended by RLIMIT_CPU at the limit; the sum of several may pass it by this much.
_CPU_SLACK_SECONDS = 0.25


def main() -> NoReturn:
    """Entry point. Arguments: descriptor of the control socket, config as JSON."""
    control = socket.socket(fileno=int(sys.argv[1]))
    config = json.loads(sys.argv[2])
    try:
        _enter_namespaces(control, config["watch"])
        _preload(config["preload"])
        server = _Server(control, config["binds"])
    except BaseException:
        control.send(json.dumps({"failed": traceback.format_exc(limit=-3)[-4000:]}).encode())
        os._exit(1)
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": True, "threads": len(os.listdir("/proc/self/task"))}).encode())
    server.serve()


def _enter_namespaces(control: socket.socket, watch: int) -> None:
    """Become an ordinary user with full rights over new namespaces only, as pid 1 of a new pid namespace."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kernel.set_dumpable()
    uid, gid = os.getuid(), os.getgid()
    proc_self = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC)
    kernel.map_ids(proc_self, uid, gid)
    os.close(proc_self)
    if pid := os.fork():
        control.close()
        _end_with(pid, watch)
    os.close(watch)


def _end_with(pid: int, watch: int) -> NoReturn:
    """Stay as pid 1 of the outer wall until the server or bubblewrap outside is gone; the namespace dies with us.

    ``watch`` is the other end of bubblewrap's status pipe. Its "die with parent" alone isn't enough: started by root,
    bubblewrap gives up the right to signal the user that this process has become.
    """
    server = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(server, select.POLLIN)
    poll.register(watch, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == server or not os.read(watch, _MAX_MESSAGE):
                os._exit(0)


def _preload(names: list[str]) -> None:
    for name in ("asyncio", "random", "runpy", "tempfile", "threading", "encodings.idna", *names):
        module, _, function = name.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()


class _Run:
    """One forked child."""

    def __init__(self, run_id: int, pid: int, memory_bytes: int, cpu_seconds: float) -> None:
        self.id = run_id
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.memory_bytes = memory_bytes
        self.over_memory = False
        self._cpu = CpuAccount()
        self._most_cpu = cpu_seconds + _CPU_SLACK_SECONDS

    def kill(self) -> None:
        """Pid 1 of its namespace: everything that it started dies with it."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def check(self) -> None:
        """RLIMIT_DATA and RLIMIT_CPU bound each process of a run; this bounds their sums."""
        pids = _processes(self.pidfd)
        if self._cpu.look(pids) > self._most_cpu:
            self.kill()
        # Pages shared with this server count as resident, so the cheap sum is an upper bound.
        if sum(map(_resident_bytes, pids)) > self.memory_bytes < sum(map(_private_bytes, pids)):
            self.over_memory = True
            self.kill()

    def report(self, status: int, seconds: float) -> dict[str, Any]:
        """How it ended, from what wait4 said of its first process."""
        cpu = self._cpu.close(seconds)
        report = {"id": self.id, "code": os.waitstatus_to_exitcode(status), "cpu": cpu}
        return {**report, "over_cpu": cpu > self._most_cpu, "over_memory": self.over_memory}


class _Server:
    def __init__(self, control: socket.socket, binds: list[str]) -> None:
        self._control = control
        self._binds = binds
        self._runs: dict[int, _Run] = {}
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> NoReturn:
        """Answer until the controller is gone; the namespace then dies with this process."""
        next_check = 0.0
        while True:
            events = self._poll.poll(_POLL_SECONDS * 1000 if self._runs else None)
            for fd, _ in events:
                if fd == self._control.fileno():
                    self._receive()
                else:
                    self._reap(self._runs.pop(fd))
            if self._runs and time.monotonic() >= next_check:
                next_check = time.monotonic() + _POLL_SECONDS
                for run in self._runs.values():
                    run.check()

    def _receive(self) -> None:
        data, descriptors = self._recvmsg()
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "kill" in request:
            for run in self._runs.values():
                if run.id == request["kill"]:
                    run.kill()
            return
        try:
            self._fork(request, *descriptors)
        except OSError as error:
            self._send({"id": request["id"], "error": f"fork: {error}"})
        finally:
            for fd in descriptors:
                os.close(fd)

    def _recvmsg(self) -> tuple[bytes, list[int]]:
        data, ancillary, _, _ = self._control.recvmsg(_MAX_MESSAGE, socket.CMSG_SPACE(4 * 8))
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        return data, list(descriptors)

    def _fork(self, request: dict[str, Any], bundle: int, output: int, result: int) -> None:
        # One fork is enough for a child that is pid 1: enter a new pid namespace for children, fork, step back.
        kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = os.fork()
            if pid == 0:
                jail.run_child(request, bundle, output, result, self._binds)
        finally:
            kernel.setns(self._own_pids, kernel.CLONE_NEWPID)
        limits = request["limits"]
        run = _Run(request["id"], pid, limits["memory_bytes"], limits["cpu_seconds"])
        self._runs[run.pidfd] = run
        self._poll.register(run.pidfd, select.POLLIN)

    def _reap(self, run: _Run) -> None:
        self._poll.unregister(run.pidfd)
        _, status, usage = os.wait4(run.pid, 0)
        os.close(run.pidfd)
        self._send(run.report(status, usage.ru_utime + usage.ru_stime))

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())


def _processes(pidfd: int) -> list[str]:
    """Pids of a run, as /proc of the outer wall numbers them: its pid 1 and everything below (orphans go to pid 1)."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        pending = [line.split()[1] for line in info if line.startswith("Pid:")]
    found: list[str] = []
    while pending:
        found.append(pending.pop())
        try:
            for thread in os.listdir(f"/proc/{found[-1]}/task"):
                with open(f"/proc/{found[-1]}/task/{thread}/children") as children:
                    pending += children.read().split()
        except OSError:
            continue  # ended meanwhile
    return found


def _resident_bytes(pid: str) -> int:
    """Resident anonymous memory; pages that are shared with the server since the fork included."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            words = statm.read().split()
    except OSError:
        return 0
    return (int(words[1]) - int(words[2])) * resource.getpagesize()


def _private_bytes(pid: str) -> int:
    """Memory that this process alone has written. Walks the page tables: milliseconds for a big process."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Private_Dirty:"))
    except OSError:
        return 0
