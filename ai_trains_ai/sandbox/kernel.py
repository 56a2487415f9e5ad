"""The few Linux calls that Python lacks: namespaces, mounts, capabilities. Imported inside the sandbox only."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable

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
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# the same numbers on every architecture
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_PORT, _BIND, _CONNECT = 1, 2, 1, 2
_LANDLOCK_TCP = 4  # the first version that knows TCP ports; from 6 on it keeps signals inside, too

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


def die_with_parent(number: int) -> None:
    """Get this signal when the parent's thread ends. A change of user or capabilities forgets it."""
    _check(_prctl(_PR_SET_PDEATHSIG, number), "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Become the parent of whatever descends from this process and loses its own."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1), "PR_SET_CHILD_SUBREAPER")


def landlock_version() -> int:
    """The kernel's Landlock; 0 when it has none."""
    return max(0, int(_libc.syscall(ctypes.c_long(_SYS_LANDLOCK_CREATE), None, ctypes.c_size_t(0), _LANDLOCK_VERSION)))


def allow_ports(listen: Iterable[int], connect: Iterable[int]) -> None:
    """Refuse TCP from now on but to listen and to connect on these ports. Needs `drop_privileges` before.

    Raises:
        OSError: the kernel has no Landlock, or one that knows no ports.
    """
    version = landlock_version()
    if version < _LANDLOCK_TCP:
        raise OSError(errno.ENOSYS, f"Landlock is of version {version}, and knows ports from {_LANDLOCK_TCP} on")
    scope = 3 if version >= 6 else 0  # abstract sockets and signals stay inside
    attributes = struct.pack("QQQ", 0, _BIND | _CONNECT, scope)[: 24 if version >= 6 else 16]
    rules = int(
        _libc.syscall(
            ctypes.c_long(_SYS_LANDLOCK_CREATE), ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), 0
        )
    )
    _check(rules, "landlock_create_ruleset")
    try:
        for ports, right in ((listen, _BIND), (connect, _CONNECT)):
            for port in ports:
                rule = ctypes.c_char_p(struct.pack("QQ", right, port))
                _check(
                    _libc.syscall(ctypes.c_long(_SYS_LANDLOCK_ADD), rules, _LANDLOCK_PORT, rule, 0),
                    f"landlock_add_rule {port}",
                )
        _check(_libc.syscall(ctypes.c_long(_SYS_LANDLOCK_RESTRICT), rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def map_ids(proc_self: int, uid: int, gid: int) -> None:
    """Map both ids onto themselves in the user namespace just entered; ``proc_self`` is a descriptor of /proc/self."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        fd = os.open(name, os.O_WRONLY, dir_fd=proc_self)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
