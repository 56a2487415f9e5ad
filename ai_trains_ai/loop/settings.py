"""What the loop is told: its numbers and its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import asdict, evolve, field, frozen

from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.interfaces import (
    InnerJobRunner,
    IntegrityCheck,
    OuterPolicy,
    RewardFn,
    Sandbox,
    TaskFamily,
    Tracker,
)
from ai_trains_ai.loop.health import Health
from ai_trains_ai.plugins import Hooks
from ai_trains_ai.records import SamplingParams, Task

_NOT_WHOLE = ("normalize_std", "show_baselines", "min_share", "stall_seconds", "health")


@frozen
class LoopSettings:
    """Numbers of the outer loop.

    Attributes:
        groups_per_step: groups (tasks) that one update of the outer policy learns from.
        group_size: episodes of one group.
        max_staleness: policy versions that may pass between sampling a group and training on it; 0 is synchronous.
        normalize_std: divide advantages by the group's standard deviation (the published loop only centres them).
        min_share: a group trains when at least this share of its episodes (and two) ended without an infrastructure
            failure.
        show_baselines: tell the agent the scores of the untrained base models.
        eval_items: hidden items per evaluation.
        eval_tokens: longest reply in an evaluation; the default suits the tiny models, which answer and stop.
        probe_episodes: episodes on each held-out task before the first step, after the last, and in between.
        probe_every: updates between probes of the held-out tasks; 0: only before and after.
        health: thresholds of a step's metrics over `loop.health.THRESHOLDS`: ``{metric: {"warn": …, "stop": …}}``.
        stall_seconds: seconds without any event after which the run says what it waits for.
        max_tokens: longest assistant turn, in tokens.
        attempts: submissions that an episode may make.
        seed: of everything random in the run but the hidden items.
    """

    groups_per_step: int = 3
    group_size: int = 8
    max_staleness: int = 1
    normalize_std: bool = False
    min_share: float = 0.75
    show_baselines: bool = False
    eval_items: int = 256
    eval_tokens: int = 12
    probe_episodes: int = 24
    probe_every: int = 0
    max_tokens: int = 256
    attempts: int = 3
    seed: int = 0
    stall_seconds: float = 1_800.0
    health: Mapping[str, Mapping[str, float]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for name, value in asdict(self).items():
            whole = isinstance(value, int) and not isinstance(value, bool)
            if name not in _NOT_WHOLE and not whole:
                raise ConfigurationError(f"{name} must be a whole number, not {value!r}.")
        if not isinstance(self.min_share, int | float):
            raise ConfigurationError(f"min_share must be a number in (0, 1], not {self.min_share!r}.")
        for name, least in (
            ("groups_per_step", 1),
            ("group_size", 2),
            ("max_staleness", 0),
            ("eval_items", 2),
            ("eval_tokens", 1),
            ("probe_episodes", 0),
            ("probe_every", 0),
            ("max_tokens", 1),
            ("attempts", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        if not 0 < self.min_share <= 1:
            raise ConfigurationError(f"min_share must be in (0, 1], not {self.min_share}.")
        if not isinstance(self.stall_seconds, int | float) or not self.stall_seconds > 0:
            raise ConfigurationError(f"stall_seconds must be above 0, not {self.stall_seconds!r}.")
        Health(self.health)  # a misspelt metric fails here, not after the first step

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens)


@frozen
class Parts:
    """The implementations that a run is composed of. ``tasks`` train the policy, ``held_out`` never do.

    ``hooks`` are the calls to the plugins' decisions, reviews and observers.
    """

    outer: OuterPolicy
    runner: InnerJobRunner
    reward: RewardFn
    sandbox: Sandbox
    families: Mapping[str, TaskFamily]
    tasks: Sequence[Task]
    held_out: Sequence[Task] = ()
    trackers: Sequence[Tracker] = field(factory=tuple)
    integrity_checks: Sequence[IntegrityCheck] = ()
    hooks: Hooks = field(factory=Hooks)


def limited(task: Task, runner: InnerJobRunner) -> Task:
    """The task with the limits that its jobs have with ``runner``."""
    return evolve(task, limits=runner.limits(task.limits))
