"""Sampling of whole groups: G completions of each of P prompts, with a key/value cache that a group shares."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ai_trains_ai.errors import PolicyError
from ai_trains_ai.pico.attention import Layout, attend
from ai_trains_ai.pico.layers import Array, Bools, Ints, f4, softmax_
from ai_trains_ai.pico.model import Qwen3, left_pad


class Samples(NamedTuple):
    """Completions of B = P*G rows, group by group.

    ``tokens`` [B, L] (the end token included, then padding), ``logprobs`` [B, L] natural log under the law that was
    sampled (temperature included; 0 after the end), ``lengths`` [B] in tokens. ``mask`` is true where a token counts.
    """

    tokens: Ints
    logprobs: Array
    lengths: Ints

    @property
    def mask(self) -> Bools:
        """[B, L]: true up to and including the end token."""
        return np.arange(self.tokens.shape[1])[None] < self.lengths[:, None]


def draw(logits: Array, temperature: float, rng: np.random.Generator) -> tuple[Ints, Array]:
    """One token for each row of ``logits`` [n, V], and its log-probability [n].

    Temperature 0 takes the best token; its log-probability is then that of temperature 1.
    """
    scaled = logits * f4(1.0 / temperature if temperature > 0 else 1.0)
    scaled -= scaled.max(-1, keepdims=True)
    weights = np.exp(scaled)
    if temperature > 0:
        cumulative = np.cumsum(weights, -1)
        threshold = rng.random(len(weights), dtype=f4) * cumulative[:, -1]
        tokens = np.minimum((cumulative <= threshold[:, None]).sum(-1), weights.shape[1] - 1)
    else:
        tokens = scaled.argmax(-1)
    rows = np.arange(len(tokens))
    return tokens, scaled[rows, tokens] - np.log(weights.sum(-1))


class _GroupCache:
    """Keys and values of P prompts (shared by their groups) and of the B = P*G completions so far."""

    def __init__(self, model: Qwen3, prompts: Ints, pad: Ints, group: int, room: int) -> None:
        self.model = model
        count, self.prompt_length = prompts.shape
        self.prompts, self.group = count, group
        repeats = model.heads // model.kv_heads
        layout = Layout.of(pad, self.prompt_length, 1, 0, model.kv_heads, repeats, model.head_dim)
        self.key_mask = layout.key_mask
        self.positions = np.repeat(self.prompt_length - pad, group)
        self.length = 0
        shape = (count * group, model.kv_heads, room, model.head_dim)
        self.keys = [np.zeros(shape, f4) for _ in model.weights.blocks]
        self.values = [np.zeros(shape, f4) for _ in model.weights.blocks]
        self.prompt_keys: list[Array] = []
        self.prompt_values: list[Array] = []
        self.first_logits = self._prefill(prompts, layout)

    def _prefill(self, prompts: Ints, layout: Layout) -> Array:
        model = self.model
        cos, sin = model.rotary(layout.positions)
        x = model.weights.embed[prompts.ravel()]
        for block in model.weights.blocks:
            q, k, v, _ = model.project(block, x, cos, sin)
            mixed, tape = attend(q, k, v, layout)
            self.prompt_keys.append(np.ascontiguousarray(tape.keys[0].swapaxes(-1, -2)))
            self.prompt_values.append(tape.values[0])
            x, _ = model.feed_forward(block, x + mixed.reshape(len(x), -1) @ block.out.T)
        last = x.reshape(*prompts.shape, -1)[:, -1]
        return np.repeat(model.head(last)[0], self.group, 0)

    def advance(self, tokens: Ints) -> Array:
        """Append one token [B] to every row; logits [B, V] of the next."""
        model = self.model
        cos, sin = model.rotary(self.positions)
        x = model.weights.embed[tokens]
        for layer, block in enumerate(model.weights.blocks):
            q, k, v, _ = model.project(block, x, cos, sin)
            self.keys[layer][:, :, self.length] = k
            self.values[layer][:, :, self.length] = v
            mixed = self._attend(layer, q)
            x, _ = model.feed_forward(block, x + mixed @ block.out.T)
        self.length += 1
        self.positions = self.positions + 1
        return model.head(x)[0]

    def _attend(self, layer: int, q: Array) -> Array:
        """``q`` [B,H,D] on the shared prompt and on the row's own past: [B, H*D]."""
        model, at, seen = self.model, self.prompt_length, self.length + 1
        P, G, K, D = self.prompts, self.group, model.kv_heads, model.head_dim
        R = model.heads // K
        grouped = q.reshape(P, G, K, R, D).transpose(0, 2, 1, 3, 4).reshape(P, K, G * R, D)
        keys, values = self.keys[layer][:, :, :seen], self.values[layer][:, :, :seen]
        scores = np.empty((P, K, G * R, at + seen), f4)
        np.matmul(grouped, self.prompt_keys[layer], out=scores[..., :at])
        scores[..., :at] += self.key_mask
        own = np.einsum("bkrd,bktd->bkrt", q.reshape(P * G, K, R, D), keys)
        scores[..., at:] = own.reshape(P, G, K, R, seen).transpose(0, 2, 1, 3, 4).reshape(P, K, G * R, seen)
        softmax_(scores)
        shared = scores[..., :at] @ self.prompt_values[layer]
        mixed = shared.reshape(P, K, G, R, D).transpose(0, 2, 1, 3, 4).reshape(P * G, K, R, D)
        own = scores[..., at:].reshape(P, K, G, R, seen).transpose(0, 2, 1, 3, 4).reshape(P * G, K, R, seen)
        mixed = mixed + np.einsum("bkrt,bktd->bkrd", own, values)
        return mixed.reshape(P * G, -1)


