"""`Run`: a run folder as an object, also while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ai_trains_ai.records import Baseline, Charge, Checkpoint, Episode, Evaluation, JobResult
from ai_trains_ai.report.costs import Costs, costs_of
from ai_trains_ai.report.summary import summarise
from ai_trains_ai.store import RunFolder, Store

if TYPE_CHECKING:
    from ai_trains_ai.report.figures import Figures


def open_run(path: str | Path) -> Run:
    """The run in ``path``. Raises `RunFolderError` when there is none, or one of another version."""
    return Run(path)


class Run:
    """Read-only view of a run folder. Every property reads the database anew."""

    def __init__(self, path: str | Path) -> None:
        self.folder = RunFolder(Path(path)).require()
        self._store().close()

    @property
    def path(self) -> Path:
        return self.folder.path

    def _store(self) -> Store:
        return Store.open(self.folder.database, write=False)

    def _read(self, what: str, *arguments: Any, **options: Any) -> Any:
        store = self._store()
        try:
            return getattr(store, what)(*arguments, **options)
        finally:
            store.close()

    @property
    def steps(self) -> list[dict[str, float]]:
        """One mapping a finished step, with slash-named metrics."""
        steps: list[dict[str, float]] = self._read("steps")
        return steps

    @property
    def episodes(self) -> list[Episode]:
        """Finished training episodes, in step order."""
        episodes: list[Episode] = self._read("episodes", phase="train")
        return episodes

    def probes(self, phase: str) -> list[Episode]:
        """The newest episodes on held-out tasks: ``phase`` is "probe-before", "probe" (in between) or "probe-after"."""
        episodes: list[Episode] = self._read("probe", phase)
        return episodes

    @property
    def submissions(self) -> list[dict[str, Any]]:
        """Every submission with its files (text) and report."""
        submissions: list[dict[str, Any]] = self._read("submissions")
        return submissions

    @property
    def jobs(self) -> list[JobResult]:
        """Results of all jobs that ended."""
        results: list[JobResult] = self._read("results")
        return results

    @property
    def evaluations(self) -> list[Evaluation]:
        """Hidden evaluations of trained models."""
        return [evaluation for _, evaluation in self._read("evaluations", "job")]

    @property
    def baselines(self) -> list[Baseline]:
        """Hidden evaluations of the untrained base models."""
        baselines: list[Baseline] = self._read("baselines")
        return baselines

    @property
    def charges(self) -> list[tuple[float, Charge]]:
        """Time and charge, in order."""
        charges: list[tuple[float, Charge]] = self._read("charges")
        return charges

    @property
    def costs(self) -> Costs:
        """What the run has cost so far: by kind, job, step, family and GPU type. A table in a notebook."""
        store = self._store()
        try:
            return costs_of(store)
        finally:
            store.close()

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint of the outer policy, oldest first."""
        checkpoints: list[Checkpoint] = self._read("checkpoints")
        return checkpoints

    @property
    def checkpoint(self) -> tuple[Checkpoint, str] | None:
        """The checkpoint that stands for the run, and the rule or plugin that chose it; ``None`` before the end."""
        chosen = self._read("meta", "checkpoint")
        if chosen is None:
            return None
        found = {checkpoint.name: checkpoint for checkpoint in self.checkpoints}
        return found[chosen["name"]], chosen["rule"]

    @property
    def plugins(self) -> list[dict[str, str]]:
        """The plugins that the run last went on with: name, source, distribution, version, value."""
        return self.folder.read_plugins()

    @property
    def plugin_failures(self) -> dict[str, dict[str, Any]]:
        """What plugins raised, by plugin: ``count``, and the ``first`` of it."""
        failures: dict[str, dict[str, Any]] = self._read("meta", "plugin_failures", {})
        return failures

    def summary(self) -> dict[str, Any]:
        """The run in plain numbers: one entry a step, and totals. JSON-serialisable."""
        store = self._store()
        try:
            return summarise(self.path.name, store)
        finally:
            store.close()

    @property
    def plot(self) -> Figures:
        """Figures, each a method that returns a matplotlib ``Figure``."""
        from ai_trains_ai.report.figures import Figures

        return Figures(self)

    def __repr__(self) -> str:
        steps = self.steps
        reward = f", last reward {steps[-1]['outer/reward/mean']:.3f}" if steps else ""
        return f"Run({str(self.path)!r}, {len(steps)} steps{reward})"

    def _repr_html_(self) -> str:
        summary = self.summary()
        head = "".join(f"<th>{name}</th>" for name in ("step", "reward", "valid", "job quality", "uplift", "jobs"))
        rows = "".join(_html_row(step) for step in summary["steps"])
        title = escape(f"Run {summary['run']}: {summary['totals']['jobs']} jobs")
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _html_row(step: Mapping[str, Any]) -> str:
    cells = [str(step["step"]), *(f"{step[k]:.2f}" for k in ("reward", "valid", "job_quality", "uplift"))]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in [*cells, str(step["jobs"])]) + "</tr>"
