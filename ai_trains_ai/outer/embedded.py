"""The embedded outer trainer: a tiny job-writing language model, improved by importance-sampling GRPO in NumPy.

Episodes are sampled token in, token out, with continuous batching over all conversations in flight; an update runs in a
thread of its own while the next episodes are sampled from the last published version.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field

from ai_trains_ai.errors import ConfigurationError, PolicyError, StorageError
from ai_trains_ai.interfaces import OuterTrainer, Policy, RunContext
from ai_trains_ai.outer.chat import END, parse_calls, render
from ai_trains_ai.pico import model_folder
from ai_trains_ai.pico.grpo import PolicyBatch, PolicyStats, policy_gradient
from ai_trains_ai.pico.model import Qwen3, left_pad
from ai_trains_ai.pico.optim import SGD
from ai_trains_ai.pico.stream import StreamDecoder
from ai_trains_ai.records import (
    Checkpoint,
    EpisodeGroup,
    Exported,
    Message,
    SamplingParams,
    StopReason,
    TrainStep,
    Turn,
)

MOMENTUM = 0.9
RATIO_CAP = 3.0  # of tokens with a negative advantage
KEPT_ROWS = 128  # conversations whose keys and values stay cached between turns
BURST = 16  # decoding steps before new conversations are let in
KEPT_OPTIMIZERS = 2  # newest checkpoints that stay resumable; older ones keep their weights


class OuterTokenizer:
    """The tokenizer of the outer model: special tokens are single ids, also where they are sampled."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        path = folder / "tokenizer.json"
        try:
            self._plain = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigurationError(f"{path}: can't read the outer model's tokenizer ({error}).") from error
        end = self._plain.token_to_id(END)
        if end is None:
            raise ConfigurationError(f"{path}: the tokenizer has no {END} token.")
        self.end_id: int = end

    def encode(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._plain.decode(list(ids), skip_special_tokens=False))


@define(eq=False)
class _Request:
    """One turn being sampled. ``pending`` is the token that the next step feeds."""

    ids: list[int]
    limit: int
    temperature: float
    rng: np.random.Generator
    known: tuple[int, ...]
    future: asyncio.Future[Turn]
    row: int = -1
    pending: int = -1
    sampled: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)

    @property
    def key(self) -> tuple[int, ...]:
        return (*self.ids, *self.sampled)


class EmbeddedPolicy(Policy):
    """A frozen version of the outer model. Conversations in flight are decoded as one batch, in a worker thread."""

    def __init__(self, model: Qwen3, tokenizer: OuterTokenizer, version: int) -> None:
        self.version = version
        self._tokenizer, self._context = tokenizer, model.config.max_position_embeddings
        self._decoder = StreamDecoder(model)
        self._rows: dict[tuple[int, ...], int] = {}
        self._open: set[_Request] = set()
        self._waiting: list[_Request] = []
        self._active: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None

    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        if params.temperature <= 0:
            raise ConfigurationError("The embedded policy samples; temperature must be above 0.")
        last = next((m.turn for m in reversed(conversation) if m.turn is not None), None)
        known = (*last.prompt_ids, *last.ids) if last else ()
        return await self.complete(render(conversation, self._tokenizer), params, known)

    async def complete(self, ids: Sequence[int], params: SamplingParams, known: tuple[int, ...] = ()) -> Turn:
        """Sample what follows ``ids``. ``known`` are those of them that an earlier call had or gave."""
        limit = min(params.max_tokens, self._context - len(ids))
        if limit < 1:
            return Turn("", (), "context", self.version, tuple(ids))
        rng = np.random.default_rng(params.seed)
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        request = _Request(list(ids), limit, params.temperature, rng, known, future)
        self._open.add(request)
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        try:
            while self._waiting or self._active:
                admitted, self._waiting = self._waiting, []
                for request in await asyncio.to_thread(self._burst, admitted):
                    if not request.future.done():
                        request.future.set_result(self._turn(request))
                    self._open.discard(request)
        except Exception as error:
            # whatever went wrong, nobody may wait for ever
            for request in self._open:
                if not request.future.done():
                    request.future.set_exception(PolicyError(f"The embedded policy can't sample: {error!r}"))
            self._open.clear()
            self._active, self._waiting = [], []

    # the methods below run in the worker thread, one call at a time

    def _burst(self, admitted: Sequence[_Request]) -> list[_Request]:
        """Let conversations in, and decode until one ends its turn (or `BURST` steps)."""
        for request in [request for request in self._active if request.future.cancelled()]:
            self._active.remove(request)
            self._open.discard(request)
            self._decoder.close(request.row)
        for request in admitted:
            self._admit(request)
        done: list[_Request] = []
        for _ in range(BURST):
            if not self._active:
                break
            self._step()
            done = [request for request in self._active if self._ended(request)]
            if done:
                break
        for request in done:
            self._active.remove(request)
            self._rows[request.key] = request.row
        self._evict()
        return done

    def _admit(self, request: _Request) -> None:
        row = self._rows.pop(request.known, None) if request.known else None
        if row is None or tuple(request.ids[: len(request.known)]) != request.known:
            request.row = self._decoder.open(request.ids[:-1])
        else:
            request.row = row
            missing = request.ids[self._decoder.length(row) : -1]
            if missing:
                self._decoder.feed(row, missing)
        request.pending = request.ids[-1]
        self._active.append(request)

    def _step(self) -> None:
        rows = np.array([request.row for request in self._active])
        logits = self._decoder.advance(rows, np.array([request.pending for request in self._active]))
        logits *= np.array([[1.0 / request.temperature] for request in self._active], np.float32)
        logits -= logits.max(-1, keepdims=True)
        cumulative = np.cumsum(np.exp(logits), -1)
        draws = np.array([[request.rng.random()] for request in self._active], np.float32) * cumulative[:, -1:]
        tokens = np.minimum((cumulative <= draws).sum(-1), logits.shape[1] - 1)
        logprobs = logits[np.arange(len(tokens)), tokens] - np.log(cumulative[:, -1])
        for request, token, logprob in zip(self._active, tokens.tolist(), logprobs.tolist(), strict=True):
            request.sampled.append(token)
            request.logprobs.append(logprob)
            request.pending = token

    def _ended(self, request: _Request) -> bool:
        return request.pending == self._tokenizer.end_id or len(request.sampled) >= request.limit

    def _evict(self) -> None:
        while len(self._rows) > KEPT_ROWS:
            oldest = next(iter(self._rows))
            self._decoder.close(self._rows.pop(oldest))

    def _turn(self, request: _Request) -> Turn:
        ended = request.sampled[-1] == self._tokenizer.end_id
        text = self._tokenizer.decode(request.sampled[:-1] if ended else request.sampled)
        reason: StopReason = "stop" if ended else "length"
        calls = parse_calls(text) if ended else ()
        return Turn(
            text, calls, reason, self.version, tuple(request.ids), tuple(request.sampled), tuple(request.logprobs)
        )


