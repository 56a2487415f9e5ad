"""The system calls that a jailed child can't make: a second line behind the namespaces, against the kernel's own bugs.

A deny-list, because agents' code may use any library. Numbers are of the kernel's tables for x86_64 and aarch64.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

# name: (x86_64, aarch64); from the kernel's syscall tables.
_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "open_by_handle_at": (304, 265),
    "personality": (135, 92),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "vmsplice": (278, 75),
    # memory that no limit of a process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
# Calls that can open a TCP connection without ``connect`` (Fast Open), past Landlock: where their flags are.
_SENDING = {(44, 206): 3, (46, 211): 2, (307, 269): 3}  # sendto, sendmsg, sendmmsg
_MSG_FASTOPEN = 0x2000_0000
_AUDIT_ARCH = (0xC000_003E, 0xC000_00B7)
_X32_BIT = 0x4000_0000
# Every CLONE_NEW* flag that fits clone's first argument.
_NEW_NAMESPACES = 0x7E02_0000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_KILL, _ERRNO, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, (16, 24, 32, 40)  # where in what a filter is shown
_NETLINK_ROUTE = 0
_SOCKET_TYPE = 0xF  # the rest of the argument are flags


def program(*, tcp: bool = False) -> bytes:
    """The filter as classic BPF. Empty on an architecture whose numbers aren't known here.

    No socket but Unix ones can be made, with ``tcp`` those of plain TCP over IPv4, too, and that which
    asks for the network's interfaces.
    """
    machines = {"x86_64": 0, "aarch64": 1}
    machine = machines.get(platform.machine())
    if machine is None:
        return b""
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == 0:
        lines += [(_JUMP_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for numbers in _DENIED.values():
        lines += [(_JUMP_EQUAL, 0, 1, numbers[machine]), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    # clone3 takes its flags from memory, which a filter can't see; libraries fall back to clone.
    lines += [(_JUMP_EQUAL, 0, 1, _CLONE3[machine]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    lines += _when(_CLONE[machine], [(_JUMP_SET, 0, 1, _NEW_NAMESPACES)], errno.EPERM)
    lines += _tcp(_SOCKET[machine]) if tcp else _when(_SOCKET[machine], [_UNIX], errno.EACCES)
    for numbers, argument in _SENDING.items() if tcp else ():
        fast_open = (_JUMP_SET, 0, 1, _MSG_FASTOPEN)
        lines += _when(numbers[machine], [fast_open], errno.EOPNOTSUPP, argument)
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


_UNIX = (_JUMP_EQUAL, 1, 0, socket.AF_UNIX)


def _tcp(number: int) -> list[tuple[int, int, int, int]]:
    """Fail ``socket`` unless it is a Unix one, plain TCP over IPv4, or asks the kernel for its interfaces.

    Plain, because Landlock doesn't see the ports of MPTCP.
    """
    body = [
        (_LOAD, 0, 0, _ARGUMENT[0]),
        (_JUMP_EQUAL, 11, 0, socket.AF_UNIX),
        (_JUMP_EQUAL, 7, 0, socket.AF_NETLINK),
        (_JUMP_EQUAL, 0, 8, socket.AF_INET),
        (_LOAD, 0, 0, _ARGUMENT[1]),
        (_AND, 0, 0, _SOCKET_TYPE),
        (_JUMP_EQUAL, 0, 5, socket.SOCK_STREAM),
        (_LOAD, 0, 0, _ARGUMENT[2]),
        (_JUMP_EQUAL, 4, 0, 0),
        (_JUMP_EQUAL, 3, 2, socket.IPPROTO_TCP),
        (_LOAD, 0, 0, _ARGUMENT[2]),  # of netlink
        (_JUMP_EQUAL, 1, 0, _NETLINK_ROUTE),
        (_RETURN, 0, 0, _ERRNO | errno.EACCES),
        (_LOAD, 0, 0, _NUMBER),
    ]
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _when(
    number: int, test: list[tuple[int, int, int, int]], code: int, argument: int = 0
) -> list[tuple[int, int, int, int]]:
    """Fail call ``number`` with ``code`` unless ``test`` on one of its arguments jumps over the return."""
    body = [(_LOAD, 0, 0, _ARGUMENT[argument]), *test, (_RETURN, 0, 0, _ERRNO | code), (_LOAD, 0, 0, _NUMBER)]
    return [(_JUMP_EQUAL, 0, len(body), number), *body]
