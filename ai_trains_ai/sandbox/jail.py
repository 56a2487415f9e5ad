"""The child's side of one run: build the private file systems, give every right up, call the target.

Runs inside the outer wall, in a process that the fork server has just forked into a pid namespace of its own (so it
is pid 1 there, and everything it starts dies with it).
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from ai_trains_ai.sandbox import kernel, seccomp
from ai_trains_ai.sandbox.bundle import unpack_bundle
from ai_trains_ai.sandbox.channel import Channel

WORKSPACE = "/workspace"
RESULT_FD = 3
_TMPFS = kernel.MS_NOSUID | kernel.MS_NODEV
# RLIMIT_AS counts mere reservations (stacks, malloc arenas), so it is set far above the budget of RLIMIT_DATA.
_ADDRESS_SPACE_FACTOR = 6


def run_child(request: Mapping[str, Any], bundle: int, output: int, result: int, binds: list[str]) -> NoReturn:
    """Jail this process and run ``request["target"]``; never returns.

    Args:
        request: Target and limits, from the trusted side.
        bundle: Descriptor of the payload and files (see `bundle`).
        output: Descriptor that becomes stdout and stderr.
        result: Descriptor that becomes the frame channel.
        binds: Read-only trees of the outer wall; those under /tmp must survive the private /tmp.
    """
    code = 125
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        limits = request["limits"]
        mapped, data = _memory_in_use()
        _isolate(limits["disk_bytes"], binds)
        payload = unpack_bundle(bundle)
        _set_limits(limits, mapped, data)
        kernel.drop_privileges()
        _keep_descriptors(result)
        kernel.set_seccomp(seccomp.program())
        channel = Channel(RESULT_FD)
        channel.ready()
        code = _call(request["target"], payload, channel)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _memory_in_use() -> tuple[int, int]:
    """Bytes of address space and of data that this process has mapped already."""
    with open("/proc/self/statm", "rb") as statm:
        pages = statm.read().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[5]) * resource.getpagesize()


def _isolate(disk: int, binds: list[str]) -> None:
    os.setsid()
    uid, gid = os.getuid(), os.getgid()
    proc_self = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    covered = [(path, os.open(path, os.O_PATH)) for path in binds if path.startswith("/tmp/")]
    inodes = max(64, disk >> 14)
    for path, share in ((WORKSPACE, 2), ("/tmp", 4), ("/dev/shm", 4)):
        kernel.mount("tmpfs", path, "tmpfs", _TMPFS, f"size={disk // share},nr_inodes={inodes // share},mode=0700")
    for path, fd in covered:
        os.makedirs(path)
        kernel.mount(f"/proc/self/fd/{fd}", path, None, kernel.MS_BIND | kernel.MS_REC)
    # The mounted /proc shows the processes of the outer wall; a fresh one may not be mounted in here.
    kernel.mount("tmpfs", "/proc", "tmpfs", _TMPFS | kernel.MS_RDONLY | kernel.MS_NOEXEC, "size=4k,mode=0555")
    # A user namespace of its own: own account for RLIMIT_NPROC, and no rights over the mounts above.
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.map_ids(proc_self, uid, gid)
    os.chdir(WORKSPACE)


def _set_limits(limits: Mapping[str, Any], mapped: int, data: int) -> None:
    memory = limits["memory_bytes"]
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_DATA, data + memory),
        (resource.RLIMIT_AS, mapped + _ADDRESS_SPACE_FACTOR * memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 1 << 16),
    ):
        hard = resource.getrlimit(kind)[1]
        capped = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (capped, capped))


def _keep_descriptors(result: int) -> None:
    """Leave stdin (empty), stdout, stderr and the frame channel open, and nothing else."""
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(result, RESULT_FD, inheritable=False)
    os.set_inheritable(RESULT_FD, False)
    os.closerange(RESULT_FD + 1, 1 << 20)


def _call(target: str, payload: bytes, channel: Channel) -> int:
    """Run the target; untrusted code from here on. Returns the exit code."""
    # The server's own streams are files; whoever writes through them would seek in a pipe.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # Python reseeds its own generator after a fork, NumPy doesn't
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    module, _, name = target.partition(":")
    try:
        getattr(importlib.import_module(module), name)(payload, channel)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    return code & 0xFF
