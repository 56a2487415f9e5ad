"""Figures of a run. Each function returns a matplotlib ``Figure``; colours are those of Okabe and Ito."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ai_trains_ai.errors import MissingDependency, StorageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ai_trains_ai.report.run import Run

BLUE, ORANGE, GREEN, RED, SKY, PURPLE, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#666666",
)
SIZE = (6.4, 3.6)


class Figures:
    """The figures of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def reward(self) -> Figure:
        """Total reward over steps, and what its components add to it."""
        steps = self._run.steps
        figure, axes = _new("Reward and its components", "reward")
        x = [step["step"] for step in steps]
        paid = next((e.reward for e in self._run.episodes if e.reward), None)
        weights = {name: weight for name, weight in (paid.weights if paid else {}).items() if weight}
        if weights:
            parts = [[w * step.get(f"outer/reward/{name}", 0.0) for step in steps] for name, w in weights.items()]
            labels = [f"{w:.2f} × {name.replace('_', ' ')}" for name, w in weights.items()]
            axes.stackplot(x, parts, labels=labels, colors=(SKY, GREEN, PURPLE, ORANGE, BLUE, RED), alpha=0.75)
        axes.plot(x, [step["outer/reward/mean"] for step in steps], color="black", lw=1.5, label="total")
        axes.set_ylim(0, 1)
        axes.legend(loc="upper left", fontsize=8, frameon=False)
        return figure

    def validity(self) -> Figure:
        """Share of episodes with a valid submission, at once and within the attempts."""
        steps = self._run.steps
        figure, axes = _new("Valid submissions", "share of episodes")
        for key, label, colour in (("any", "within the attempts", BLUE), ("first", "at the first attempt", ORANGE)):
            axes.plot(
                [s["step"] for s in steps],
                [s[f"outer/valid/{key}"] for s in steps],
                color=colour,
                label=label,
                marker="o",
                ms=3,
            )
        axes.set_ylim(0, 1.03)
        axes.legend(loc="lower right", fontsize=8, frameon=False)
        return figure

    def base_models(self) -> Figure:
        """Share of each base model among valid jobs."""
        steps = self._run.steps
        names = sorted({key for step in steps for key in step if key.startswith("outer/base_model/")})
        figure, axes = _new("Base model of valid jobs", "share of valid jobs")
        for name, colour in zip(names, (SKY, RED, GREEN, PURPLE), strict=False):
            axes.plot(
                [s["step"] for s in steps],
                [s.get(name, 0.0) for s in steps],
                color=colour,
                label=name.rpartition("/")[2],
                marker="o",
                ms=3,
            )
        axes.set_ylim(-0.03, 1.03)
        axes.legend(loc="center right", fontsize=8, frameon=False)
        return figure

    def config_usage(self) -> Figure:
        """How often each key of the config surface is set in valid jobs, over steps."""
        steps = self._run.steps
        prefix = "outer/configured/"
        keys = sorted({key for step in steps for key in step if key.startswith(prefix)})
        figure, axes = _new("Config surface: keys that valid jobs set", "", size=(6.4, 0.6 + 0.3 * max(4, len(keys))))
        table = [[step.get(key, 0.0) for step in steps] for key in keys] or [[0.0]]
        edges = (-0.5, max(len(steps), 1) - 0.5, len(table) - 0.5, -0.5)
        image = axes.imshow(table, aspect="auto", vmin=0, vmax=1, cmap="cividis", interpolation="nearest", extent=edges)
        axes.set_yticks(range(len(keys)), [key.removeprefix(prefix) for key in keys], fontsize=8)
        figure.colorbar(image, ax=axes, label="share of valid jobs")
        return figure

    def transfer(self) -> Figure:
        """Reward on held-out tasks before and after training, with 95 % intervals."""
        totals = self._run.summary()["totals"]
        found = [("untrained", totals["held_out_before"], GREY), ("trained", totals["held_out_after"], GREEN)]
        figure, axes = _new("Held-out family: no outer training on it", "total reward", xlabel="outer agent")
        for at, (_, interval, colour) in enumerate(found):
            if interval:
                error = [[interval["mean"] - interval["low"]], [interval["high"] - interval["mean"]]]
                axes.bar(at, interval["mean"], color=colour, width=0.6, yerr=error, capsize=6)
                axes.annotate(f"n={interval['n']}", (at, 0.02), ha="center", fontsize=8, color="white")
        axes.set_xticks(range(len(found)), [name for name, _, _ in found])
        axes.set_ylim(0, 1)
        axes.set_xlim(-0.7, 1.7)
        return figure

    def all(self) -> Mapping[str, Callable[[], Figure]]:
        """Every figure by name."""
        names: Sequence[str] = ("reward", "validity", "base_models", "config_usage", "transfer")
        return {name: getattr(self, name) for name in names}

    def save_all(self, folder: Path | None = None) -> list[Path]:
        """Write every figure as PNG; into the run's ``figures`` by default."""
        folder = folder or self._run.folder.figures
        paths = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, draw in self.all().items():
                path = folder / f"{name}.png"
                draw().savefig(path, dpi=150)
                paths.append(path)
        except OSError as error:
            raise StorageError(
                f"Can't write figures to {folder}: {error.strerror}. Free space and try again."
            ) from error
        return paths


def _new(title: str, ylabel: str, xlabel: str = "outer step", size: tuple[float, float] = SIZE) -> tuple[Figure, Any]:
    try:
        from matplotlib.figure import Figure as MatplotlibFigure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingDependency.of("matplotlib", "embedded") from error

    class Shown(MatplotlibFigure):
        """A figure that shows itself in a notebook. Not pyplot's: no global state, no display needed."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=110)
            return buffer.getvalue()

    figure = Shown(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
