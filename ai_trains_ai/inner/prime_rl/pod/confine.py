"""The wall around the env server, the one process on the pod that runs an agent's code.

It may listen on one port, connect to another, and use sockets among its own processes; it has another user than the
engine, no privileges, a scrubbed environment and bounded resources. What of that a host allows is found out by doing
it in throw-away children, and recorded with the job.

Networks, the strongest first. "namespace": one of its own, in which our relay is the only way out. "ports": Landlock
admits few TCP ports, and seccomp no other kind of socket. "calls": seccomp alone. "none": as it is.

A small launcher (this module, run as a program) confines itself and becomes the program: nothing of Python runs between
a fork and an exec.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from ai_trains_ai.inner.prime_rl.pod.process import alive, signal_all, tree
from ai_trains_ai.inner.prime_rl.pod.relay import listen, serve_forever
from ai_trains_ai.inner.prime_rl.pod.surroundings import free_port
from ai_trains_ai.sandbox import kernel, seccomp

MODULE = "ai_trains_ai.inner.prime_rl.pod.confine"
LIBRARY = Path(__file__).resolve().parents[4]  # what has the package in it
NETWORKS = ("namespace", "ports", "calls", "none")
SAID = {
    "namespace": "a network of its own",
    "ports": "TCP to the engine's port and to high ports alone, of other machines too; no UDP",
    "calls": "TCP to anywhere; no UDP",
    "none": "the network of the pod",
}
PRIVATE = {"/tmp": 2 << 30, "/dev/shm": 1 << 30}
"""Folders that are empty and its own inside, and their largest size in bytes."""
FAILED = 125  # exit status of a launcher that can't confine itself
PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class Wall:
    """What a host allows. ``uid`` 0 is the user of the engine; ``notes`` say why something is missing."""

    uid: int
    network: str
    private_files: bool
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """One sentence for the job's record."""
        user = f"user {self.uid}" if self.uid else "the engine's user"
        files = "its own /tmp" if self.private_files else "the pod's /tmp"
        notes = f" ({'; '.join(self.notes)})" if self.notes else ""
        return f"env server: {user}, {SAID[self.network]}, {files}{notes}"


@dataclass(frozen=True)
class Limits:
    """Of each process of the env server; the processes together are counted by user. Of memory see `memory_of`."""

    open_files: int = 32_000
    processes: int = 512
    file_bytes: int = 2 << 30


class Confined:
    """A program behind the wall."""

    def __init__(self, popen: subprocess.Popen[bytes], relay: subprocess.Popen[bytes] | None, uid: int) -> None:
        self._popen, self._relay, self._uid = popen, relay, uid
        self.pid = popen.pid

    def poll(self) -> int | None:
        """Its exit status; a signal is negative."""
        return self._popen.poll()

    def kill(self, seconds: float = 20.0) -> None:
        """End every process of it, those too that left its tree, and wait until none is left."""
        family = set(tree(self.pid))
        until = time.monotonic() + seconds
        while True:
            family |= set(tree(self.pid))
            left = [pid for pid in {*family, *_of_user(self._uid)} if alive(pid)]
            if not left or time.monotonic() > until:
                break
            signal_all(left, signal.SIGKILL)
            time.sleep(0.01)
        for process in (self._popen, self._relay):
            if process is not None:
                process.kill()
                process.wait()


