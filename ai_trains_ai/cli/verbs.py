"""The verbs about runs, jobs and plugins."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ai_trains_ai.errors import RunInterrupted

if TYPE_CHECKING:
    from ai_trains_ai.experiment import Experiment
    from ai_trains_ai.plugins import PluginManager, Plugins
    from ai_trains_ai.report.progress import Progress
    from ai_trains_ai.report.run import Run


class _Verbs(TyperGroup):
    """Our verbs, then those of plugins, which are loaded when one of theirs is asked for."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or _plugin_verbs().get(cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_plugin_verbs()]


app = typer.Typer(
    cls=_Verbs, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None
)

Steps = Annotated[int | None, typer.Option(min=1, help="Updates of the outer policy.")]
Out = Annotated[Path | None, typer.Option(help="Run folder; default runs/<time>.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a machine-readable summary to standard output.")]
Leaderboard = Annotated[Path, typer.Option(help="File that the row of an evaluation is added to.")]
Folder = Annotated[Path, typer.Argument(help="Folder with environment.py and job.toml.")]
TaskId = Annotated[str, typer.Option("--task", help="Task that the submission is for.")]


@app.callback()
def root() -> None:
    """Nested reinforcement learning: an outer agent learns to write RL training jobs."""


@app.command()
def demo(
    steps: Steps = 30,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Jobs at once; default one per core.")] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run both loops for real on this machine's CPU: no key, no network, no GPU. About five minutes on two cores.

    Example: ai-trains-ai demo --steps 30 --seed 1 --out runs/first
    """
    from ai_trains_ai.experiment import Experiment
    from ai_trains_ai.plugins import Spec

    inner = Spec("job_runner", "embedded", {"slots": workers} if workers else {})
    _run(Experiment.embedded(inner=inner, seed=seed), steps, out, as_json)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    steps: Steps = None,
    accept_plugins: Annotated[
        bool, typer.Option("--accept-plugins", help="Go on although other plugins are installed now.")
    ] = False,
    leaderboard: Leaderboard = Path("leaderboard.jsonl"),
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was stopped or killed. Finished episodes are kept.

    Example: ai-trains-ai resume runs/first
    """
    from ai_trains_ai.experiment import resume as revive

    experiment = revive(run, accept_plugins=accept_plugins)
    if experiment.evaluates is None:
        _run(experiment, steps, None, as_json)
    else:
        _show_row(_evaluate(experiment, None, None), leaderboard, as_json)


@app.command()
def check(folder: Folder, task: TaskId = "chained-arithmetic-2-3") -> None:
    """Validate one submission. Exit code 1 when it is invalid.

    Example: ai-trains-ai check my-job --task multi-hop-2-3
    """
    from ai_trains_ai.byhand import validate

    report = validate(folder, task)
    for finding in report.findings:
        typer.echo(f"{finding.severity}: {finding.text()}")
    typer.echo(f"{'valid' if report.valid else 'invalid'} (stage {report.stage}, {report.seconds:.2f} s)")
    raise typer.Exit(0 if report.valid else 1)


@app.command()
def train(folder: Folder, task: TaskId = "chained-arithmetic-2-3") -> None:
    """Validate, train and evaluate one submission, without an outer agent.

    Example: ai-trains-ai train my-job --task multi-hop-2-3
    """
    from ai_trains_ai.byhand import run_job

    def show(step: int, metrics: Any) -> None:
        typer.echo(f"step {step}: reward {metrics.get('reward', 0.0):.3f}", err=True)

    done = asyncio.run(run_job(folder, task, on_progress=show))
    if done.result.failure:
        typer.echo(f"the job failed: {done.result.failure.message}")
    for baseline in done.baselines:
        typer.echo(f"untrained {baseline.base_model}: {baseline.evaluation.mean:.3f}")
    if done.evaluation:
        typer.echo(f"trained {done.evaluation.model}: {done.evaluation.mean:.3f} ± {1.96 * done.evaluation.stderr:.3f}")
    components = ", ".join(f"{name} {value:.3f}" for name, value in done.reward.components.items())
    typer.echo(f"reward {done.reward.total:.3f} ({components}); {done.result.train_seconds:.2f} CPU seconds")
    raise typer.Exit(1 if done.result.failure else 0)


@app.command()
def evaluate(
    model: Annotated[str, typer.Option(help="Name of the model at the endpoint.")],
    base_url: Annotated[str | None, typer.Option(help="OpenAI-compatible endpoint; default OpenAI's.")] = None,
    key: Annotated[
        str | None, typer.Option(help="Environment variable with the key; default OPENAI_API_KEY at OpenAI.")
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help="Task family; may be repeated. Default: all.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes on each task.")] = 24,
    inner: Annotated[str, typer.Option(help="Runner of the jobs.")] = "embedded",
    reward: Annotated[str, typer.Option(help="What pays.")] = "hybrid",
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest turn of the agent, in tokens.")] = 4_096,
    prices: Annotated[
        str | None, typer.Option(help="USD per million tokens: prefill=0.5,cached=0.1,sampled=1.5.")
    ] = None,
    usd: Annotated[float | None, typer.Option(min=0.0, help="Budget of the evaluation; needs --prices.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    out: Out = None,
    leaderboard: Leaderboard = Path("leaderboard.jsonl"),
    as_json: AsJson = False,
) -> None:
    """Evaluate a model as the outer agent, without training it, and add its row to a leaderboard.

    Example: ai-trains-ai evaluate --model my-model --base-url http://127.0.0.1:8000/v1 --episodes 24
    """
    from ai_trains_ai.experiment import Experiment
    from ai_trains_ai.plugins import Spec
    from ai_trains_ai.records import Budget

    options: dict[str, Any] = {"model": model, "base_url": base_url, "key": key, "temperature": temperature}
    if prices is not None:
        options["prices"] = _prices(prices)
    experiment = Experiment(
        outer=Spec("outer_trainer", "frozen", options),
        inner=inner,
        families=family or ["chained-arithmetic", "multi-hop", "triage"],
        reward=reward,
        budget=Budget(usd=usd),
        max_tokens=max_tokens,
        seed=seed,
    )
    _show_row(_evaluate(experiment, episodes, out), leaderboard, as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the weights and their model card.")],
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint; default the one chosen at the run's end.")] = None,
    license: Annotated[str, typer.Option(help="Identifier for the model card, for instance apache-2.0.")] = "",
    push_to: Annotated[str | None, typer.Option(help="Repository on the Hugging Face Hub: owner/name.")] = None,
    public: Annotated[bool, typer.Option("--public", help="A repository that is made is public.")] = False,
    accept_plugins: Annotated[
        bool, typer.Option("--accept-plugins", help="Go on although other plugins are installed now.")
    ] = False,
) -> None:
    """Write the trained outer policy of a run for others: a PEFT adapter or full weights, with a model card.

    Example: ai-trains-ai export runs/first exported --license apache-2.0 --push-to me/my-trainer
    """
    from ai_trains_ai.experiment import resume as revive

    experiment = revive(run, accept_plugins=accept_plugins)
    exported = experiment.export_sync(folder, checkpoint=checkpoint, license=license)
    typer.echo(f"wrote {exported.kind} and README.md to {exported.path}")
    if push_to is not None:
        from ai_trains_ai.report.hub import push_to_hub

        typer.echo(f"published {push_to_hub(folder, push_to, private=not public)}")


@app.command()
def plugins(
    why: Annotated[str | None, typer.Option(help="All about one plugin, distribution or registered name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable records.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 when a plugin has a fault.")] = False,
) -> None:
    """List the plugins with what they register, and what is wrong with those that are left out.

    Example: ai-trains-ai plugins --why hybrid
    """
    from ai_trains_ai.plugins import Registry

    with contextlib.redirect_stdout(sys.stderr):  # what a plugin prints at import is not our answer
        registry = Registry()
        _verbs_of(registry.manager)
        found = registry.plugins
    if why is not None:
        text = registry.why(why)
        typer.echo(json.dumps({"name": why, "text": text}) if as_json else text)
    elif as_json:
        typer.echo(json.dumps([record.data() | {"parts": registry.parts(record.name)} for record in found], indent=2))
    else:
        _show_plugins(found)
    if strict:
        registry.manager.require((), strict=True)


@app.command()
def new_plugin(
    name: Annotated[str, typer.Argument(help="Name of the distribution, for instance ata-thrift.")],
    folder: Annotated[Path | None, typer.Option(help="Where to write it; default: a folder of that name here.")] = None,
) -> None:
    """Write an installable plugin package with a reward, a provider, an observer and their contract tests.

    Example: ai-trains-ai new-plugin ata-thrift
    """
    from ai_trains_ai.plugins.scaffold import write_plugin

    target = folder or Path(name)
    for path in write_plugin(name, target):
        typer.echo(f"wrote {path}")
    place, extra = shlex.quote(str(target)), shlex.quote(f"{target}[test]")
    typer.echo(f"Next: pip install -e {extra} && pytest {place} && ai-trains-ai plugins --why {name}")


def _show_plugins(found: Plugins) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=True)
    for column in ("plugin", "distribution", "status", "registers"):
        table.add_column(column, overflow="fold")
    for name, distribution, status, registered, _ in found.rows():
        table.add_row(name, distribution, status, registered)
    console = Console(file=sys.stdout)
    console.print(table, markup=False)
    for record in found:
        for fault in record.faults:
            console.print(f"{record.label}: {fault}", markup=False, highlight=False, soft_wrap=True)


@cache
def _plugin_verbs() -> Mapping[str, Any]:
    """The commands that installed plugins add."""
    from ai_trains_ai.plugins import PluginManager

    return _verbs_of(PluginManager())


def _verbs_of(manager: PluginManager) -> dict[str, Any]:
    """The commands that plugins add. One that can't be, or takes a verb that is there, is left out as a fault."""
    from ai_trains_ai.plugins.checks import Fault, told

    owners = dict.fromkeys(typer.main.get_group(app).commands, "builtin")
    found: dict[str, Any] = {}
    for plugin, function in manager.implementations("register_commands"):
        own = typer.Typer()
        try:
            function(cli=own)
            commands = typer.main.get_group(own).commands if own.registered_commands or own.registered_groups else {}
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            owner = manager.records[plugin].distribution or plugin
            manager.blame(plugin, Fault(f"its register_commands raised {told(error)}", f"Repair or update {owner}"))
            continue
        for name, command in commands.items():
            if name in owners:
                reason = f"the command {name!r} is registered by both {owners[name]!r} and {plugin!r}"
                manager.blame(plugin, Fault(reason, "Choose another name"))
            elif not name.isprintable() or " " in name:
                manager.blame(plugin, Fault(f"its command {name!r} can't be typed", "Choose a name without blanks"))
            else:
                owners[name], found[name] = plugin, command
                manager.note(plugin, f"command {name}")
    return found


def _prices(text: str) -> dict[str, float]:
    try:
        return {name.strip(): float(price) for name, _, price in (part.partition("=") for part in text.split(","))}
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write prefill=0.5,cached=0.1,sampled=1.5", param_hint="--prices") from None


def _evaluate(experiment: Experiment, episodes: int | None, out: Path | None) -> Run:
    from ai_trains_ai.report.progress import Progress

    with Progress(0, sys.stderr) as progress, _resumable(progress):
        return experiment.evaluate_sync(episodes, out=out, on_event=progress)


def _show_row(run: Run, leaderboard: Path, as_json: bool) -> None:
    """The row of an evaluation, among the others of its leaderboard."""
    from attrs import asdict
    from rich.console import Console

    from ai_trains_ai.report import leaderboard as board

    row = board.row(run)
    board.append(leaderboard, row)
    if as_json:
        typer.echo(json.dumps(asdict(row), indent=2))
        return
    Console(file=sys.stdout).print(board.table(board.read(leaderboard)))


@contextlib.contextmanager
def _resumable(progress: Progress) -> Iterator[None]:
    """A second Ctrl-C says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if not progress.folder:
            raise RunInterrupted("Stopped before the run began.") from None
        raise RunInterrupted(
            f"Stopped at once; what had finished is kept. Go on with: ai-trains-ai resume {progress.folder}"
        ) from None


def _run(experiment: Experiment, steps: int | None, out: Path | None, as_json: bool) -> None:
    from ai_trains_ai.report.progress import Progress, show_summary

    with Progress(experiment.total_steps(steps), sys.stderr) as progress, _resumable(progress):
        run = experiment.run_sync(steps, out=out, on_event=progress)
    summary = run.summary()
    summary["figures"] = [str(path) for path in run.plot.save_all()]
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        show_summary(run.path, summary, sys.stdout)
