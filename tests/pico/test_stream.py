"""Continuous batching: whatever joins, grows and leaves, logits are those of the full forward."""

from __future__ import annotations

import numpy as np
import pytest

from ai_trains_ai.errors import PolicyError
from ai_trains_ai.pico.model import Qwen3
from ai_trains_ai.pico.stream import StreamDecoder

TOLERANCE = 1e-4


def full_logits(model: Qwen3, ids: list[int]) -> np.ndarray:
    """Logits [V] after ``ids`` by the training forward."""
    hidden, _ = model.forward(np.array([ids[:1]]), np.array([0]), np.array([[[*ids[1:], 0]]]))
    return model.head(hidden[0, 0])[0][-1]


def test_rows_that_join_grow_and_leave(tiny: Qwen3) -> None:
    """A random schedule of all operations, checked against the full forward after each."""
    rng = np.random.default_rng(0)
    decoder, rows = StreamDecoder(tiny), {}
    seen = {"open": 0, "feed": 0, "close": 0, "advance": 0}

    def some(limit: int) -> list[int]:
        return rng.integers(3, 40, rng.integers(1, limit)).tolist()

    for _ in range(160):
        action = rng.choice(["open", "feed", "close", "advance", "advance"])
        room = [row for row, ids in rows.items() if len(ids) < 26]
        if action == "open" and len(rows) < 6:
            known = list(rows.values())[rng.integers(len(rows))] if rows and rng.random() < 0.5 else []
            ids = known[: rng.integers(1, 12)] + some(6)
            row = decoder.open(ids)
            rows[row] = ids
            changed = {row: decoder.logits(row)}
        elif action == "feed" and room:
            row, more = int(rng.choice(room)), some(5)
            changed = {row: decoder.feed(row, more)}
            rows[row] = rows[row] + more
        elif action == "close" and len(rows) > 2:
            row = int(rng.choice(list(rows)))
            decoder.close(row)
            del rows[row]
            changed = {}
        elif action == "advance" and room:
            chosen = rng.permutation(room)[: rng.integers(1, len(room) + 1)]
            tokens = rng.integers(3, 40, len(chosen))
            changed = dict(zip(chosen.tolist(), decoder.advance(chosen, tokens), strict=True))
            for row, token in zip(chosen.tolist(), tokens.tolist(), strict=True):
                rows[row] = [*rows[row], token]
        else:
            continue
        seen[action] += 1
        for row, logits in changed.items():
            np.testing.assert_allclose(logits, full_logits(tiny, rows[row]), atol=TOLERANCE)
            np.testing.assert_array_equal(decoder.logits(row), logits)
        for row, ids in rows.items():
            assert decoder.ids(row) == ids
            assert decoder.length(row) == len(ids)
    assert min(seen.values()) > 5


def test_a_known_beginning_is_not_computed_again(tiny: Qwen3, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, computed = StreamDecoder(tiny), []
    extend = decoder._extend
    monkeypatch.setattr(decoder, "_extend", lambda at, ids: (computed.append(len(ids)), extend(at, ids))[1])
    first = decoder.open([5, 6, 7, 8])
    second = decoder.open([5, 6, 7, 8])
    third = decoder.open([5, 6, 9])
    assert computed == [4, 1, 1]
    np.testing.assert_allclose(decoder.logits(second), decoder.logits(first), atol=TOLERANCE)
    np.testing.assert_allclose(decoder.logits(third), full_logits(tiny, [5, 6, 9]), atol=TOLERANCE)


def test_a_closed_row_still_lends_its_beginning(tiny: Qwen3, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, computed = StreamDecoder(tiny), []
    decoder.close(decoder.open([5, 6, 7, 8]))
    extend = decoder._extend
    monkeypatch.setattr(decoder, "_extend", lambda at, ids: (computed.append(len(ids)), extend(at, ids))[1])
    row = decoder.open([5, 6, 7, 9, 10])
    assert computed == [2]
    np.testing.assert_allclose(decoder.logits(row), full_logits(tiny, [5, 6, 7, 9, 10]), atol=TOLERANCE)


def test_overflow_leaves_every_row_as_it_was(tiny: Qwen3) -> None:
    decoder = StreamDecoder(tiny)
    short, long = decoder.open([5, 6]), decoder.open([7] * 32)
    with pytest.raises(PolicyError, match="context of 32"):
        decoder.advance([short, long], [3, 3])
    with pytest.raises(PolicyError, match="context of 32"):
        decoder.feed(short, [4] * 31)
    with pytest.raises(PolicyError, match="context of 32"):
        decoder.open([4] * 33)
    assert decoder.ids(short) == [5, 6]
    np.testing.assert_allclose(decoder.advance([short], [3])[0], full_logits(tiny, [5, 6, 3]), atol=TOLERANCE)


def test_misuse_is_refused(tiny: Qwen3) -> None:
    decoder = StreamDecoder(tiny)
    row = decoder.open([5])
    with pytest.raises(PolicyError, match="at least one token"):
        decoder.open([])
    with pytest.raises(PolicyError, match="different rows"):
        decoder.advance([row, row], [3, 4])
    decoder.close(row)
    with pytest.raises(PolicyError, match=f"no open row {row}"):
        decoder.feed(row, [3])
    assert decoder.advance([], []).shape == (0, tiny.config.vocab_size)
