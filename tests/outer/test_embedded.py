"""The outer policy and its trainer, with the shipped model."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ai_trains_ai.agent.rollout import segments
from ai_trains_ai.errors import ConfigurationError, PolicyError, StorageError
from ai_trains_ai.loop.groups import PlannedGroup, with_advantages
from ai_trains_ai.outer.embedded import EmbeddedOuterTrainer, policy_batches
from ai_trains_ai.pico.grpo import policy_gradient
from ai_trains_ai.pico.model import Qwen3
from ai_trains_ai.records import Episode, EpisodeGroup, Message, Reward, SamplingParams, Task, Turn

OPENING = [Message("system", "You write jobs."), Message("user", "Write environment.py and job.toml, then submit.")]
PLAN = PlannedGroup("g", "train", 0, 0, Task("t", "f", "", "", {}), 4)


async def started(tmp_path: Path, **options: Any) -> EmbeddedOuterTrainer:
    trainer = EmbeddedOuterTrainer(**options)
    await trainer.start(SimpleNamespace(folder=tmp_path))  # type: ignore[arg-type]
    return trainer


async def talk(trainer: EmbeddedOuterTrainer, seed: int, turns: int = 3, max_tokens: int = 40) -> list[Turn]:
    """A conversation whose every turn is answered."""
    policy = await trainer.snapshot()
    messages, said = list(OPENING), []
    for number in range(turns):
        turn = await policy.act(messages, (), SamplingParams(max_tokens=max_tokens, seed=seed + number))
        said.append(turn)
        messages += [Message("assistant", turn.text, turn), Message("tool", "ok")]
    return said


def group(conversations: list[list[Turn]], rewards: list[float]) -> EpisodeGroup:
    episodes = [
        Episode(f"e{i}", "g", "t", i, "finished", "x", (), segments(turns), (0,), 1, 1, reward=Reward(r, {}, {}))
        for i, (turns, r) in enumerate(zip(conversations, rewards, strict=True))
    ]
    return with_advantages(PLAN, episodes)


async def test_tokens_in_tokens_out(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    turns = await talk(trainer, seed=1)
    for before, after in pairwise(turns):
        told = (*before.prompt_ids, *before.ids)
        assert after.prompt_ids[: len(told)] == told
    assert len(segments(turns)) == 1
    assert all(len(turn.ids) == len(turn.logprobs) > 0 for turn in turns)


async def test_sampling_does_not_depend_on_who_else_is_sampled(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    alone = await talk(trainer, seed=5)
    together = await asyncio.gather(*(talk(trainer, seed=seed) for seed in (5, 17, 29, 41)))
    assert [turn.ids for turn in together[0]] == [turn.ids for turn in alone]
    assert len({tuple(turns[0].ids) for turns in together}) > 1


async def test_sampled_log_probabilities_are_those_of_the_trainer(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    conversations = await asyncio.gather(*(talk(trainer, seed=seed) for seed in range(4)))
    for batch in policy_batches(group(list(conversations), [0.0, 1.0, 0.5, 0.25])):
        stats = policy_gradient(trainer._model.clone(), batch, normaliser=1.0)
        assert stats.kl < 1e-6
        assert stats.ratio_max == pytest.approx(1.0, abs=1e-2)


async def test_learning_makes_what_was_paid_more_likely(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    conversations = list(await asyncio.gather(*(talk(trainer, seed=seed) for seed in range(4))))
    paid = group(conversations, [1.0, 0.0, 0.0, 0.0])

    def advantage_weighted() -> float:
        total = 0.0
        for batch in policy_batches(paid):
            stats = policy_gradient(trainer._model.clone(), batch, normaliser=1.0)
            total -= stats.loss
        return total

    before = advantage_weighted()
    step = await trainer.train_step([paid])
    assert step.version == 1
    assert (await trainer.snapshot()).version == 1
    assert step.tokens == sum(len(turn.ids) for turns in conversations for turn in turns)
    assert step.metrics["outer/kl"] < 1e-6
    assert advantage_weighted() > before


async def test_a_degenerate_group_teaches_nothing_but_counts_as_a_version(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    before = trainer._model.flat.copy()
    flat = group([await talk(trainer, seed=seed) for seed in range(4)], [0.5] * 4)
    assert flat.degenerate
    assert (await trainer.train_step([flat])).tokens == 0
    assert (trainer._model.flat == before).all()


async def test_a_snapshot_in_use_stays_as_it_is(tmp_path: Path) -> None:
    trainer = await started(tmp_path, lr=0.1)
    old = await trainer.snapshot()
    first = await old.act(OPENING, (), SamplingParams(max_tokens=20, seed=3))
    conversations = [await talk(trainer, seed=seed) for seed in range(4)]
    await trainer.train_step([group(conversations, [1.0, 0.0, 0.0, 0.0])])
    again = await old.act(OPENING, (), SamplingParams(max_tokens=20, seed=3))
    assert (again.ids, again.policy_version) == (first.ids, 0)
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)


async def test_a_checkpoint_resumes_exactly(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    conversations = [await talk(trainer, seed=seed) for seed in range(4)]
    paid = group(conversations, [1.0, 0.0, 0.5, 0.0])
    await trainer.train_step([paid])
    checkpoint = await trainer.save("step-0000")
    again = EmbeddedOuterTrainer()
    await again.start(SimpleNamespace(folder=tmp_path), checkpoint)  # type: ignore[arg-type]
    assert (await again.snapshot()).version == 1
    for one in (trainer, again):
        await one.train_step([paid])
    assert (trainer._model.flat == again._model.flat).all()
    exported = await trainer.export(checkpoint, tmp_path / "export")
    assert exported.kind == "weights"
    assert Qwen3.load(tmp_path / "export").config == trainer._model.config
    for number in range(1, 5):
        await trainer.save(f"step-{number:04d}")
    assert len(list((tmp_path / "checkpoints").glob("*/optimizer.npz"))) == 2
    assert len(list((tmp_path / "checkpoints").glob("*/model.safetensors"))) == 5


async def test_a_broken_gradient_changes_nothing(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    conversations = [await talk(trainer, seed=seed) for seed in range(4)]
    paid = group(conversations, [1.0, 0.0, 0.5, 0.0])
    broken = evolve(paid, advantages=(float("nan"), *paid.advantages[1:]))
    before = trainer._model.flat.copy()
    with pytest.raises(PolicyError, match="not finite; nothing changed"):
        await trainer.train_step([broken])
    assert (trainer._model.flat == before).all()
    assert np.isfinite(trainer._optimizer.state()["velocity"]).all()
    assert (await trainer.snapshot()).version == 0


async def test_a_conversation_that_does_not_fit_ends_gracefully(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    policy = await trainer.snapshot()
    long = [OPENING[0], Message("user", "x" * 5_000)]
    turn = await policy.act(long, (), SamplingParams())
    assert (turn.stop_reason, turn.ids) == ("context", ())


async def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="positive"):
        EmbeddedOuterTrainer(lr=0)
    trainer = await started(tmp_path)
    with pytest.raises(ConfigurationError, match="above 0"):
        await (await trainer.snapshot()).act(OPENING, (), SamplingParams(temperature=0.0))
    with pytest.raises(ConfigurationError, match="nothing"):
        await started(tmp_path, model=tmp_path / "nothing")


async def test_a_checkpoint_that_can_not_be_written(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError, match=r"checkpoints/step-0000.*resume the run"):
        await trainer.save("step-0000")
