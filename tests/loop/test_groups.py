from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from ai_trains_ai.loop.groups import PlannedGroup, planned, with_advantages
from ai_trains_ai.records import Episode, Reward, Task

TASKS = [Task(f"task-{i}", "f", "", "", {}) for i in range(4)]
PLAN = PlannedGroup("g", "train", 0, 0, TASKS[0], 4)


def episode(index: int, total: float | None) -> Episode:
    reward = None if total is None else Reward(total, {}, {})
    status = "finished" if total is not None else "infrastructure"
    return Episode(f"e{index}", "g", "task-0", index, status, "submitted", (), (), (0,), 1, 1, reward=reward)


def group(totals: list[float | None], **options: object) -> tuple[tuple[float | None, ...], bool]:
    made = with_advantages(PLAN, [episode(i, t) for i, t in enumerate(totals)], **options)  # type: ignore[arg-type]
    return made.advantages, made.degenerate


def test_advantages_are_centred_on_the_group() -> None:
    advantages, degenerate = group([0.0, 0.2, 0.4, 0.6])
    assert advantages == pytest.approx((-0.3, -0.1, 0.1, 0.3))
    assert not degenerate


def test_std_normalisation_is_optional() -> None:
    advantages, _ = group([0.0, 1.0, 0.0, 1.0], normalize_std=True)
    assert advantages == pytest.approx((-0.866025, 0.866025, -0.866025, 0.866025), abs=1e-5)


def test_equal_rewards_are_degenerate() -> None:
    assert group([0.35] * 4) == ((None,) * 4, True)


def test_an_infrastructure_failure_is_masked_and_not_averaged() -> None:
    advantages, degenerate = group([0.0, 0.6, None, 0.6])
    assert advantages == pytest.approx((-0.4, 0.2, None, 0.2))
    assert not degenerate


def test_a_group_needs_three_quarters_of_its_episodes() -> None:
    assert group([0.0, 0.6, None, None]) == ((None,) * 4, True)
    assert group([0.0, 0.6, None, None], min_share=0.5)[1] is False


def test_the_plan_depends_on_the_seed_alone_and_is_fair() -> None:
    def ids(seed: int) -> list[str]:
        return [g.task.id for step in islice(planned(TASKS, 3, 8, seed), 8) for g in step]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)
    assert set(Counter(ids(1)).values()) == {6}
