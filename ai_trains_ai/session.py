"""Builds what a run lends to its parts."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from ai_trains_ai import events
from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.fleet import Fleet, Ledger
from ai_trains_ai.interfaces import GPUProvider, RunContext, Sandbox
from ai_trains_ai.plugins import Hooks
from ai_trains_ai.records import Budget
from ai_trains_ai.store import RunFolder, Store

STORED = (
    events.RunStarted,
    events.StepFinished,
    events.CheckpointSaved,
    events.IntegrityFound,
    events.RunStopped,
    events.RunFinished,
)


def environment_secret(name: str) -> str:
    """A secret from the environment, by name. The value never goes into a record, an event or a message."""
    value = os.environ.get(name)
    if not value:
        raise ConfigurationError(f"The environment variable {name} is not set; this part needs it.")
    return value


def open_context(
    folder: RunFolder,
    store: Store,
    sandbox: Sandbox,
    budget: Budget,
    seed: int,
    hooks: Hooks,
    clock: Callable[[], float] = time.time,
    keep: Callable[[events.Event], None] | None = None,
) -> RunContext:
    """What the parts of a run get. ``keep`` is the run's own bookkeeping: it sees events first, and may end the run."""

    def emit(event: events.Event) -> None:
        if isinstance(event, STORED):
            store.save_event(event)
        if keep is not None:
            keep(event)
        hooks.on_event(event)

    ledger = Ledger(store, budget, clock, emit, hooks.before_spend)
    fleets: dict[int, Fleet] = {}

    def fleet(provider: GPUProvider) -> Fleet:
        if id(provider) not in fleets:
            fleets[id(provider)] = Fleet(provider, ledger, clock, f"ata-{store.meta('run_id')}")
        return fleets[id(provider)]

    return RunContext(
        folder=folder.path,
        seed=seed,
        store=store,
        ledger=ledger,
        budget=budget,
        clock=clock,
        rng=random.Random(seed),
        emit=emit,
        sandbox=sandbox,
        secret=environment_secret,
        fleet=fleet,
    )
