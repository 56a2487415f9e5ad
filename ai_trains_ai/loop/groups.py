"""Groups: which task each one gets, and the advantages of its episodes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from attrs import frozen

from ai_trains_ai.records import Episode, EpisodeGroup, Task, mean_and_stderr


@frozen
class PlannedGroup:
    """A group before it is sampled. ``phase`` is "train", "probe-before", "probe" or "probe-after"."""

    id: str
    phase: str
    step: int
    position: int
    task: Task
    size: int


def planned(tasks: Sequence[Task], groups_per_step: int, size: int, seed: int) -> Iterator[tuple[PlannedGroup, ...]]:
    """The groups of each step, for ever. Tasks come in shuffled rounds, so that each is seen equally often.

    Depends on the seed alone: a resumed run plans the same groups.
    """
    rng = random.Random(f"task order {seed}")
    queue: list[Task] = []
    step = 0
    while True:
        while len(queue) < groups_per_step:
            queue += rng.sample(list(tasks), len(tasks))
        chosen, queue = queue[:groups_per_step], queue[groups_per_step:]
        yield tuple(
            PlannedGroup(f"s{step:04d}g{position}", "train", step, position, task, size)
            for position, task in enumerate(chosen)
        )
        step += 1


def probe(phase: str, step: int, tasks: Sequence[Task], size: int) -> tuple[PlannedGroup, ...]:
    """One group for each held-out task."""
    return tuple(
        PlannedGroup(f"{phase}-{step:04d}g{position}", phase, step, position, task, size)
        for position, task in enumerate(tasks)
    )


def enough(episodes: Sequence[Episode], min_share: float) -> bool:
    """Whether at least ``min_share`` of a group's episodes, and two, ended without an infrastructure failure."""
    return sum(e.status == "finished" for e in episodes) >= max(2, min_share * len(episodes))


def with_advantages(
    plan: PlannedGroup, episodes: Sequence[Episode], *, normalize_std: bool = False, min_share: float = 0.75
) -> EpisodeGroup:
    """Reward minus the group's mean, over the episodes that ended without an infrastructure failure.

    A group is degenerate, and no episode of it trains, when its rewards are all equal or when fewer than ``min_share``
    of its episodes (or fewer than two) are left.
    """
    rewards = [e.reward.total if e.status == "finished" and e.reward else None for e in episodes]
    known = [reward for reward in rewards if reward is not None]
    mean, stderr = mean_and_stderr(known)
    spread = stderr * len(known) ** 0.5
    degenerate = not enough(episodes, min_share) or spread < 1e-6
    scale = spread if normalize_std and not degenerate else 1.0
    advantages = tuple(None if reward is None or degenerate else (reward - mean) / scale for reward in rewards)
    return EpisodeGroup(plan.id, plan.task.id, tuple(episodes), advantages, degenerate)
