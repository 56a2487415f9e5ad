"""The task as the agent reads it: the opening messages, TASK.md and the guide."""

from __future__ import annotations

from collections.abc import Sequence

from ai_trains_ai.agent.guide import guide_files
from ai_trains_ai.records import Baseline, BaseModel, ConfigSurface, Message, Task
from ai_trains_ai.workspace import Workspace

SYSTEM = "You write reinforcement-learning jobs that train small language models."


def task_markdown(task: Task, models: Sequence[BaseModel], baselines: Sequence[Baseline] | None) -> str:
    """TASK.md. ``baselines=None`` withholds the scores of the untrained models."""
    lines = [f"# {task.title}", task.brief, f"Family {task.family}.", "Examples:"]
    lines += [f"{example.prompt} {example.answer}" for example in task.examples[:2]]
    lines.append("Base models:")
    scores = {b.base_model: b.evaluation.mean for b in baselines or ()}
    for model in models:
        shown = f", untrained score {scores[model.name]:.2f}" if model.name in scores else ""
        lines.append(f"{model.name}: {model.summary}{shown}")
    limits = task.limits
    lines.append(f"Limits: {limits.rollouts} rollouts, {limits.seconds:g} seconds, {limits.attempts} submissions.")
    lines.append("Write environment.py and job.toml, then submit.")
    return "\n".join(lines)


def opening(task: Task, models: Sequence[BaseModel], baselines: Sequence[Baseline] | None) -> tuple[Message, ...]:
    """The first messages of an episode."""
    return (Message("system", SYSTEM), Message("user", task_markdown(task, models, baselines)))


def open_workspace(
    task: Task, models: Sequence[BaseModel], baselines: Sequence[Baseline] | None, surface: ConfigSurface
) -> Workspace:
    """The files that the agent starts with: all of them read-only."""
    files = {"TASK.md": task_markdown(task, models, baselines), **guide_files(task, models, surface)}
    return Workspace({path: text.encode() for path, text in files.items()}, read_only=frozenset(files))
