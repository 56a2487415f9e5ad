"""Tiny random models, and a small GRPO job such as an inner runner does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from ai_trains_ai.families import BUILT_IN, load
from ai_trains_ai.families.worked import WorkedFamily
from ai_trains_ai.pico import model_folder
from ai_trains_ai.pico.config import Config
from ai_trains_ai.pico.decode import sample_groups
from ai_trains_ai.pico.grpo import PolicyBatch, group_advantages, policy_gradient
from ai_trains_ai.pico.model import Qwen3, left_pad
from ai_trains_ai.pico.optim import AdamW
from ai_trains_ai.pico.tokenizer import Tokenizer
from ai_trains_ai.records import Item, Task

TASKS: dict[str, tuple[WorkedFamily, Task]] = {
    task.id: (load(name), task) for name in BUILT_IN for task in load(name).tasks()
}
Reward = Callable[[WorkedFamily, Item, str], float]


def tiny_config(kv_heads: int = 2) -> Config:
    """Four query heads; fewer key/value heads than that is grouped attention."""
    return Config(
        vocab_size=40,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=4,
        intermediate_size=10,
        max_position_embeddings=32,
    )


@pytest.fixture(params=[4, 2, 1], ids=["mha", "gqa", "mqa"])
def tiny(request: pytest.FixtureRequest) -> Qwen3:
    """A random model with weights large enough that a wrong gradient shows."""
    model = Qwen3.initialise(tiny_config(request.param), np.random.default_rng(7))
    model.flat += np.random.default_rng(8).standard_normal(model.flat.size, np.float32) * np.float32(0.1)
    model.weights.embed[:] *= 4.0
    return model


@dataclass
class Shipped:
    """A shipped model with its tokenizer."""

    model: Qwen3
    tokenizer: Tokenizer

    @classmethod
    def load(cls, name: str) -> Shipped:
        return cls(Qwen3.load(model_folder(name)), Tokenizer.load(model_folder(name)))

    def replies(self, model: Qwen3, prompts: list[str], seed: int) -> list[str]:
        ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        samples = sample_groups(model, ids, 1, 12, 1.0, np.random.default_rng(seed), self.tokenizer.eos_id)
        return [self.tokenizer.decode(row[:n]) for row, n in zip(samples.tokens, samples.lengths, strict=True)]

    def accuracy(self, task_id: str, model: Qwen3 | None = None, n: int = 512) -> float:
        """Hidden-class accuracy at temperature 1."""
        family, task = TASKS[task_id]
        items = family.items(task, random.Random(99), n, hidden=True)
        replies = self.replies(model or self.model, [item.prompt for item in items], seed=5)
        return float(np.mean([family.score(item, reply) for item, reply in zip(items, replies, strict=True)]))

    def grpo(
        self,
        task_id: str,
        *,
        lr: float = 1e-3,
        prompts: int = 8,
        steps: int = 20,
        temperature: float = 1.0,
        reward: Reward = lambda family, item, reply: family.score(item, reply),
        seed: int = 0,
    ) -> Qwen3:
        """A whole training job, groups of eight; returns the trained copy."""
        family, task = TASKS[task_id]
        model, rng, noise = self.model.clone(), random.Random(seed), np.random.default_rng(seed)
        optimizer = AdamW(model)
        low, high = task.parameters["low"], task.parameters["high"]
        for _ in range(steps):
            items = [family.draw_class(rng, low, high, hidden=False) for _ in range(prompts)]
            self._step(model, optimizer, family, items, lr, temperature, reward, noise)
        return model

    def _step(
        self,
        model: Qwen3,
        optimizer: AdamW,
        family: WorkedFamily,
        items: list[Item],
        lr: float,
        temperature: float,
        reward: Reward,
        rng: np.random.Generator,
    ) -> None:
        group = 8
        prompts = [self.tokenizer.encode(item.prompt) for item in items]
        samples = sample_groups(model, prompts, group, 12, temperature, rng, self.tokenizer.eos_id)
        rows = zip(samples.tokens, samples.lengths, strict=True)
        rewards = [
            reward(family, items[at // group], self.tokenizer.decode(row[:n])) for at, (row, n) in enumerate(rows)
        ]
        advantages = group_advantages(np.array(rewards).reshape(len(items), group))
        live = np.abs(advantages).sum(1) > 0
        if not live.any():
            return
        shape = (len(items), group, samples.tokens.shape[1])
        batch = PolicyBatch(
            *left_pad(prompts),
            samples.tokens.reshape(shape),
            samples.mask.reshape(shape),
            samples.logprobs.reshape(shape),
            advantages,
        )
        policy_gradient(model, batch.select(live), temperature=max(temperature, 0.01), normaliser=len(rewards) * 4.0)
        optimizer.step(lr)


@pytest.fixture(scope="session")
def pico_m() -> Shipped:
    return Shipped.load("pico-m")


@pytest.fixture(scope="session")
def pico_s() -> Shipped:
    return Shipped.load("pico-s")
