"""Builds what a run lends to its parts, and calls observers one by one."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable

from ai_trains_ai import events
from ai_trains_ai.errors import BudgetExceeded, ConfigurationError
from ai_trains_ai.fleet import Fleet, Ledger
from ai_trains_ai.interfaces import GPUProvider, RunContext, Sandbox
from ai_trains_ai.records import Budget
from ai_trains_ai.store import RunFolder, Store

logger = logging.getLogger(__name__)

Observer = tuple[str, Callable[[events.Event], None]]
STORED = (events.RunStarted, events.StepFinished, events.CheckpointSaved, events.RunFinished)


class Observers:
    """Hands events to onlookers. What one raises is counted and logged once; only a budget stop passes through."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)
        self.failures: Counter[str] = Counter()

    def __call__(self, event: events.Event) -> None:
        for name, callback in self._observers:
            try:
                callback(event)
            except BudgetExceeded:
                raise
            except Exception as error:
                self.failures[name] += 1
                if self.failures[name] == 1:
                    logger.warning("Observer %s failed on %s: %s", name, type(event).__name__, error, exc_info=True)


def environment_secret(name: str) -> str:
    """A secret from the environment, by name. The value never goes into a record, an event or a message."""
    value = os.environ.get(name)
    if not value:
        raise ConfigurationError(f"The environment variable {name} is not set; this part needs it.")
    return value


def open_context(
    folder: RunFolder, store: Store, sandbox: Sandbox, budget: Budget, seed: int, observers: Observers
) -> RunContext:
    """What the parts of a run get."""

    def emit(event: events.Event) -> None:
        if isinstance(event, STORED):
            store.save_event(event)
        observers(event)

    ledger = Ledger(store, budget, time.time, emit)
    fleets: dict[int, Fleet] = {}

    def fleet(provider: GPUProvider) -> Fleet:
        if id(provider) not in fleets:
            fleets[id(provider)] = Fleet(provider, ledger, time.time, f"ata-{store.meta('run_id')}")
        return fleets[id(provider)]

    return RunContext(
        folder=folder.path,
        seed=seed,
        store=store,
        ledger=ledger,
        budget=budget,
        clock=time.time,
        rng=random.Random(seed),
        emit=emit,
        sandbox=sandbox,
        secret=environment_secret,
        fleet=fleet,
    )
