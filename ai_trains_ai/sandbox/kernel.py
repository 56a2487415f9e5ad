"""The few Linux calls that Python lacks: namespaces, mounts, capabilities. Imported inside the sandbox only."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_CAPABILITY_VERSION_3 = 0x2008_0522
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """unshare(2): leave the namespaces named by ``flags`` for new ones."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, flags: int) -> None:
    """setns(2)."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    arguments = (os.fsencode(source), os.fsencode(target), kind and os.fsencode(kind))
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(options)), f"mount {target}")


def _prctl(operation: int, *arguments: int) -> int:
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return int(_libc.prctl(ctypes.c_int(operation), *values))


def set_dumpable() -> None:
    """Give /proc/self back to this user after a change of uid, so that it can write its own id maps."""
    _check(_prctl(_PR_SET_DUMPABLE, 1), "PR_SET_DUMPABLE")


def drop_privileges() -> None:
    """Give up every capability for ever, and the right to gain any by exec."""
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "PR_SET_NO_NEW_PRIVS")
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        if _prctl(_PR_CAPBSET_DROP, capability) < 0 and ctypes.get_errno() == errno.EINVAL:
            break  # past the last capability that this kernel knows
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    number = ctypes.c_long(_SYS_CAPSET[platform.machine()])
    _check(_libc.syscall(number, ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))), "capset")


def set_seccomp(program: bytes) -> None:
    """Install a filter (classic BPF) for this process and all that it starts. Needs `drop_privileges` before."""
    if program:
        buffer = ctypes.create_string_buffer(program, len(program))
        header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
        pointer = ctypes.create_string_buffer(header, len(header))
        _check(_prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(pointer)), "PR_SET_SECCOMP")


def map_ids(proc_self: int, uid: int, gid: int) -> None:
    """Map both ids onto themselves in the user namespace just entered; ``proc_self`` is a descriptor of /proc/self."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        fd = os.open(name, os.O_WRONLY, dir_fd=proc_self)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
