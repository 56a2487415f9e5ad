"""Evaluation on items that no public generator yields, chosen by the run's secret seed.

Items and answers stay in this process; a served model sees the prompts, and only while it samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence

from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.interfaces import InnerJobRunner, ServedModel, TaskFamily
from ai_trains_ai.records import (
    Baseline,
    BaseModel,
    Evaluation,
    Item,
    ItemResult,
    JobHandle,
    SamplingParams,
    Task,
    mean_and_stderr,
)


class HiddenEvaluation:
    """Scores models on a task's hidden set.

    Trained models and baselines answer the same ``n`` items with the same sampling seeds (paired); a baseline
    answers ``baseline_factor`` times as many, for a tighter mean.

    Args:
        families: by name.
        secret: the run's secret seed.
        n: hidden items per evaluation; the standard error of a score is at most ``0.5 / sqrt(n)``.
        params: how replies are sampled; the seed in it is replaced by one of the task's.
    """

    def __init__(
        self,
        families: Mapping[str, TaskFamily],
        secret: bytes,
        *,
        n: int = 256,
        baseline_factor: int = 2,
        params: SamplingParams | None = None,
    ) -> None:
        self._families, self._secret = families, secret
        self._n, self._factor = n, baseline_factor
        self._params = params or SamplingParams(max_tokens=12)
        self._items: dict[str, list[Item]] = {}
        self._baselines: dict[str, tuple[Baseline, ...]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def restore(self, baselines: Sequence[Baseline]) -> None:
        """Take baselines that were measured before the run was resumed."""
        for baseline in baselines:
            task_id = baseline.evaluation.task_id
            self._baselines[task_id] = (*self._baselines.get(task_id, ()), baseline)

    async def baselines(
        self, task: Task, runner: InnerJobRunner, on_baseline: Callable[[Baseline], None]
    ) -> tuple[Baseline, ...]:
        """Every base model on the task, measured once; nothing that an agent wrote has any part in it."""
        async with self._locks.setdefault(task.id, asyncio.Lock()):
            known = {b.base_model for b in self._baselines.get(task.id, ())}
            for model in runner.base_models():
                if model.name not in known:
                    evaluation = await self._evaluate(task, runner, model, model.name, self._n * self._factor)
                    baseline = Baseline(model.name, evaluation)
                    self._baselines[task.id] = (*self._baselines.get(task.id, ()), baseline)
                    on_baseline(baseline)
        return self._baselines[task.id]

    async def trained(self, task: Task, runner: InnerJobRunner, handle: JobHandle, base_model: str) -> Evaluation:
        """The trained weights of a job."""
        return await self._evaluate(task, runner, handle, base_model, self._n)

    async def _evaluate(
        self, task: Task, runner: InnerJobRunner, what: BaseModel | JobHandle, name: str, n: int
    ) -> Evaluation:
        items = self._hidden(task)[:n]
        async with runner.serve(what) as served:
            replies = await self._replies(served, task, items)
        score = self._families[task.family].score
        results = tuple(
            ItemResult(index, score(item, reply), reply)
            for index, (item, reply) in enumerate(zip(items, replies, strict=True))
        )
        odd = [result.score for result in results if not 0.0 <= result.score <= 1.0]  # NaN too
        if odd:
            raise ConfigurationError(f"Family {task.family}: score() gave {odd[0]!r}; it must be in [0, 1].")
        mean, stderr = mean_and_stderr([result.score for result in results])
        return Evaluation(task.id, name, len(results), mean, stderr, results)

    async def _replies(self, served: ServedModel, task: Task, items: Sequence[Item]) -> list[str]:
        # in blocks of n, each with a seed of its own, so that the first n replies don't depend on how many follow
        replies: list[str] = []
        for block in range(0, len(items), self._n):
            seed = self._seed(task, f"sampling/{block}") % 2**31
            params = SamplingParams(self._params.temperature, self._params.max_tokens, seed)
            replies += await served.sample([item.prompt for item in items[block : block + self._n]], params)
        return replies

    def _hidden(self, task: Task) -> list[Item]:
        if task.id not in self._items:
            rng = random.Random(self._seed(task, "items"))
            self._items[task.id] = self._families[task.family].items(task, rng, self._n * self._factor, hidden=True)
        return self._items[task.id]

    def _seed(self, task: Task, purpose: str) -> int:
        return int.from_bytes(hashlib.sha256(self._secret + f"{task.id}/{purpose}".encode()).digest()[:8], "big")


def paired_difference(evaluation: Evaluation, baselines: Sequence[Baseline]) -> tuple[float, float]:
    """Mean difference to the best baseline over the items that both answered, and its standard error."""
    if not baselines:
        return evaluation.mean, evaluation.stderr
    best = max(baselines, key=lambda baseline: baseline.evaluation.mean)
    pairs = zip(evaluation.items, best.evaluation.items, strict=False)
    return mean_and_stderr([after.score - before.score for after, before in pairs])
