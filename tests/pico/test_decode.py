"""Samplers agree with the training forward, and draw what they say."""

from __future__ import annotations

import numpy as np
import pytest

from ai_trains_ai.errors import PolicyError
from ai_trains_ai.pico.decode import draw, sample_groups
from ai_trains_ai.pico.layers import log_softmax
from ai_trains_ai.pico.model import Qwen3, left_pad

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [3]]
EOS = 1


def trainer_logprobs(model: Qwen3, prompts: list[list[int]], tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities [B, L] of the training forward."""
    length = tokens.shape[1]
    hidden, _ = model.forward(*left_pad(prompts), tokens.reshape(len(prompts), -1, length))
    logits, _ = model.head(hidden.reshape(-1, hidden.shape[-1]))
    logprobs = log_softmax(logits, temperature)
    return logprobs[np.arange(tokens.size), tokens.ravel()].reshape(tokens.shape)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.8])
def test_sampled_logprobs_are_those_of_the_trainer(tiny: Qwen3, temperature: float) -> None:
    samples = sample_groups(tiny, PROMPTS, 4, 8, temperature, np.random.default_rng(0), EOS)
    expected = trainer_logprobs(tiny, PROMPTS, samples.tokens, temperature)
    assert samples.mask.sum() > 40
    np.testing.assert_allclose(samples.logprobs[samples.mask], expected[samples.mask], atol=1e-4)


def test_a_row_ends_with_eos_and_is_padded_after(tiny: Qwen3) -> None:
    samples = sample_groups(tiny, PROMPTS, 64, 8, 1.0, np.random.default_rng(0), EOS)
    ended = samples.lengths < samples.tokens.shape[1]
    assert ended.any()
    for row, length in zip(samples.tokens[ended], samples.lengths[ended], strict=True):
        assert row[length - 1] == EOS
        assert (row[: length - 1] != EOS).all()
        assert (row[length:] == tiny.config.pad_token_id).all()
    assert (samples.logprobs[~samples.mask] == 0).all()


def test_sampling_stops_when_all_rows_have_ended(tiny: Qwen3) -> None:
    favourite = int(draw(tiny.head(tiny.forward(*left_pad([[5]]), np.array([[[0]]]))[0][0, 0])[0], 0.0, None)[0][0])
    samples = sample_groups(tiny, [[5]], 3, 10, 0.0, np.random.default_rng(0), eos=favourite)
    assert samples.tokens.shape == (3, 1)
    assert (samples.lengths == 1).all()


def test_temperature_zero_is_greedy(tiny: Qwen3) -> None:
    samples = sample_groups(tiny, PROMPTS, 2, 6, 0.0, np.random.default_rng(0), EOS)
    hidden, _ = tiny.forward(*left_pad(PROMPTS), samples.tokens.reshape(3, 2, -1))
    best = tiny.head(hidden.reshape(-1, hidden.shape[-1]))[0].argmax(-1).reshape(samples.tokens.shape)
    assert (best[samples.mask] == samples.tokens[samples.mask]).all()


def test_same_seed_same_sample(tiny: Qwen3) -> None:
    first, second, other = (sample_groups(tiny, PROMPTS, 4, 8, 1.0, np.random.default_rng(s), EOS) for s in (3, 3, 4))
    assert (first.tokens == second.tokens).all()
    assert first.tokens.shape != other.tokens.shape or (first.tokens != other.tokens).any()


def test_draw_follows_the_law() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2, 1e-12], np.float32))
    tokens, logprobs = draw(np.tile(logits, (20_000, 1)), 1.0, np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20_000, [0.5, 0.3, 0.2, 0.0], atol=0.015)
    np.testing.assert_allclose(logprobs, logits[tokens], atol=1e-5)


def test_empty_prompt_and_overflow_are_refused(tiny: Qwen3) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(PolicyError, match="no empty one"):
        sample_groups(tiny, [[5], []], 2, 4, 1.0, rng, EOS)
    with pytest.raises(PolicyError, match="context of 32"):
        sample_groups(tiny, [[5] * 30], 2, 4, 1.0, rng, EOS)