def sample_groups(
    model: Qwen3,
    prompts: list[list[int]],
    group_size: int,
    max_tokens: int,
    temperature: float,
    rng: np.random.Generator,
    eos: int,
) -> Samples:
    """Sample ``group_size`` completions of each prompt; stops when every row has ended.

    Args:
        model: The policy; only read.
        prompts: P token id lists, none empty, of any lengths.
        group_size: Completions per prompt (G).
        max_tokens: Cap on the length of a completion, the end token included.
        temperature: 1 samples the model's own law, 0 is greedy.
        rng: Source of all randomness.
        eos: Id that ends a row; it counts as sampled.

    Raises:
        PolicyError: an empty prompt, or prompt plus completion exceed the model's context.
    """
    longest = max(map(len, prompts), default=0)
    if not prompts or not all(prompts):
        raise PolicyError("sample_groups needs at least one prompt and no empty one.")
    if longest + max_tokens > model.config.max_position_embeddings + 1:
        raise PolicyError(
            f"A prompt of {longest} tokens and up to {max_tokens} new ones exceed the model's context of "
            f"{model.config.max_position_embeddings}. Shorten the prompt or lower max_tokens."
        )
    ids, pad = left_pad(prompts, model.config.pad_token_id)
    cache = _GroupCache(model, ids, pad, group_size, max_tokens)
    rows = len(prompts) * group_size
    tokens = np.full((rows, max_tokens), model.config.pad_token_id, np.int64)
    logprobs = np.zeros((rows, max_tokens), f4)
    lengths = np.zeros(rows, np.int64)
    alive = np.ones(rows, bool)
    logits = cache.first_logits
    for step in range(max_tokens):
        drawn, logprob = draw(logits, temperature, rng)
        tokens[alive, step] = drawn[alive]
        logprobs[alive, step] = logprob[alive]
        lengths += alive
        alive &= drawn != eos
        if step + 1 == max_tokens or not alive.any():
            break
        logits = cache.advance(tokens[:, step])
    used = int(lengths.max())
    return Samples(tokens[:, :used], logprobs[:, :used], lengths)
