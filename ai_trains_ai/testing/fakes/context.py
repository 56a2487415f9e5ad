"""What a run lends to a part, for a test: a real store and ledger in a folder, and a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ai_trains_ai.errors import (
    SandboxUnavailable,
)
from ai_trains_ai.events import Event
from ai_trains_ai.interfaces import (
    RunContext,
    Sandbox,
)
from ai_trains_ai.plugins import Hooks
from ai_trains_ai.records import (
    Budget,
    Guarantees,
    Limits,
    SandboxResult,
)
from ai_trains_ai.session import open_context
from ai_trains_ai.store import RunFolder, Store

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A valid safetensors file of nothing."""


class FakeClock:
    """Seconds since the epoch, as many as a test wants.

    >>> clock = FakeClock(100.0)
    >>> clock.advance(5.0)
    >>> clock()
    105.0
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    async def sleep(self, seconds: float) -> None:
        """Advance, and let everybody else run once."""
        self.advance(seconds)
        await asyncio.sleep(0)


class _NoSandbox(Sandbox):
    """Stands where a run has its sandbox, and says so when it is used."""

    guarantees = Guarantees("none", network=False, files=False, processes=False)

    def preload(self, *targets: str) -> None: ...

    def another(self, preload: Sequence[str] = ()) -> Sandbox:
        return self

    async def start(self) -> None: ...

    async def run(
        self,
        target: str,
        payload: bytes,
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits = Limits(),
        on_frame: Callable[[str, bytes], None] | None = None,
    ) -> SandboxResult:
        raise SandboxUnavailable("This run context has no sandbox; pass sandbox=.")

    async def close(self) -> None: ...


@contextlib.contextmanager
def run_context(
    folder: str | Path,
    *,
    sandbox: Sandbox | None = None,
    clock: Callable[[], float] | None = None,
    budget: Budget | None = None,
    seed: int = 0,
    on_event: Callable[[Event], None] | None = None,
) -> Iterator[RunContext]:
    """What a run lends to its parts, with a real store and ledger in ``folder``.

    A folder that holds a run already is opened again, as on resume. The sandbox stays the caller's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, run_context(folder, seed=3) as run:
    ...     run.ledger.spent
    0
    """
    place = RunFolder(Path(folder))
    if not place.database.exists():
        place.create({})
        Store.create(place.database).close()
    store = Store.open(place.database)
    hooks = Hooks(watching=[("on_event", on_event)] if on_event else [])
    try:
        lent = sandbox or _NoSandbox()
        yield open_context(place, store, lent, budget or Budget(), seed, hooks, clock or time.time)
    finally:
        store.close()
