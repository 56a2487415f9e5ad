"""The verbs about machines and money: prices now, the pods of a run, what it cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ai_trains_ai.errors import AiTrainsAiError, ProviderError, Transient

if TYPE_CHECKING:
    from rich.table import Table

    from ai_trains_ai.fleet.costs import Reconciliation
    from ai_trains_ai.fleet.upkeep import Sighting
    from ai_trains_ai.interfaces import GPUProvider
    from ai_trains_ai.records import Offer, PodRequest
    from ai_trains_ai.report.costs import Costs
    from ai_trains_ai.store import RunFolder, Store

_pause = asyncio.sleep
POLL = 5.0  # seconds between two looks of --watch

fleet = typer.Typer(no_args_is_help=True, help="The machines of a run, and what they cost.", rich_markup_mode=None)

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable records.")]
Provider = Annotated[
    str | None, typer.Option(help='Registered name or "module:attribute"; default: as the run was configured.')
]


class By(StrEnum):
    """What `fleet cost` breaks down by."""

    kind = "kind"
    job = "job"
    step = "step"
    family = "family"
    gpu = "gpu"


def offers(
    provider: Annotated[
        str | None, typer.Option(help='Registered name or "module:attribute"; default: all that need no arguments.')
    ] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="GPU type; may be given several times.")] = None,
    count: Annotated[int, typer.Option(min=1, help="GPUs of one machine.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Machines and their prices now, cheapest first.

    Example: ai-trains-ai offers --gpu "NVIDIA H100 80GB HBM3" --gpu "NVIDIA A40"
    """
    from ai_trains_ai.convert import to_data
    from ai_trains_ai.records import PodRequest

    found = asyncio.run(_offers(provider, PodRequest(tuple(gpu or ()), count)))
    if as_json:
        typer.echo(json.dumps([{"provider": name, **to_data(offer)} for name, offer in found], indent=2))
        return
    if not found:
        typer.echo("There is no such machine. Ask for other types or another count.", err=True)
        return
    rows = [
        (
            name,
            offer.id,
            _gpus(offer),
            f"{offer.usd_per_hour:.3f}",
            str(offer.slots),
            "yes" if offer.available else "no",
        )
        for name, offer in found
    ]
    _print(_table(("provider", "offer", "GPU", "$/h", "slots", "free now"), rows, right="$/h"))


@fleet.command()
def status(
    run: RunPath,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every few seconds, until Ctrl-C.")] = False,
    provider: Provider = None,
    as_json: AsJson = False,
) -> None:
    """The pods of a run, in its books and at the provider. Pods of others are never shown.

    Example: ai-trains-ai fleet status runs/first --watch
    """
    folder = _folder(run)
    with contextlib.suppress(KeyboardInterrupt) if watch else contextlib.nullcontext():
        asyncio.run(_status(folder, provider, watch, as_json))


@fleet.command()
def reap(
    run: RunPath,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    provider: Provider = None,
) -> None:
    """End every pod of a run that nobody controls any more, and book what it cost. Exit code 1 when one is left.

    Example: ai-trains-ai fleet reap runs/first
    """
    left = asyncio.run(_reap(_folder(run), provider, yes))
    if left:
        named = "; ".join(f"{name} ({why})" for name, why in left.items())
        raise ProviderError(f"Not ended, and perhaps still costing money: {named}. Try again, or end them by hand.")


@fleet.command()
def cost(
    run: RunPath,
    by: Annotated[By, typer.Option(help="What to break the cost down by.")] = By.kind,
    provider: Provider = None,
    as_json: AsJson = False,
) -> None:
    """What a run has cost, and whether the provider's bill agrees.

    Example: ai-trains-ai fleet cost runs/first --by family
    """
    folder = _folder(run)
    costs, bill, why = asyncio.run(_cost(folder, provider))
    if as_json:
        typer.echo(json.dumps(_cost_data(costs, by, bill, why), indent=2))
        return
    from ai_trains_ai.report.costs import dollars

    if costs.total or costs.jobs:
        rows = [
            (name, dollars(usd), f"{usd / costs.total:.0%}" if costs.total else "–")
            + ((dollars(costs.all_in[name]) if name in costs.all_in else "",) if by == By.job else ())
            for name, usd in sorted(costs.by(by).items(), key=_in_time if by == By.step else _dearest)
        ]
        _print(_table((by.value, "cost", "share") + (("all in",) if by == By.job else ()), rows, right="cost"))
    typer.echo(costs.sentence())
    typer.echo(bill.sentence() if bill else f"Not compared with a bill: {why}")