class EmbeddedOuterTrainer(OuterTrainer):
    """Trains all weights of the tiny outer model with momentum SGD.

    Not Adam: it moves every weight by about ``lr`` whatever its gradient, and the noise of a few dozen episodes then
    wears away what the policy knew; measured, it forgot how to repair a submission and lost the held-out family.

    Args:
        lr: learning rate at the start. The gradient is that of the mean over episodes of the sum over tokens.
        half_life: updates after which the learning rate has halved; it falls as ``lr / (1 + version / half_life)``.
        updates: optimizer steps on each batch; ratios are clipped to ``1 ± clip``.
        clip: see ``updates``.
        max_norm: the gradient is clipped to this norm, so that a step moves the weights by at most ``lr * max_norm``
            (before momentum).
        model: folder of a model in the Hugging Face layout; default the shipped one.
    """

    def __init__(
        self,
        lr: float = 0.025,
        half_life: float = 15.0,
        updates: int = 3,
        clip: float = 0.2,
        max_norm: float = 0.5,
        model: str | Path | None = None,
    ) -> None:
        if min(lr, half_life, clip, max_norm) <= 0 or updates < 1:
            raise ConfigurationError("lr, half_life, clip and max_norm must be positive and updates at least 1.")
        self._lr, self._half_life = lr, half_life
        self._updates, self._clip, self._max_norm = updates, clip, max_norm
        self._folder = Path(model) if model else model_folder("outer")
        self._published: EmbeddedPolicy | None = None

    async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
        self._run = run
        self._tokenizer = OuterTokenizer(self._folder)
        source = self._folder if checkpoint is None else run.folder / checkpoint.path
        self._model = await asyncio.to_thread(Qwen3.load, source)
        self._optimizer = SGD(self._model, momentum=MOMENTUM, nesterov=False, max_norm=self._max_norm)
        self._version = 0
        if checkpoint is not None:
            self._version = checkpoint.version
            self._optimizer.load_state(_read_state(source))
        self._publish()

    async def snapshot(self) -> Policy:
        assert self._published is not None, "start() comes first"
        return self._published

    async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
        batches = [batch for group in groups for batch in policy_batches(group)]
        tokens = int(sum(batch.mask.sum() for batch in batches))
        episodes = sum(len(group.episodes) for group in groups)
        metrics = await asyncio.to_thread(self._learn, batches, episodes) if batches else {}
        self._version += 1
        self._publish()
        return TrainStep(self._version, metrics, tokens)

    def _learn(self, batches: Sequence[PolicyBatch], episodes: int) -> dict[str, float]:
        """``updates`` steps on the same batch; on a non-finite gradient weights and moments are put back.

        The objective is divided by the number of started episodes, masked and degenerate ones included: a group weighs
        the same however its neighbours went, and a token of a long episode as much as one of a short one.
        """
        before, state = self._model.flat.copy(), self._optimizer.state()
        first: list[PolicyStats] = []
        for _ in range(self._updates):
            stats = [
                policy_gradient(
                    self._model,
                    batch,
                    clip_low=self._clip,
                    clip_high=self._clip,
                    ratio_cap=RATIO_CAP,
                    normaliser=float(episodes),
                )
                for batch in batches
            ]
            first = first or stats
            done = self._optimizer.step(self._lr / (1 + self._version / self._half_life))
            if done.skipped:
                self._model.flat[:] = before
                self._optimizer.load_state(state)
                raise PolicyError(
                    f"The outer update {self._version} has a gradient that is not finite; nothing changed."
                )
        total = sum(s.tokens for s in first)

        def mean(name: str) -> float:
            return sum(getattr(s, name) * s.tokens for s in first) / total

        return {
            "outer/kl": mean("kl"),
            "outer/entropy": mean("entropy"),
            "outer/ratio_mean": mean("ratio_mean"),
            "outer/ratio_max": max(s.ratio_max for s in first),
            "outer/clipped": sum(s.clipped * s.tokens for s in stats) / total,
            "outer/grad_norm": done.grad_norm,
        }

    def _publish(self) -> None:
        self._published = EmbeddedPolicy(self._model.clone(), self._tokenizer, self._version)

    async def save(self, name: str) -> Checkpoint:
        checkpoint = Checkpoint(name, f"checkpoints/{name}", self._version)
        target = self._run.folder / checkpoint.path
        try:
            await asyncio.to_thread(self._write, target)
        except OSError as error:
            raise StorageError(f"Can't write {target}: {error.strerror}. Free space and resume the run.") from error
        return checkpoint

    def _write(self, target: Path) -> None:
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self._model.save(partial)
        with (partial / "optimizer.npz").open("wb") as file:
            np.savez(file, allow_pickle=False, **self._optimizer.state())
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        for old in sorted(target.parent.glob("step-*/optimizer.npz"))[:-KEPT_OPTIMIZERS]:
            old.unlink()

    async def export(self, checkpoint: Checkpoint, folder: Path) -> Exported:
        def copy() -> None:
            Qwen3.load(self._run.folder / checkpoint.path).save(folder)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(self._folder / name, folder / name)
            (folder / "export.json").write_text(json.dumps({"checkpoint": checkpoint.name, "kind": "weights"}) + "\n")

        try:
            await asyncio.to_thread(copy)
        except ConfigurationError as error:
            raise PolicyError(f"Checkpoint {checkpoint.name} can't be exported: {error}") from error
        except OSError as error:
            raise StorageError(f"Can't write {folder}: {error.strerror}. Free space and export again.") from error
        return Exported(str(folder), "weights")


