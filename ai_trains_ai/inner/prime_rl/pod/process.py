"""One program of the engine: a session of its own, its output in a file, its whole tree ended at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Process:
    """A started program. `poll` gives its exit status; a signal is negative."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:  # an engine that isn't read from stands still: a file always is
            self._popen = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        return self._popen.poll()

    def wait(self, seconds: float) -> int | None:
        """The exit status, or ``None`` when it still runs after so long."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self, grace: float = 0.0) -> None:
        """End it and all that it started: asked first, then killed. Returns when nothing of it is left."""
        family = tree(self.pid)
        if grace and self.poll() is None:
            signal_all([self.pid], signal.SIGTERM, group=True)
            self.wait(grace)
        signal_all([*tree(self.pid), *family], signal.SIGKILL, group=True)
        self._popen.wait()
        until_gone(family)


def tree(pid: int) -> list[int]:
    """A process and all that descend from it now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):  # it may end while it is looked at
                stat = (entry / "stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        queue += children.get(found[-1], [])
    return found


def signal_all(pids: Sequence[int], number: int, *, group: bool = False) -> None:
    """Signal processes, and their process groups; those that are gone are no error."""
    own = os.getpgid(0)
    for pid in dict.fromkeys(pids):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group and (leader := os.getpgid(pid)) != own:
                os.killpg(leader, number)
            os.kill(pid, number)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def until_gone(pids: Sequence[int], seconds: float = 20.0) -> None:
    """Wait for killed processes, of which a GPU's may take a while; orphans are ours to reap."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in pids:
        with contextlib.suppress(ChildProcessError, OSError):
            os.waitpid(pid, os.WNOHANG)