# ---------------------------------------------------------------------------------------------- what they do


async def _offers(named: str | None, request: PodRequest) -> list[tuple[str, Offer]]:
    """Of one provider, or of every registered one that can be asked; those that can't be are named."""
    from ai_trains_ai.plugins import Registry

    registry = Registry()
    found: list[tuple[str, Offer]] = []
    refused: list[str] = []
    for name in [named] if named else registry.entries("gpu_provider"):
        try:
            async with _closing(registry.resolve("gpu_provider", name)) as provider:
                found += [(name, offer) for offer in await provider.offers(request)]
        except AiTrainsAiError as error:
            if named:
                raise
            refused.append(f"{name} is left out: {error}")
    if refused and not found:
        raise ProviderError(f"No provider that was asked has such a machine. {' '.join(refused)}")
    for line in refused:
        typer.echo(line, err=True)
    return sorted(found, key=lambda item: (item[1].usd_per_hour, item[0], item[1].id))


async def _status(folder: RunFolder, named: str | None, watch: bool, as_json: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from ai_trains_ai.session import provider_of_run

    def show(found: list[Sighting], ended: str) -> None:
        if as_json:
            typer.echo(json.dumps([_sighting_data(s) for s in found], indent=None if watch else 2))
        elif live is not None:
            live.update(_pods(found, ended), refresh=True)
        else:
            if found:
                _print(_pods(found))
            typer.echo(ended if found else f"No pod of this run is there.\n{ended}")

    console = Console(file=sys.stdout)
    live = Live(console=console, auto_refresh=False) if watch and console.is_terminal and not as_json else None
    async with _closing(provider_of_run(folder, named)) as provider:
        with live or contextlib.nullcontext():
            show(*await _seen(folder, provider))
            while watch:
                await _pause(POLL)
                try:
                    show(*await _seen(folder, provider))
                except Transient as error:
                    typer.echo(f"{type(provider).__name__} doesn't answer now: {error}", err=True)


async def _seen(folder: RunFolder, provider: GPUProvider) -> tuple[list[Sighting], str]:
    """The pods that are there, and a line about those that were."""
    from ai_trains_ai.fleet.upkeep import look
    from ai_trains_ai.report.costs import dollars
    from ai_trains_ai.session import marker_of

    with _reading(folder) as store:
        found = await look(store, provider, marker_of(store), time.time())
        gone = {r.marker for r in store.rentals() if r.pod_id} - {sighting.marker for sighting in found}
        usd = sum(store.charged_to_pod(marker) for marker in gone)
    return found, f"{len(gone)} {'pod' if len(gone) == 1 else 'pods'} ended, {dollars(usd)}."


async def _reap(folder: RunFolder, named: str | None, yes: bool) -> dict[str, str]:
    from ai_trains_ai.fleet import Ledger
    from ai_trains_ai.fleet.upkeep import look, reap
    from ai_trains_ai.records import Budget
    from ai_trains_ai.session import marker_of, provider_of_run
    from ai_trains_ai.store import Store

    with _alone(folder), contextlib.closing(Store.open(folder.database)) as store:
        async with _closing(provider_of_run(folder, named)) as provider:
            marker = marker_of(store)
            found = await look(store, provider, marker, time.time())
            if not found:
                typer.echo("No pod of this run is there.")
                return {}
            _print(_pods(found))
            if not yes:
                typer.confirm(f"End {'this pod' if len(found) == 1 else f'these {len(found)} pods'}?", abort=True)
            ledger = Ledger(store, Budget(), time.time, lambda event: None)
            left = await reap(ledger, provider, marker, found, time.time)
    for sighting in found:
        if sighting.marker not in left:
            typer.echo(f"{sighting.marker} is ended.")
    return left


async def _cost(folder: RunFolder, named: str | None) -> tuple[Costs, Reconciliation | None, str]:
    """The costs, and the bill beside them, or why there is none."""
    from ai_trains_ai.fleet.costs import reconcile
    from ai_trains_ai.fleet.renting import TIMES
    from ai_trains_ai.report.costs import costs_of
    from ai_trains_ai.session import provider_of_run

    with _reading(folder) as store:
        costs = costs_of(store)
        pods = [rental for rental in store.rentals() if rental.pod_id]
    if not pods:
        return costs, None, "no machine was rented."
    try:
        async with _closing(provider_of_run(folder, named)) as provider:
            since = datetime.fromtimestamp(min(rental.created for rental in pods), UTC)
            billed = await provider.billed(since, [rental.pod_id for rental in pods])
    except AiTrainsAiError as error:
        if named:
            raise
        return costs, None, str(error)
    bill = reconcile(costs.machines, billed, pods, TIMES.watch)
    return costs, bill, "" if bill else "the provider has none."


# ---------------------------------------------------------------------------------------------- help


def _folder(path: Path) -> RunFolder:
    from ai_trains_ai.store import RunFolder

    return RunFolder(path).require()


@contextlib.contextmanager
def _alone(folder: RunFolder) -> Iterator[None]:
    """Hold the run folder; a controller that holds it is named, as its pods are its own."""
    from ai_trains_ai.errors import RunFolderError

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder.writer())
        except RunFolderError as error:
            holder = _holder(folder.path / "lock")
            if not holder:
                raise
            raise RunFolderError(
                f"Process {holder} is running {folder.path}, and its pods are in use. Stop it first (it ends its pods "
                "then), or watch it: ai-trains-ai fleet status."
            ) from error
        yield


