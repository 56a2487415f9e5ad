"""CPU time of all processes of one run: the fork server looks a few times a second, as nobody else adds it up.

What the kernel hands over when a run's first process is reaped counts only descendants that were waited for. Children
left alone, killed with the run, or discarded by a parent that ignores SIGCHLD appear in no one's figure; for them the
last look counts. A process that lives between two looks and is discarded so remains unseen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from attrs import frozen

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
# The kernel rounds each of its figures down to whole ticks; a smaller difference is no discarded child.
_NOISE = 4


@frozen
class _Times:
    """In ticks: of the process itself, and of the children that it has waited for (and of theirs)."""

    own: int
    reaped: int

    @property
    def all(self) -> int:
        return self.own + self.reaped


class CpuAccount:
    """Adds up the processes of one run. No figure counts anything twice, so a run that hides nothing is exact."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], _Times] = {}
        self._first: tuple[str, str] | None = None
        self._lost = 0

    def look(self, pids: Iterable[str]) -> float:
        """CPU seconds up to now. ``pids`` are the living processes, parents before children, the first one first."""
        alive: dict[tuple[str, str], _Times] = {}
        # Parents first: a child that is reaped meanwhile is then missed for now, and not counted with both.
        for pid in pids:
            if (entry := _read(pid)) is not None:
                alive.setdefault(*entry)
        # The kernel's lists of children may skip some while others end.
        for known in self._seen:
            if known not in alive and (entry := _read(known[0])) is not None and entry[0] == known:
                alive[known] = entry[1]
        self._first = self._first or next(iter(alive), None)
        gone = sum(times.all for known, times in self._seen.items() if known not in alive)
        if gone:
            moved = self._moved(alive)
            if moved is None:
                return self._total()  # some ended while we looked: the next look is as good
            self._lost += _shortfall(gone, moved)
        self._seen = alive
        return self._total()

    def close(self, seconds: float) -> float:
        """CPU seconds of the whole run, given those of its reaped first process and all that it had waited for."""
        first = self._seen[self._first].all if self._first in self._seen else 0
        others = sum(times.all for times in self._seen.values()) - first
        lost = self._lost + _shortfall(others, int(seconds / _TICK) - first)
        return seconds + lost * _TICK

    def _total(self) -> float:
        return (sum(times.all for times in self._seen.values()) + self._lost) * _TICK

    def _moved(self, alive: dict[tuple[str, str], _Times]) -> int | None:
        """Ticks of ended processes that now stand with those who waited for them; read after their end is certain."""
        moved = 0
        for known in alive:
            entry = _read(known[0])
            if entry is None or entry[0] != known:
                return None
            moved += entry[1].reaped - (self._seen[known].reaped if known in self._seen else 0)
        return moved


def _shortfall(gone: int, moved: int) -> int:
    """Ticks of ended processes that nobody waited for."""
    return gone - moved if gone - moved > _NOISE else 0


def _read(pid: str) -> tuple[tuple[str, str], _Times] | None:
    """A process and its times; the time of its start tells it from others that get its number."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name in brackets is the process's own choice, brackets and blanks included.
            fields = stat.read().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return None
    own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return (pid, fields[19]), _Times(own, reaped)
