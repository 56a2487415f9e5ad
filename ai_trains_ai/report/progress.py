"""Progress of a run on a terminal, and as plain lines elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ai_trains_ai import events

SPARKS = "▁▂▃▄▅▆▇█"


class Progress:
    """An event handler that shows where a run stands: live on a terminal, one line a step otherwise."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream)
        self.folder = ""  # known once the run has started
        self._steps, self._step = steps, 0
        self._live: Any = None
        self._stages: Counter[str] = Counter()
        self._rewards: list[float] = []
        self._last = ""
        self._job = ""  # what the last job said of itself
        self._jobs = self._invalid = 0

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(self._view(), console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def __call__(self, event: events.Event) -> None:
        line = self._take(event)
        if line:
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)
        if self._live is not None:
            self._live.update(self._view())

    def _take(self, event: events.Event) -> str:
        """Count an event; the line to keep, if any."""
        if isinstance(event, events.RunStarted):
            self.folder = event.folder
            return f"run {event.run}: {event.sandbox}{', resumed' if event.resumed else ''}"
        if isinstance(event, events.BaselineMeasured):
            baseline = event.baseline
            return f"untrained {baseline.base_model} on {baseline.evaluation.task_id}: {baseline.evaluation.mean:.2f}"
        if isinstance(event, events.EpisodeStarted):
            self._stages["writing"] += 1
        elif isinstance(event, events.SubmissionValidated):
            self._invalid += not event.report.valid
        elif isinstance(event, events.JobStarted):
            self._stages["writing"] -= 1
            self._stages["training"] += 1
        elif isinstance(event, events.JobProgress):
            reward = event.metrics.get("reward")
            self._job = f"{event.job_id} step {event.step}" + ("" if reward is None else f" reward {reward:.2f}")
        elif isinstance(event, events.JobFinished):
            self._jobs += 1
        elif isinstance(event, events.EpisodeFinished):
            self._stages["training" if event.episode.job_id else "writing"] -= 1
        elif isinstance(event, events.IntegrityFound):
            return f"integrity: episode {event.episode_id} {event.finding.severity} {event.finding.text()}"
        elif isinstance(event, events.HealthWarning | events.Stalled):
            return f"warning: {event.text}"
        elif isinstance(event, events.StepFinished):
            return self._step_line(event)
        return ""

    def _step_line(self, event: events.StepFinished) -> str:
        metrics = event.metrics
        self._step = event.step + 1
        self._rewards.append(metrics["outer/reward/mean"])
        models = [
            f"{key.rpartition('/')[2]} {value:.0%}"
            for key, value in sorted(metrics.items())
            if key.startswith("outer/base_model/")
        ]
        return (
            f"step {self._step:3d}/{self._steps}  reward {metrics['outer/reward/mean']:.3f}  "
            f"valid {metrics['outer/valid/any']:.0%} (first {metrics['outer/valid/first']:.0%})  "
            f"uplift {metrics['outer/valid/uplift']:.2f}  {', '.join(models)}  "
            f"{int(metrics['outer/jobs'])} jobs  {metrics['time/step']:.1f} s"
        )

    def _view(self) -> Any:
        from rich.text import Text

        stages = ", ".join(f"{count} {stage}" for stage, count in self._stages.items() if count > 0) or "waiting"
        curve = sparkline(self._rewards)
        counts = f"{stages}  {self._jobs} jobs done  {self._invalid} refusals"
        text = f"step {self._step}/{self._steps}  {counts}  {curve}  {self._job}"
        return Text(text, no_wrap=True, overflow="ellipsis")


def sparkline(values: list[float]) -> str:
    """Values in [0, 1] as a line of blocks."""
    return "".join(SPARKS[min(7, max(0, int(value * 8)))] for value in values)


def show_summary(path: Path, summary: Mapping[str, Any], stream: TextIO) -> None:
    """The end of a run: what was learnt, what ran, where it lies."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream)
    totals = summary["totals"]
    table = Table(title=f"Run {summary['run']}")
    for column in ("step", "reward", "valid", "at once", "job quality", "uplift", "base model", "jobs"):
        table.add_column(column, justify="right")
    for step in summary["steps"]:
        name, share = max(step["base_models"].items(), key=lambda item: item[1], default=("–", 0.0))
        cells = (step[k] for k in ("reward", "valid", "valid_first", "job_quality", "uplift"))
        table.add_row(str(step["step"]), *(f"{cell:.2f}" for cell in cells), f"{name} {share:.0%}", str(step["jobs"]))
    console.print(table)
    lines = [
        f"Mean reward of the first three steps {_number(totals['reward_first_3'])}, of the last three "
        f"{_number(totals['reward_last_3'])}.",
        f"Held-out tasks: {_interval(totals['held_out_before'])} before, {_interval(totals['held_out_after'])} after.",
        f"{totals['jobs']} jobs in {totals['wall_seconds']:.0f} s on {totals['cores']} cores "
        f"({totals['cpu_seconds']:.0f} CPU seconds, {totals['job_share_of_core_time']:.0%} of core time in jobs).",
        f"Everything is in {path}; figures: {path / 'figures'}.",
    ]
    for name, failed in totals["plugin_failures"].items():
        lines.append(f"Plugin {name} failed {failed['count']} times, first in {failed['first']}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _interval(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "not measured"
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}] (n={found['n']})"
