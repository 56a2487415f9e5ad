"""``ai-trains-ai thrift RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ata_thrift.journal import read


def thrift(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """What a run cost, from its journal."""
    lines = read(run)
    usd = sum(line["usd"] for line in lines)
    typer.echo(f"{len(lines)} steps for {usd:.4f} USD")