def memory_of(pids: Iterable[int]) -> int:
    """Resident bytes of processes; those that are gone count nothing."""
    pages = 0
    for member in pids:
        with contextlib.suppress(OSError, ValueError):
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def start(
    wall: Wall,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    log: Path,
    visible: Sequence[str],
    listen_port: int,
    connect_port: int,
    limits: Limits = Limits(),
) -> Confined:
    """Start a program behind the wall.

    Args:
        wall: what `probe` found.
        argv, env, cwd: the program; it sees no other variable.
        log: what it prints is added there.
        visible: folders that must be there inside, also below a private one.
        listen_port: on the loopback, reachable from outside.
        connect_port: of the loopback outside, reachable from inside.
        limits: of its resources.
    """
    order = {
        "wall": asdict(wall),
        "argv": list(argv),
        "env": dict(env),
        "cwd": str(cwd),
        "visible": list(visible),
        "listen": listen_port,
        "connect": connect_port,
        "limits": asdict(limits),
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    relay: subprocess.Popen[bytes] | None = None
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab"))
        given: list[int] = []
        if wall.network == "namespace":
            inside, outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            stack.enter_context(inside)
            stack.enter_context(outside)
            server = stack.enter_context(listen(listen_port))
            order["relay"] = inside.fileno()
            given = [inside.fileno()]
            relay = _popen(
                {"relay": [server.fileno(), outside.fileno(), connect_port]},
                [server.fileno(), outside.fileno()],
                output.fileno(),
            )
        return Confined(_popen(order, given, output.fileno()), relay, wall.uid)


def _popen(order: Mapping[str, Any], given: Sequence[int], output: int) -> subprocess.Popen[bytes]:
    """A launcher with an order. Its own few variables are not those of the program that it becomes."""
    with tempfile.TemporaryFile() as orders:
        orders.write(json.dumps(order).encode())
        orders.seek(0)
        return subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-c",
                f"import sys; sys.path.insert(0, {str(LIBRARY)!r}); import {MODULE} as m; m.main()",
            ],
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=orders,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=given,
        )


# ---------------------------------------------------------------------------------------------- what a host allows


def probe(python: str, uid: int) -> Wall:
    """The strongest wall that this host allows for programs of an interpreter, by trying.

    Args:
        python: the interpreter that the env server runs with.
        uid: whom it should run as; 0 leaves it to the engine's user.
    """
    notes: list[str] = []
    if uid and os.geteuid() != 0:
        notes.append("not started by root")
        uid = 0
    elif uid and (why := _try(Wall(uid, "none", False), python, "")):
        notes.append(f"another user can't run {python}: {why}")
        uid = 0
    for network in NETWORKS:
        for private in (True, False):
            wall = Wall(uid, network, private, tuple(notes))
            why = _try(wall, python, CHECKS[network] + (PRIVATE_CHECK if private else ""))
            if not why:
                return wall
        notes.append(f"no {network!r}: {why}")
    return Wall(uid, "none", False, (*notes, "nothing else works here"))


_LOOPBACK = """
import socket, sys
server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
client = socket.create_connection(server.getsockname(), 5)
"""
_REFUSED = """
def refused(make):
    try: make()
    except OSError: return
    sys.exit("it is not refused")
"""
_UDP = "refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))\n"
_OUTSIDE = "refused(lambda: socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5))\n"
CHECKS = {
    "namespace": _LOOPBACK + _REFUSED + _UDP + _OUTSIDE,
    "ports": _LOOPBACK + _REFUSED + _UDP + _OUTSIDE,
    "calls": _LOOPBACK + _REFUSED + _UDP,
    "none": _LOOPBACK,
}
PRIVATE_CHECK = "import os\nif os.listdir('/dev/shm'): sys.exit('/dev/shm is not empty')\nopen('/tmp/x', 'w').close()\n"