def _holder(lock: Path) -> int:
    """The process that holds a lock, where Linux tells; else 0."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        inode = lock.stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" not in fields and int(fields[5].rpartition(":")[2]) == inode:
                return max(0, int(fields[4]))
    return 0


@contextlib.contextmanager
def _reading(folder: RunFolder) -> Iterator[Store]:
    from ai_trains_ai.store import Store

    with contextlib.closing(Store.open(folder.database, write=False)) as store:
        yield store


@contextlib.asynccontextmanager
async def _closing(provider: GPUProvider) -> AsyncIterator[GPUProvider]:
    try:
        yield provider
    finally:
        await provider.close()


def _pods(found: Sequence[Sighting], caption: str | None = None) -> Table:
    rows = [
        (s.marker, _gpus(s.offer), s.state, _age(s.age), f"{s.offer.usd_per_hour:.3f}", f"{s.spent:.4f}", _jobs(s))
        for s in found
    ]
    table = _table(("pod", "GPU", "state", "age", "$/h", "$ so far", "jobs"), rows, right="$/h")
    table.caption = caption
    return table


def _dearest(row: tuple[str, float]) -> tuple[float, str]:
    return -row[1], row[0]


def _in_time(row: tuple[str, float]) -> tuple[int, int, str]:
    """Steps in their order, between the probes; then what belongs to none."""
    first, _, number = row[0].partition(" ")
    phases = ("probe-before", "step", "probe", "probe-after")
    return phases.index(first) if first in phases else len(phases), int(number) if number.isdigit() else 0, row[0]


def _gpus(offer: Offer) -> str:
    return f"{offer.count} × {offer.gpu_type}" if offer.count else offer.gpu_type


def _jobs(sighting: Sighting) -> str:
    return ", ".join([*sighting.running, f"{sighting.done} done"])


def _age(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {int(seconds) % 60:02d}s"


def _sighting_data(sighting: Sighting) -> dict[str, Any]:
    return {
        "pod": sighting.marker,
        "id": sighting.id,
        "gpu_type": sighting.offer.gpu_type,
        "gpus": sighting.offer.count,
        "state": sighting.state,
        "books": sighting.rental.state if sighting.rental else None,
        "provider": sighting.pod.status if sighting.pod else None,
        "age_seconds": sighting.age,
        "usd_per_hour": sighting.offer.usd_per_hour,
        "usd": sighting.spent,
        "jobs_done": sighting.done,
        "jobs_running": list(sighting.running),
    }


def _cost_data(costs: Costs, by: By, bill: Reconciliation | None, why: str) -> dict[str, Any]:
    data: dict[str, Any] = {
        "usd": costs.total,
        "machines_usd": costs.machines,
        "overhead_usd": costs.overhead,
        "jobs": costs.jobs,
        "usd_per_job": costs.usd_per_job,
        "by": by.value,
        "costs": dict(costs.by(by)),
    }
    if by == By.job:
        data["all_in"] = dict(costs.all_in)
    if bill is None:
        return data | {"bill": None, "no_bill": why}
    names = ("booked", "billed", "difference", "tolerance", "alarm")
    return data | {"bill": {name: getattr(bill, name) for name in names} | {"text": bill.sentence()}}


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]], right: str) -> Table:
    """A table whose columns are to the right from the one called ``right`` on."""
    from rich.table import Table
    from rich.text import Text

    table, justify = Table(), "left"
    for column in columns:
        justify = "right" if column == right else justify
        table.add_column(column, justify="right" if justify == "right" else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # names of others are no markup
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    # a pipe has no width: nothing is folded there
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 1000).print(table)
