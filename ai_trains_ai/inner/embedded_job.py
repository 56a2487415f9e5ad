"""The jailed side of the embedded runner: GRPO on a tiny model with the agent's environment, and plain sampling.

`train` shares its process with agent code, so nothing that it sends is believed: the weights are checked and scored
elsewhere, its metrics are for looking at. `sample` runs in a server that never held agent code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ai_trains_ai.errors import RewardError
from ai_trains_ai.pico import model_folder
from ai_trains_ai.pico.decode import sample_groups
from ai_trains_ai.pico.grpo import PolicyBatch, PolicyStats, group_advantages, policy_gradient
from ai_trains_ai.pico.model import Qwen3, left_pad
from ai_trains_ai.pico.optim import Optimizer, optimizer, schedule
from ai_trains_ai.pico.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ai_trains_ai.environments.seat import Generation, Rollout

MODELS = ("pico-s", "pico-m")
TOKENS = 4.0  # the loss is per so many tokens of a rollout, whatever its length: long replies don't count less
MAX_ERROR_SHARE = 0.25  # of a step's rollouts: above it the environment is broken, not unlucky


class Channel(Protocol):
    def send(self, kind: str, data: bytes) -> None: ...


@cache
def base(name: str) -> tuple[Qwen3, Tokenizer]:
    """A shipped base model and its tokenizer. Callers clone the model before they change it."""
    folder = model_folder(name)
    return Qwen3.load(folder), Tokenizer.load(folder)


def warm_up() -> None:
    """Load the base models in the fork server, so that a job starts with them in memory."""
    rng = np.random.default_rng(0)
    for name in MODELS:
        model, tokenizer = base(name)
        sample_groups(model, [tokenizer.encode("warm up")], 2, 2, 1.0, rng, tokenizer.eos_id)


class Sampler:
    """Answers batches of conversations with one model, sharing the prompt of equal ones."""

    def __init__(self, model: Qwen3, tokenizer: Tokenizer, temperature: float, max_tokens: int, seed: int) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._temperature, self._max_tokens = temperature, max_tokens
        self._rng = np.random.default_rng(seed)
        self._said: dict[str, list[int]] = {}

    def forget(self) -> None:
        """Start new conversations: token ids of the old ones are dropped."""
        self._said.clear()

    def generate(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[Generation]:
        """One reply per conversation. Base models know no roles: contents are put after one another.

        A later turn extends the very ids that were sampled before (their end token included), never a re-encoding.
        """
        from ai_trains_ai.environments.seat import Generation

        texts = [tuple(message["content"] for message in conversation) for conversation in conversations]
        replies: list[Generation] = []
        for prompts, count in _runs(texts):
            ids = [self._ids(prompt) for prompt in prompts]
            drawn = sample_groups(
                self._model, ids, count, self._max_tokens, self._temperature, self._rng, self._tokenizer.eos_id
            )
            for row, length in enumerate(drawn.lengths.tolist()):
                tokens, logprobs = drawn.tokens[row, :length].tolist(), drawn.logprobs[row, :length].tolist()
                replies.append(Generation(self._tokenizer.decode(tokens), ids[row // count], tokens, logprobs))
                said = "".join(prompts[row // count]) + replies[-1].text
                self._said[said] = [*ids[row // count], *tokens]
        return replies

    def _ids(self, contents: Sequence[str]) -> list[int]:
        before = self._said.get("".join(contents[:-1])) if len(contents) > 1 else None
        if before is not None:
            return before + self._tokenizer.encode(contents[-1])
        return self._tokenizer.encode("".join(contents))


def _runs(texts: Sequence[tuple[str, ...]]) -> Iterator[tuple[list[tuple[str, ...]], int]]:
    """Split into stretches of prompts that repeat equally often: ``a a b b c`` is ``([a, b], 2)``, ``([c], 1)``."""
    blocks: list[tuple[tuple[str, ...], int]] = []
    for text in texts:
        if blocks and blocks[-1][0] == text:
            blocks[-1] = (text, blocks[-1][1] + 1)
        else:
            blocks.append((text, 1))
    prompts: list[tuple[str, ...]] = []
    count = blocks[0][1] if blocks else 0
    for text, repeats in blocks:
        if repeats != count:
            yield prompts, count
            prompts, count = [], repeats
        prompts.append(text)
    if prompts:
        yield prompts, count


def train(payload: bytes, channel: Channel) -> None:
    """Run one job: progress frames while it goes on, then one frame with the weights."""
    from ai_trains_ai.environments.loader import load_environment
    from ai_trains_ai.environments.scoring import Scorer

    order = json.loads(payload)
    loaded = load_environment(".", order["environment"])
    tasks = loaded.tasks_from_rows(order["rows"])
    model, tokenizer = base(order["base_model"])
    trainer = Trainer(model.clone(), tokenizer, Scorer(loaded), tasks, order["config"], order["seed"])
    for step, metrics in trainer.steps():
        channel.send("progress", json.dumps({"step": step, **metrics}).encode())
    channel.send("weights", trainer.model.to_bytes())


class Trainer:
    """GRPO of one job. Every key of the config surface is read here and nowhere else."""

    def __init__(
        self,
        model: Qwen3,
        tokenizer: Tokenizer,
        scorer: Any,
        tasks: Sequence[Any],
        config: Mapping[str, Any],
        seed: int,
    ) -> None:
        self.model, self._scorer, self._config = model, scorer, config
        self._rng = np.random.default_rng(seed)
        self._tasks = [tasks[i] for i in self._rng.permutation(len(tasks))]
        self._temperature = float(config["sampling.temperature"])
        max_tokens = config["sampling.max_completion_tokens"]
        self._sampler = Sampler(model, tokenizer, self._temperature, max_tokens, seed + 1)
        self._optimizer: Optimizer = optimizer(
            config["optim.type"],
            model,
            weight_decay=float(config["optim.weight_decay"]),
            max_norm=float(config["optim.max_norm"]),
        )

    def steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Train; yields the step's number and metrics."""
        for step in range(self._config["max_steps"]):
            rollouts = self._rollouts(step)
            rewards = np.array([rollout.reward for rollout in rollouts], np.float64)
            stats = self._update(step, rollouts, rewards)
            yield (
                step,
                {
                    "reward": float(rewards.mean()),
                    "kl": stats.kl,
                    "entropy": stats.entropy,
                    "clipped": stats.clipped,
                    "tokens": float(sum(len(turn.ids) for rollout in rollouts for turn in rollout.turns)),
                },
            )

    def _rollouts(self, step: int) -> list[Rollout]:
        from ai_trains_ai.environments.seat import run_episodes

        group = self._config["group_size"]
        prompts = self._config["batch_size"] // group
        chosen = [self._tasks[(step * prompts + i) % len(self._tasks)] for i in range(prompts)]
        self._sampler.forget()
        rollouts = run_episodes(self._scorer, [task for task in chosen for _ in range(group)], self._sampler.generate)
        broken = [rollout.error or "it ended before the model spoke" for rollout in rollouts if not _usable(rollout)]
        if len(broken) > MAX_ERROR_SHARE * len(rollouts):
            raise RewardError(f"{len(broken)} of {len(rollouts)} rollouts of step {step} failed: {broken[0]}")
        return rollouts

    def _update(self, step: int, rollouts: Sequence[Rollout], rewards: np.ndarray) -> PolicyStats:
        config = self._config
        shape = (-1, config["group_size"])
        usable = np.array([_usable(rollout) for rollout in rollouts]).reshape(shape)
        # a rollout that failed takes the mean of its group: it then has no advantage and moves nobody else's
        known = np.where(usable, rewards.reshape(shape), 0.0).sum(1) / np.maximum(1, usable.sum(1))
        filled = np.where(usable, rewards.reshape(shape), known[:, None])
        advantages = group_advantages(filled, std_normalise=config["advantage.normalize_std"])
        advantages[~usable] = 0.0
        useful = np.flatnonzero(np.abs(advantages).sum(1) > 1e-6)
        if not len(useful):
            return PolicyStats(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        group = config["group_size"]
        chosen = [rollout for index in useful for rollout in rollouts[index * group : (index + 1) * group]]
        batch = _batch(chosen, advantages[useful], group)
        factor = schedule(
            config["scheduler.type"], step, config["max_steps"], warmup_steps=config["scheduler.warmup_steps"]
        )
        for _ in range(config["updates_per_batch"]):
            stats = policy_gradient(
                self.model,
                batch,
                temperature=self._temperature or 1.0,  # greedy replies carry log-probabilities of temperature 1
                clip_low=config["loss.ratio_clip"],
                clip_high=config["loss.ratio_clip"],
                normaliser=TOKENS * len(rollouts),
            )
            self._optimizer.step(float(config["optim.lr"]) * factor)
        return stats


def _usable(rollout: Rollout) -> bool:
    """Whether a rollout may train: it ended without an error, and the model said something in it."""
    return not rollout.error and bool(rollout.turns)


def _batch(rollouts: Sequence[Rollout], advantages: np.ndarray, group: int) -> PolicyBatch:
    """Rollouts as arrays: the first turn's prompt, then everything after it, sampled tokens marked."""
    rows = [_tokens(rollout) for rollout in rollouts]
    length = max(1, max(len(ids) for ids, _, _ in rows))
    shape = (len(rows), length)
    completions, mask, logprobs = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for row, (ids, sampled, logprob) in enumerate(rows):
        completions[row, : len(ids)], mask[row, : len(ids)], logprobs[row, : len(ids)] = ids, sampled, logprob
    first = [next(r for r in rollouts[i : i + group] if r.turns) for i in range(0, len(rollouts), group)]
    prompts, pad = left_pad([list(rollout.turns[0].prompt_ids) for rollout in first])
    grouped = (len(prompts), group, length)
    return PolicyBatch(
        prompts, pad, completions.reshape(grouped), mask.reshape(grouped), logprobs.reshape(grouped), advantages
    )


def _tokens(rollout: Rollout) -> tuple[list[int], list[bool], list[float]]:
    """Tokens after the first prompt, whether each was sampled, and its log-probability (0 where not).

    Ends where a turn's prompt is no extension of what came before: the model never saw the joined text.
    """
    ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    first = list(rollout.turns[0].prompt_ids) if rollout.turns else []
    for turn in rollout.turns:
        seen = first + ids
        context = list(turn.prompt_ids)[len(seen) :]
        if list(turn.prompt_ids)[: len(seen)] != seen:
            break
        ids += [*context, *turn.ids]
        sampled += [False] * len(context) + [True] * len(turn.ids)
        logprobs += [0.0] * len(context) + list(turn.logprobs)
    return ids, sampled, logprobs


def sample(payload: bytes, channel: Channel) -> None:
    """Answer prompts with a base model or with trained weights. Payload: a JSON line, then the weights, if any."""
    header, _, weights = payload.partition(b"\n")
    order = json.loads(header)
    model, tokenizer = base(order["base_model"])
    if weights:
        model = Qwen3.from_bytes(model.config, weights)
    rng = np.random.default_rng(order["seed"])
    prompts = [tokenizer.encode(prompt) for prompt in order["prompts"]]
    drawn = sample_groups(model, prompts, 1, order["max_tokens"], order["temperature"], rng, tokenizer.eos_id)
    replies = [
        tokenizer.decode(drawn.tokens[row, :length].tolist()) for row, length in enumerate(drawn.lengths.tolist())
    ]
    channel.send("replies", json.dumps(replies).encode())
