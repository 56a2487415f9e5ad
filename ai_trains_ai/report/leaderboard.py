"""Outer agents compared: one row an evaluated agent, kept as JSON lines."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import asdict, fields, frozen

from ai_trains_ai.errors import ConfigurationError, StorageError
from ai_trains_ai.records import Episode, mean_and_stderr
from ai_trains_ai.report.run import Run

PHASE = "evaluation"


@frozen
class Row:
    """One agent on one set of tasks.

    Attributes:
        agent: what was evaluated.
        tasks: ids of the tasks, each with the same number of episodes.
        episodes: how many ended; ``masked`` more were lost to infrastructure and count nowhere.
        reward: mean over tasks of the mean reward, with standard error (episodes within a task are independent) and
            95 % interval.
        valid: share of episodes that handed in something valid; ``valid_first`` at the first try.
        post: mean hidden score of the trained models; ``uplift`` over the best untrained one, 0 where it is lower.
        tampered: share of episodes that were caught tampering.
        usd: what the evaluation cost; ``outer_usd`` of it for tokens of the agent.
        tokens: read and sampled by the agent.
        date: of the evaluation, UTC.
        run: its folder.
    """

    agent: str
    tasks: tuple[str, ...]
    episodes: int
    masked: int
    reward: float
    stderr: float
    low: float
    high: float
    valid: float
    valid_first: float
    post: float
    uplift: float
    tampered: float
    usd: float
    outer_usd: float
    tokens: int
    date: str
    run: str


def row(run: Run, agent: str = "") -> Row:
    """The row of an evaluation's run folder. ``agent`` names what played; default the outer policy's model.

    Raises:
        ConfigurationError: the folder has no finished evaluation.
    """
    episodes = run.probes(PHASE)
    paid = [episode for episode in episodes if episode.status == "finished" and episode.reward is not None]
    if not paid:
        raise ConfigurationError(f"{run.path} has no finished evaluation of an agent.")
    reward, stderr = _stratified(paid)
    valid = [episode for episode in paid if episode.valid_attempt is not None]
    charges = [charge for _, charge in run.charges]
    tokens = [charge for charge in charges if charge.kind == "tokens"]

    def share(count: float) -> float:
        return count / len(paid)

    return Row(
        agent or _agent(run),
        tuple(sorted({episode.task_id for episode in paid})),
        len(paid),
        len(episodes) - len(paid),
        reward,
        stderr,
        reward - 1.96 * stderr,
        reward + 1.96 * stderr,
        share(len(valid)),
        share(sum(episode.valid_attempt == 1 for episode in valid)),
        mean_and_stderr([episode.post or 0.0 for episode in valid])[0],
        mean_and_stderr([max(0.0, episode.uplift or 0.0) for episode in valid])[0],
        share(sum(any(finding.severity == "error" for finding in episode.findings) for episode in paid)),
        sum(charge.usd for charge in charges),
        sum(charge.usd for charge in tokens),
        int(sum(charge.quantity for charge in tokens)),
        datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        str(run.path),
    )


def append(path: Path, new: Row) -> None:
    """Add a row to a file of JSON lines, durably."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(new)) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"Can't write {path}: {error.strerror}. The run folder {new.run} has everything.") from error


def read(path: Path) -> list[Row]:
    """All rows of a file, best mean reward first."""
    names = {field.name for field in fields(Row)}
    rows = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            data: Mapping[str, Any] = json.loads(line)
            rows.append(Row(**{**{name: data[name] for name in names}, "tasks": tuple(data["tasks"])}))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path}, line {number} is no row of a leaderboard ({error}).") from error
    return sorted(rows, key=lambda found: -found.reward)


def table(rows: Sequence[Row]) -> Any:
    """The rows as a table for a terminal."""
    from rich.table import Table

    columns = ("agent", "reward", "95 %", "episodes", "valid", "at once", "post", "uplift", "tampered", "USD", "tasks")
    shown = Table(title="Outer agents")
    for column in columns:
        shown.add_column(column, justify="left" if column in ("agent", "tasks") else "right", overflow="fold")
    for one in rows:
        interval, masked = f"{one.low:.3f} to {one.high:.3f}", f" (+{one.masked} lost)" if one.masked else ""
        cells = (one.valid, one.valid_first, one.post, one.uplift, one.tampered, one.usd)
        numbers = [f"{cell:.2f}" for cell in cells]
        shown.add_row(
            one.agent, f"{one.reward:.3f}", interval, f"{one.episodes}{masked}", *numbers, ", ".join(one.tasks)
        )
    return shown


def _agent(run: Run) -> str:
    outer: Mapping[str, Any] = run.folder.read_config()["parts"]["outer"]
    return str(outer.get("arguments", {}).get("model") or outer.get("name") or outer.get("instance"))


def _stratified(episodes: Sequence[Episode]) -> tuple[float, float]:
    """Mean over tasks of the mean reward, and its standard error."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        by_task[episode.task_id].append(episode.reward.total if episode.reward else 0.0)
    found = [mean_and_stderr(values) for values in by_task.values()]
    mean = sum(mean for mean, _ in found) / len(found)
    return mean, sum(stderr**2 for _, stderr in found) ** 0.5 / len(found)
