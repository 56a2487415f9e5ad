"""Thrift: what training costs, as a reward, a provider and a journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ai_trains_ai import EventHandler, hookimpl
from ai_trains_ai.events import Charged, RunStarted, StepFinished
from ai_trains_ai.plugins import Register
from ata_thrift.journal import Journal

if TYPE_CHECKING:
    import typer


class Thrift(EventHandler):
    """Registers the parts, and keeps a journal of each run that goes on."""

    def __init__(self) -> None:
        self.journal = Journal()

    @hookimpl
    def register_rewards(self, register: Register) -> None:
        register("thrift", "ata_thrift.reward:ThriftReward", summary="uplift, less the share of the time that it took")

    @hookimpl
    def register_gpu_providers(self, register: Register) -> None:
        register("metered", "ata_thrift.provider:MeteredProvider", summary="this machine, at a price per hour")

    @hookimpl
    def register_commands(self, cli: typer.Typer) -> None:
        from ata_thrift.command import thrift

        cli.command()(thrift)

    def on_run_started(self, event: RunStarted) -> None:
        self.journal = Journal(event.folder)

    def on_charged(self, event: Charged) -> None:
        self.journal.charge(event.charge.usd)

    def on_step_finished(self, event: StepFinished) -> None:
        self.journal.write(event.step, event.metrics["outer/reward/mean"])


plugin = Thrift()
