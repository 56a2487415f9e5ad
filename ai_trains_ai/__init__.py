"""Nested reinforcement learning: an outer agent is RL-trained to write the RL training jobs of inner models.

>>> import ai_trains_ai as ata
>>> experiment = ata.Experiment.embedded()                      # both loops, for real, on this machine's CPU
>>> run = experiment.run_sync(steps=20)                         # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ai_trains_ai.byhand import evaluate, run_job, validate
    from ai_trains_ai.experiment import Experiment, resume
    from ai_trains_ai.interfaces import (
        GPUProvider,
        InnerJobRunner,
        IntegrityCheck,
        OuterPolicy,
        OuterTrainer,
        Policy,
        RewardFn,
        Sandbox,
        TaskFamily,
        Tracker,
    )
    from ai_trains_ai.plugins import EventHandler, Spec, hookimpl
    from ai_trains_ai.records import Budget, EpisodeOutcome, Finding, Reward, Scenario
    from ai_trains_ai.report.run import Run, open_run

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "EpisodeOutcome",
    "EventHandler",
    "Experiment",
    "Finding",
    "GPUProvider",
    "InnerJobRunner",
    "IntegrityCheck",
    "OuterPolicy",
    "OuterTrainer",
    "Policy",
    "Reward",
    "RewardFn",
    "Run",
    "Sandbox",
    "Scenario",
    "Spec",
    "TaskFamily",
    "Tracker",
    "__version__",
    "evaluate",
    "gpu_provider",
    "hookimpl",
    "integrity_check",
    "job_runner",
    "open_run",
    "outer_trainer",
    "resume",
    "reward",
    "run_job",
    "task_family",
    "tracker",
    "validate",
]

_HOMES = {
    name: home
    for home, names in {
        "records": ("Budget", "EpisodeOutcome", "Finding", "Reward", "Scenario"),
        "experiment": ("Experiment", "resume"),
        "plugins": ("EventHandler", "Spec", "hookimpl"),
        "report.run": ("Run", "open_run"),
        "byhand": ("evaluate", "run_job", "validate"),
        "interfaces": (
            "GPUProvider",
            "InnerJobRunner",
            "IntegrityCheck",
            "OuterPolicy",
            "OuterTrainer",
            "Policy",
            "RewardFn",
            "Sandbox",
            "TaskFamily",
            "Tracker",
        ),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that ``import ai_trains_ai`` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ai_trains_ai' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"ai_trains_ai.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _spec(kind: str, name: str, arguments: dict[str, Any]) -> Spec:
    from ai_trains_ai.plugins import Spec

    return Spec(kind, name, arguments)


def outer_trainer(name: str, /, **arguments: Any) -> Spec:
    """An outer trainer by name, made when the experiment runs."""
    return _spec("outer_trainer", name, arguments)


def job_runner(name: str, /, **arguments: Any) -> Spec:
    """A job runner by name, made when the experiment runs."""
    return _spec("job_runner", name, arguments)


def gpu_provider(name: str, /, **arguments: Any) -> Spec:
    """A GPU provider by name, made when the experiment runs."""
    return _spec("gpu_provider", name, arguments)


def reward(name: str, /, **arguments: Any) -> Spec:
    """A reward function by name, made when the experiment runs."""
    return _spec("reward", name, arguments)


def task_family(name: str, /, **arguments: Any) -> Spec:
    """A task family by name, made when the experiment is."""
    return _spec("task_family", name, arguments)


def tracker(name: str, /, **arguments: Any) -> Spec:
    """A tracker by name, made when the experiment runs."""
    return _spec("tracker", name, arguments)


def integrity_check(name: str, /, **arguments: Any) -> Spec:
    """An integrity check by name, made when the experiment runs."""
    return _spec("integrity_check", name, arguments)
