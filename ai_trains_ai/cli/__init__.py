"""`ai-trains-ai …`: thin over the library.

Exit codes: 0 done, 1 an error that the message explains, 2 wrong usage, 130 stopped by Ctrl-C (resumable).
"""

from __future__ import annotations

import sys

import typer

from ai_trains_ai.cli.machines import fleet, offers
from ai_trains_ai.cli.verbs import app
from ai_trains_ai.errors import AiTrainsAiError, RunInterrupted

app.command()(offers)
app.add_typer(fleet, name="fleet")


def main() -> None:
    """Entry point: library errors become one line and exit code 1."""
    from ai_trains_ai.threads import keep_memory, single_thread

    single_thread()
    keep_memory()
    try:
        app()
    except RunInterrupted as stopped:
        typer.echo(str(stopped), err=True)
        sys.exit(130)
    except AiTrainsAiError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        sys.exit(130)
