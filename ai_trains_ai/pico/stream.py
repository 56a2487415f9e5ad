"""Continuous batching: rows of different lengths that join, grow and leave, on one key/value cache.

Rows live in slots. Slots that advance together are kept at the front of the cache, so that a step works on a view and
not on a copy; the keys of a closed row stay where they are until the slot is needed, so that a later prompt with the
same beginning can take them over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ai_trains_ai.errors import PolicyError
from ai_trains_ai.pico.layers import MASKED, Array, Ints, f4, softmax_
from ai_trains_ai.pico.model import Qwen3


@dataclass(slots=True)
class _Slot:
    """What one place in the cache holds. ``row`` is ``None`` once closed; ``ids`` are the tokens with valid keys."""

    row: int | None
    ids: list[int]
    logits: Array


class StreamDecoder:
    """Decodes many rows of one frozen model. Not thread-safe; the model must not change while a decoder is in use.

    The log-probabilities of its logits equal those of the training forward (within 1e-4).
    """

    def __init__(self, model: Qwen3) -> None:
        self.model = model
        self.context = model.config.max_position_embeddings
        self._slots: list[_Slot] = []
        self._where: dict[int, int] = {}
        self._next_row = 0
        self._keys = [np.zeros((0, model.kv_heads, model.head_dim, 0), f4) for _ in model.weights.blocks]
        self._values = [np.zeros((0, model.kv_heads, 0, model.head_dim), f4) for _ in model.weights.blocks]

    # ------------------------------------------------------------------ rows

    def open(self, ids: Sequence[int]) -> int:
        """Start a row with a prompt and return its handle; `logits` then predicts the next token.

        A beginning that another row (open, or closed and not yet overwritten) already has is copied, not computed.

        Raises:
            PolicyError: the prompt is empty or longer than the context.
        """
        if not ids:
            raise PolicyError("A row needs a prompt of at least one token.")
        self._check_room(0, len(ids))
        prompt = [int(i) for i in ids]
        shared, source = max(((_common(slot.ids, prompt), at) for at, slot in enumerate(self._slots)), default=(0, -1))
        shared = min(shared, len(prompt) - 1)  # the last token is always computed: its logits are wanted
        target = self._free_slot(source if shared else -1)
        if shared and target != source:
            for keys, values in zip(self._keys, self._values, strict=True):
                keys[target, :, :, :shared] = keys[source, :, :, :shared]
                values[target, :, :shared] = values[source, :, :shared]
        row, self._next_row = self._next_row, self._next_row + 1
        self._slots[target] = _Slot(row, prompt[:shared], np.zeros(0, f4))
        self._where[row] = target
        self.feed(row, prompt[shared:])
        return row

    def feed(self, row: int, ids: Sequence[int]) -> Array:
        """Append several tokens to a row at once; logits [V] of the next token.

        Raises:
            PolicyError: nothing to append, no such row, or the context is full; the row is then unchanged.
        """
        slot = self._slots[self._at(row)]
        if not ids:
            raise PolicyError("feed needs at least one token.")
        self._check_room(len(slot.ids), len(ids))
        self._reserve(len(self._slots), len(slot.ids) + len(ids))
        slot.logits = self._extend(self._where[row], np.asarray(ids, np.int64))
        slot.ids += [int(i) for i in ids]
        return slot.logits

    def advance(self, rows: Ints | Sequence[int], tokens: Ints | Sequence[int]) -> Array:
        """Append one token to each listed row (all different); logits [n, V] in the order of ``rows``.

        Raises:
            PolicyError: a row is unknown, listed twice or full; no row is then changed.
        """
        listed = [int(row) for row in rows]
        new = np.asarray(tokens, np.int64)
        if len(set(listed)) != len(listed) or len(new) != len(listed):
            raise PolicyError(
                f"advance needs different rows and a token for each, got rows {listed} and {len(new)} tokens."
            )
        for row in listed:
            self._check_room(self.length(row), 1)
        if not listed:
            return np.zeros((0, self.model.config.vocab_size), f4)
        self._bring_to_front(set(listed))
        order = np.array([self._where[row] for row in listed])
        by_slot = np.empty_like(new)
        by_slot[order] = new
        logits = self._step(by_slot)[order]
        for row, token, out in zip(listed, new.tolist(), logits, strict=True):
            slot = self._slots[self._where[row]]
            slot.ids.append(token)
            slot.logits = out
        return logits

    def logits(self, row: int) -> Array:
        """Logits [V] after the row's last token."""
        return self._slots[self._at(row)].logits

    def length(self, row: int) -> int:
        """Tokens in the row so far."""
        return len(self._slots[self._at(row)].ids)

    def ids(self, row: int) -> list[int]:
        """A copy of the row's tokens."""
        return list(self._slots[self._at(row)].ids)

    def close(self, row: int) -> None:
        """End a row; its slot is free for another."""
        self._slots[self._at(row)].row = None
        del self._where[row]

    # ------------------------------------------------------------------ slots

    def _at(self, row: int) -> int:
        if row not in self._where:
            raise PolicyError(f"There is no open row {row}; it was closed, or never opened by this decoder.")
        return self._where[row]

    def _check_room(self, have: int, more: int) -> None:
        if have + more > self.context:
            raise PolicyError(f"{have} tokens and {more} more exceed the model's context of {self.context}.")

    def _free_slot(self, wanted: int) -> int:
        """A closed slot: ``wanted`` if it is one, else the one with the least to lose, else a new one."""
        if wanted >= 0 and self._slots[wanted].row is None:
            return wanted
        closed = [at for at, slot in enumerate(self._slots) if slot.row is None]
        if closed:
            return min(closed, key=lambda at: len(self._slots[at].ids))
        self._slots.append(_Slot(None, [], np.zeros(0, f4)))
        self._reserve(len(self._slots), 1)
        return len(self._slots) - 1

    def _reserve(self, slots: int, length: int) -> None:
        """Grow the cache to hold ``slots`` rows of ``length`` tokens; at least doubling, so that growth is rare."""
        have_slots, _, _, have_length = self._keys[0].shape
        if slots <= have_slots and length <= have_length:
            return
        slots = have_slots if slots <= have_slots else max(slots, 2 * have_slots)
        length = have_length if length <= have_length else min(self.context, max(length, 2 * have_length))
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            _, heads, dim, _ = keys.shape
            grown_keys, grown_values = (
                np.zeros((slots, heads, dim, length), f4),
                np.zeros((slots, heads, length, dim), f4),
            )
            grown_keys[:have_slots, :, :, :have_length] = keys
            grown_values[:have_slots, :, :have_length] = values
            self._keys[layer], self._values[layer] = grown_keys, grown_values

    def _bring_to_front(self, rows: set[int]) -> None:
        """Swap slots so that exactly ``rows`` are in the first ones. Rare: the same rows mostly advance together."""
        strays = [at for at in range(len(rows)) if self._slots[at].row not in rows]
        behind = [self._where[row] for row in rows if self._where[row] >= len(rows)]
        for a, b in zip(strays, sorted(behind), strict=True):
            for array in (*self._keys, *self._values):
                array[[a, b]] = array[[b, a]]
            self._slots[a], self._slots[b] = self._slots[b], self._slots[a]
            for at in (a, b):
                row = self._slots[at].row
                if row is not None:
                    self._where[row] = at

    # ------------------------------------------------------------------ the model

    def _extend(self, at: int, ids: Ints) -> Array:
        """Several tokens of one slot on top of its past: logits [V] of the last."""
        model, have, new = self.model, len(self._slots[at].ids), len(ids)
        K, D, R = model.kv_heads, model.head_dim, model.heads // model.kv_heads
        seen = have + new
        cos, sin = model.rotary(np.arange(have, seen))
        causal = np.triu(np.full((new, seen), MASKED, f4), 1 + have)
        x = model.weights.embed[ids]
        for layer, block in enumerate(model.weights.blocks):
            q, k, v, _ = model.project(block, x, cos, sin)
            keys, values = self._keys[layer][at, :, :, :seen], self._values[layer][at, :, :seen]
            keys[:, :, have:] = k.transpose(1, 2, 0)
            values[:, have:] = v.transpose(1, 0, 2)
            grouped = q.reshape(new, K, R, D).transpose(1, 2, 0, 3)  # [K,R,n,D]
            scores = np.matmul(grouped, keys[:, None]) + causal
            mixed = np.matmul(softmax_(scores), values[:, None]).transpose(2, 0, 1, 3).reshape(new, -1)
            x, _ = model.feed_forward(block, x + mixed @ block.out.T)
        return model.head(x[-1:])[0][0]

    def _step(self, tokens: Ints) -> Array:
        """One token for each of the first slots: logits [n, V]."""
        model, count = self.model, len(tokens)
        K, D, R = model.kv_heads, model.head_dim, model.heads // model.kv_heads
        have = np.array([len(slot.ids) for slot in self._slots[:count]])
        seen = int(have.max()) + 1
        self._reserve(len(self._slots), seen)
        mask = np.where(np.arange(seen)[None] <= have[:, None], f4(0), MASKED)[:, None, None]
        cos, sin = model.rotary(have)
        slots = np.arange(count)
        x = model.weights.embed[tokens]
        for layer, block in enumerate(model.weights.blocks):
            q, k, v, _ = model.project(block, x, cos, sin)
            self._keys[layer][slots, :, :, have] = k
            self._values[layer][slots, :, have] = v
            keys, values = self._keys[layer][:count, :, :, :seen], self._values[layer][:count, :, :seen]
            scores = np.matmul(q.reshape(count, K, R, D), keys)
            scores += mask
            mixed = np.matmul(softmax_(scores), values).reshape(count, -1)
            x, _ = model.feed_forward(block, x + mixed @ block.out.T)
        return model.head(x)[0]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))