def _try(wall: Wall, python: str, script: str) -> str:
    """Why a wall can't be had; "" when a program behind it ran, and could do what it may and nothing else."""
    with tempfile.TemporaryDirectory() as folder, _low_port() as outside, contextlib.ExitStack() as stack:
        marker = stack.enter_context(tempfile.NamedTemporaryFile(dir="/dev/shm")) if wall.private_files else None
        log = Path(folder) / "log"
        argv = [python, "-c", script, str(outside)]
        env = {"PATH": "/usr/bin:/bin", "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
        port = free_port()
        try:
            seen = [str(Path(python).parent.parent)]
            child = start(
                wall, argv, env=env, cwd=Path("/"), log=log, visible=seen, listen_port=port, connect_port=port
            )
        except OSError as error:
            return str(error)
        until = time.monotonic() + PROBE_SECONDS
        while (status := child.poll()) is None and time.monotonic() < until:
            time.sleep(0.01)
        child.kill()
        del marker
        if status == 0:
            return ""
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        return (last[0] if last else f"status {status}")[:120]


@contextlib.contextmanager
def _low_port() -> Any:
    """Somebody who listens on a port below the ephemeral ones."""
    for port in range(_ephemeral().start - 1, 1024, -1):
        with contextlib.suppress(OSError):
            with listen(port):
                yield port
                return
    raise OSError("no port is free")


def _ephemeral() -> range:
    """Ports that the kernel gives to whoever asks for any."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(low), int(high) + 1)


def _of_user(uid: int) -> list[int]:
    """Processes of a user of its own."""
    found = []
    for entry in Path("/proc").iterdir() if uid else ():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                found.append(int(entry.name))
    return found


# ---------------------------------------------------------------------------------------------- the launcher's side


def main() -> NoReturn:
    """Confine this process as the order on its input says, and become the program."""
    order = json.loads(sys.stdin.buffer.read())
    try:
        if "relay" in order and "argv" not in order:
            kernel.die_with_parent(signal.SIGKILL)
            serve_forever(*order["relay"])
        _confine(order)
        os.execve(order["argv"][0], order["argv"], order["env"])
    except BaseException as error:
        print(f"The wall can't be put up: {error}", file=sys.stderr, flush=True)
        os._exit(FAILED)


def _confine(order: Mapping[str, Any]) -> None:
    wall, parent = order["wall"], os.getppid()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    _unshare(wall)
    if wall["network"] == "namespace":
        _connect_network(order)
    if wall["private_files"]:
        _hide_files(order["visible"])
    limits = order["limits"]
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    _limit(resource.RLIMIT_NOFILE, limits["open_files"])
    if wall["uid"]:
        _limit(resource.RLIMIT_NPROC, limits["processes"])  # counted by user: of the engine's it would be the engine's
        os.setgroups([])
        os.setgid(wall["uid"])
        os.setuid(wall["uid"])
    os.umask(0o077)
    os.chdir(order["cwd"])
    os.closerange(3, 1 << 16)
    if wall["network"] == "none":
        kernel.drop_privileges()
    else:
        filtering = seccomp.program(tcp=True)
        if not filtering:
            raise OSError("this processor's system calls are not known here")
        kernel.drop_privileges()
        if wall["network"] == "ports":
            ephemeral = _ephemeral()
            kernel.allow_ports([0, order["listen"]], [order["connect"], order["listen"], *ephemeral])
        kernel.set_seccomp(filtering)
    kernel.die_with_parent(signal.SIGKILL)  # last: a change of user would forget it
    if os.getppid() != parent:
        raise OSError("whoever started this is gone")


def _unshare(wall: Mapping[str, Any]) -> None:
    """Leave for a network and mounts of its own; who isn't root needs a user namespace for it."""
    flags = kernel.CLONE_NEWNET if wall["network"] == "namespace" else 0
    flags |= kernel.CLONE_NEWNS if wall["private_files"] else 0
    if flags and os.geteuid() != 0:
        proc_self = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
        uid, gid = os.getuid(), os.getgid()
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
        kernel.map_ids(proc_self, uid, gid)
    elif flags:
        kernel.unshare(flags)


def _connect_network(order: Mapping[str, Any]) -> None:
    """Start the empty network's loopback; a process of ours stays in it and carries two ports."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        interface = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, interface)  # SIOCSIFFLAGS
    server = listen(order["connect"])
    if os.fork() == 0:
        if os.fork() == 0:  # not the program's child, which would count it as its own
            null = os.open("/dev/null", os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            serve_forever(server.fileno(), order["relay"], order["listen"])
        os._exit(0)
    os.wait()
    server.close()
    os.close(order["relay"])


def _hide_files(visible: Sequence[str]) -> None:
    """Put empty, bounded folders over those that every user may write to."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kept = [
        (path, os.open(path, os.O_PATH)) for path in visible if any(path.startswith(f"{over}/") for over in PRIVATE)
    ]
    for folder, size in PRIVATE.items():
        kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={size},mode=1777")
    for path, descriptor in kept:
        os.makedirs(path)
        kernel.mount(f"/proc/self/fd/{descriptor}", path, None, kernel.MS_BIND | kernel.MS_REC)
        os.close(descriptor)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    capped = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (capped, capped))


if __name__ == "__main__":
    main()