def policy_batches(group: EpisodeGroup) -> list[PolicyBatch]:
    """The trainable segments of a group as arrays: one row a segment, behind the prompt that they share.

    Rows are ordered by length and split, so that short episodes aren't padded to the longest.
    """
    rows = [
        (segment, advantage)
        for episode, advantage in zip(group.episodes, group.advantages, strict=True)
        if advantage
        for segment in episode.segments
    ]
    by_prompt: dict[tuple[int, ...], list[tuple[Any, float]]] = {}
    for segment, advantage in rows:
        prompt = segment.ids[: segment.mask.index(True)]
        by_prompt.setdefault(prompt, []).append((segment, advantage))
    batches = []
    for prompt, found in by_prompt.items():
        found.sort(key=lambda row: len(row[0].ids))
        half = (len(found) + 1) // 2
        batches += [_batch(prompt, part) for part in (found[:half], found[half:]) if part]
    return batches


def _batch(prompt: tuple[int, ...], rows: Sequence[tuple[Any, float]]) -> PolicyBatch:
    start = len(prompt)
    length = max(len(segment.ids) for segment, _ in rows) - start
    shape = (1, len(rows), length)
    completions, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    for row, (segment, _) in enumerate(rows):
        used = len(segment.ids) - start
        completions[0, row, :used] = segment.ids[start:]
        mask[0, row, :used] = segment.mask[start:]
        logprobs[0, row, :used] = segment.logprobs[start:]
    prompts, pad = left_pad([list(prompt)])
    advantages = np.array([[advantage for _, advantage in rows]], np.float32)
    return PolicyBatch(prompts, pad, completions, mask, logprobs, advantages)


def _read_state(folder: Path) -> dict[str, np.ndarray]:
    path = folder / "optimizer.npz"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: can't read the optimizer's state ({error}). Resume from a newer checkpoint."
        ) from error
