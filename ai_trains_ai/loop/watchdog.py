"""Says what a run waits for, when nothing has happened for long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator

from ai_trains_ai.events import Event, Stalled

logger = logging.getLogger(__name__)


class Watchdog:
    """Every event is a sign of life, but its own. `waiting` says who waits for what.

    Args:
        clock: seconds since the epoch.
        emit: where events go.
        seconds: of silence after which it speaks; then again after twice the time, and so on.
    """

    def __init__(self, clock: Callable[[], float], emit: Callable[[Event], None], seconds: float) -> None:
        self._clock, self._emit, self._seconds = clock, emit, seconds
        self._since: dict[tuple[str, str], float] = {}
        self._quiet_since, self._patience = clock(), seconds

    def emit(self, event: Event) -> None:
        """Hand an event on."""
        self._quiet_since, self._patience = self._clock(), self._seconds
        self._emit(event)

    @contextlib.contextmanager
    def waiting(self, what: str, who: str) -> Iterator[None]:
        """Inside, ``who`` (an episode, a step) waits for ``what``."""
        key = (what, who)
        self._since[key] = self._clock()
        try:
            yield
        finally:
            self._since.pop(key, None)

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(min(30.0, self._seconds / 4))
            quiet = self._clock() - self._quiet_since
            if quiet >= self._patience:
                self._patience = 2 * quiet
                text = self.text(quiet)
                logger.warning(text)
                self._emit(Stalled(text, time=self._clock()))

    def text(self, quiet: float) -> str:
        """What is waited for, and since when."""
        now = self._clock()
        by_kind: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for (what, who), since in self._since.items():
            by_kind[what].append((now - since, who))
        parts = []
        for what, waits in by_kind.items():
            age, who = max(waits)
            parts.append(f"{len(waits)} for {what} (longest {who}, {_duration(age)})")
        waited = "; ".join(parts) or "nothing that is known of"
        return f"Nothing has happened for {_duration(quiet)}. Waiting: {waited}."


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
