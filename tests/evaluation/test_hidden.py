from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.evaluation import HiddenEvaluation, paired_difference
from ai_trains_ai.families import load
from ai_trains_ai.families.hidden import reserved
from ai_trains_ai.interfaces import ServedModel
from ai_trains_ai.records import Baseline, BaseModel, Evaluation, ItemResult, JobHandle, SamplingParams

FAMILY = load("chained-arithmetic")
TASK = FAMILY.tasks()[0]


class Oracle(ServedModel):
    """Right on every other prompt; remembers what it was asked."""

    def __init__(self, asked: list[tuple[list[str], int]]) -> None:
        self.asked = asked

    async def sample(self, prompts: Sequence[str], params: SamplingParams) -> list[str]:
        self.asked.append((list(prompts), params.seed))
        await asyncio.sleep(0)
        items = [FAMILY.item(prompt) for prompt in prompts]
        return [FAMILY.gold(item) if i % 2 else "" for i, item in enumerate(items) if item]


class Runner:
    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []

    def base_models(self) -> list[BaseModel]:
        return [BaseModel("s", 1), BaseModel("m", 2)]

    @contextlib.asynccontextmanager
    async def serve(self, model: Any) -> AsyncIterator[ServedModel]:
        yield Oracle(self.asked)


def made(secret: bytes = b"secret") -> HiddenEvaluation:
    return HiddenEvaluation({FAMILY.name: FAMILY}, secret, n=20, baseline_factor=2)


async def test_hidden_items_only_paired_with_the_baselines() -> None:
    evaluation, runner = made(), Runner()
    found = await evaluation.trained(TASK, runner, JobHandle("j"), "m")  # type: ignore[arg-type]
    assert (found.n, found.mean) == (20, 0.5)
    assert found.stderr == pytest.approx((0.25 * 20 / 19 / 20) ** 0.5)
    prompts, seed = runner.asked[0]
    for prompt in prompts:
        item = FAMILY.item(prompt)
        assert item is not None
        assert reserved(item.key)
    runner.asked.clear()
    baselines = await evaluation.baselines(TASK, runner, lambda baseline: None)  # type: ignore[arg-type]
    assert [b.evaluation.n for b in baselines] == [40, 40]
    assert runner.asked[0] == (prompts, seed), "the same items with the same sampling seed"
    assert not set(runner.asked[1][0]) & set(prompts)


async def test_baselines_are_measured_once_also_when_asked_at_once() -> None:
    evaluation, runner, seen = made(), Runner(), []
    await asyncio.gather(*(evaluation.baselines(TASK, runner, seen.append) for _ in range(5)))  # type: ignore[arg-type]
    assert [baseline.base_model for baseline in seen] == ["s", "m"]
    again = made()
    again.restore(seen)
    runner.asked.clear()
    assert await again.baselines(TASK, runner, seen.append) == tuple(seen[:2])  # type: ignore[arg-type]
    assert not runner.asked


async def test_another_secret_gives_other_items_and_the_same_one_the_same() -> None:
    asked = []
    for secret in (b"a", b"a", b"b"):
        runner = Runner()
        await made(secret).trained(TASK, runner, JobHandle("j"), "m")  # type: ignore[arg-type]
        asked.append(runner.asked[0])
    assert asked[0] == asked[1]
    assert asked[0][0] != asked[2][0]


def test_the_paired_error_is_smaller_when_scores_go_together() -> None:
    def evaluation(scores: list[float]) -> Evaluation:
        items = tuple(ItemResult(i, s, "") for i, s in enumerate(scores))
        return Evaluation("t", "m", len(scores), sum(scores) / len(scores), 0.1, items)

    same = evaluation([0.0, 1.0] * 10)
    assert paired_difference(same, [Baseline("m", same)]) == (0.0, 0.0)
    mean, stderr = paired_difference(same, [Baseline("m", evaluation([1.0, 0.0] * 10))])
    assert mean == 0.0
    assert stderr > 0.1
    assert paired_difference(same, []) == (same.mean, same.stderr)


def test_a_baseline_with_further_items_is_compared_on_the_shared_ones() -> None:
    """An untouched model answers alike on the shared items: no uplift, however the further items went."""
    shared = [0.0, 1.0, 0.0, 0.0]
    items = tuple(ItemResult(i, s, "") for i, s in enumerate([*shared, 0.0, 0.0, 0.0, 0.0]))
    baseline = Baseline("m", Evaluation("t", "m", 8, 0.125, 0.1, items))
    after = Evaluation("t", "m", 4, 0.25, 0.2, items[:4])
    assert paired_difference(after, [baseline]) == (0.0, 0.0)


async def test_a_score_outside_of_its_range_names_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(FAMILY), "score", lambda self, item, reply: float("nan"))
    with pytest.raises(ConfigurationError, match=r"chained-arithmetic: score\(\) gave nan"):
        await made().trained(TASK, Runner(), JobHandle("j"), "m")  # type: ignore[arg-type]
