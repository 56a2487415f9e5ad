"""Builds what a run lends to its parts, and finds its machines again."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from ai_trains_ai import events
from ai_trains_ai.configuration import revive
from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.fleet import Fleet, Ledger
from ai_trains_ai.fleet.forecast import provider_of
from ai_trains_ai.interfaces import GPUProvider, RunContext, Sandbox
from ai_trains_ai.plugins import Hooks, Registry
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


def marker_of(store: Store) -> str:
    """How the names of all pods of a run begin, and of no others."""
    return f"ata-{store.meta('run_id')}"


def provider_of_run(folder: RunFolder, named: str | None = None) -> GPUProvider:
    """The provider that a run rents from, made anew from its configuration; or the one that is ``named``.

    Raises:
        ConfigurationError: the run's provider was passed by hand, or it rents from nobody.
        UnknownName, MissingDependency: its name means nothing here.
    """
    registry = Registry()
    if named is not None:
        provider: GPUProvider = registry.resolve("gpu_provider", named)
        return provider
    described = folder.read_config().get("parts", {}).get("inner", {})
    if "instance" in described or not described:
        raise ConfigurationError(
            f"The machines of {folder.path} come from a part that was passed by hand "
            f"({described.get('instance', 'not described')}), which a file can't hold. "
            'Name the provider: --provider NAME, or --provider "module:attribute".'
        )
    found = provider_of(registry.resolve("job_runner", revive("inner", "job_runner", described)))
    if found is None:
        raise ConfigurationError(
            f"The job runner of {folder.path} ({described['name']}) names no provider: its jobs ran on this machine. "
            "If it did rent some, name whom from: --provider NAME."
        )
    return found


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
        if not isinstance(provider, GPUProvider):
            raise ConfigurationError(
                f"run.fleet() takes a GPUProvider, not {provider!r}. An experiment makes one of a spec for a runner "
                'that it makes itself: ata.job_runner("module:Runner", provider=…).'
            )
        if id(provider) not in fleets:
            # each fleet has names of its own: what another one of the run rents is no stray
            number, kind = len(fleets) + 1, type(provider).__name__
            name = kind if number == 1 else f"{kind}-{number}"
            fleets[id(provider)] = Fleet(provider, ledger, clock, f"{marker_of(store)}-{number}", name=name)
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
