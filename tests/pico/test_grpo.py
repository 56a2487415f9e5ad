"""Group advantages and the clipped importance-sampling objective."""

from __future__ import annotations

import numpy as np
import pytest

from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.pico.decode import sample_groups
from ai_trains_ai.pico.grpo import PolicyBatch, group_advantages, policy_gradient
from ai_trains_ai.pico.model import Qwen3, left_pad

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
GROUP = 4


def sampled(model: Qwen3, advantages: np.ndarray | None = None, temperature: float = 1.0) -> PolicyBatch:
    samples = sample_groups(model, PROMPTS, GROUP, 6, temperature, np.random.default_rng(0), 1)
    shape = (len(PROMPTS), GROUP, samples.tokens.shape[1])
    if advantages is None:
        advantages = np.random.default_rng(1).standard_normal(shape[:2]).astype(np.float32)
    return PolicyBatch(
        *left_pad(PROMPTS),
        samples.tokens.reshape(shape),
        samples.mask.reshape(shape),
        samples.logprobs.reshape(shape),
        advantages,
    )


def shifted(batch: PolicyBatch, by: float) -> PolicyBatch:
    """As if the sampler had given each token ``by`` nats less: the ratio becomes ``exp(by)``."""
    return PolicyBatch(
        batch.prompts, batch.pad, batch.completions, batch.mask, batch.logprobs - np.float32(by), batch.advantages
    )


def test_advantages_are_rewards_less_their_group_mean() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 3.0]])
    np.testing.assert_allclose(group_advantages(rewards, False), [[0.5, -0.5, -0.5, 0.5], [-0.75] * 3 + [2.25]])
    normalised = group_advantages(rewards)
    np.testing.assert_allclose(normalised.mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(normalised.std(1), 1, atol=1e-3)


@pytest.mark.parametrize("std_normalise", [True, False])
def test_a_degenerate_group_has_advantage_exactly_zero(std_normalise: bool) -> None:
    assert (group_advantages(np.full((2, 3), 0.1), std_normalise) == 0).all()


def test_on_policy_statistics(tiny: Qwen3) -> None:
    batch = sampled(tiny, temperature=0.7)
    stats = policy_gradient(tiny, batch, temperature=0.7, normaliser=10.0)
    assert stats.tokens == batch.mask.sum()
    assert stats.ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-3)
    assert stats.kl == pytest.approx(0.0, abs=1e-5)
    assert stats.clipped == 0.0
    weights = np.broadcast_to(batch.advantages[:, :, None], batch.mask.shape)
    assert stats.loss == pytest.approx(-float(weights[batch.mask].sum()) / 10.0, abs=1e-3)


def test_entropy_and_kl_of_a_known_law(tiny: Qwen3) -> None:
    tiny.weights.norm[:] = 0  # all logits zero: the uniform law
    batch = sampled(tiny)
    stats = policy_gradient(tiny, shifted(batch, 0.1), normaliser=1.0)
    assert stats.entropy == pytest.approx(np.log(tiny.config.vocab_size), rel=1e-4)
    assert stats.kl == pytest.approx(np.exp(0.1) - 1 - 0.1, rel=1e-2)


@pytest.mark.parametrize(
    ("advantage", "shift", "clipped"),
    [(1.0, 0.4, True), (-1.0, 0.4, False), (1.0, -0.4, False), (-1.0, -0.4, True), (1.0, 0.1, False)],
)
def test_the_clip_takes_the_gradient_only_where_it_binds(
    tiny: Qwen3, advantage: float, shift: float, clipped: bool
) -> None:
    batch = sampled(tiny, np.full((len(PROMPTS), GROUP), advantage, np.float32))
    stats = policy_gradient(tiny, shifted(batch, shift), normaliser=10.0)
    assert stats.clipped == (1.0 if clipped else 0.0)
    assert bool((tiny.grad == 0).all()) == clipped
    bound = {1.0: 1.2, -1.0: 0.8}[advantage]
    expected = bound if clipped else np.exp(shift)
    assert stats.loss == pytest.approx(-advantage * expected * stats.tokens / 10.0, rel=1e-3)


def test_clips_may_differ(tiny: Qwen3) -> None:
    batch = shifted(sampled(tiny, np.ones((len(PROMPTS), GROUP), np.float32)), 0.25)
    assert policy_gradient(tiny, batch, clip_high=0.2, normaliser=1.0).clipped == 1.0
    assert policy_gradient(tiny, batch, clip_high=0.3, normaliser=1.0).clipped == 0.0


def test_text_that_was_not_sampled_is_read_but_not_learned(tiny: Qwen3) -> None:
    """Tool text changes what follows (it is in the forward) and gives no term of its own."""
    rng = np.random.default_rng(0)
    completions = rng.integers(3, 40, (1, 1, 5))
    mask = np.array([[[True, False, False, True, True]]])
    base = {"prompts": np.array([[5, 6]]), "pad": np.array([0]), "mask": mask, "advantages": -np.ones((1, 1), "f4")}
    logprobs = np.full((1, 1, 5), -4.0, np.float32)
    first = policy_gradient(tiny, PolicyBatch(completions=completions, logprobs=logprobs, **base), normaliser=1.0)
    gradient = tiny.grad.copy()
    assert (gradient != 0).any()

    garbage = np.where(mask, logprobs, 7.0).astype(np.float32)
    tiny.grad[:] = 0
    second = policy_gradient(tiny, PolicyBatch(completions=completions, logprobs=garbage, **base), normaliser=1.0)
    assert first.tokens == second.tokens == 3
    np.testing.assert_array_equal(tiny.grad, gradient)

    other = completions.copy()
    other[0, 0, 1] = (other[0, 0, 1] + 1) % 30 + 3
    third = policy_gradient(tiny, PolicyBatch(completions=other, logprobs=logprobs, **base), normaliser=1.0)
    assert abs(third.entropy - first.entropy) > 1e-3


def test_a_step_against_the_gradient_raises_the_objective(tiny: Qwen3) -> None:
    batch = sampled(tiny)
    before = policy_gradient(tiny, batch, normaliser=10.0, clip_low=1.0, clip_high=100.0).loss
    tiny.flat -= np.float32(1e-3) * tiny.grad
    assert policy_gradient(tiny, batch, normaliser=10.0, clip_low=1.0, clip_high=100.0).loss < before


def test_an_empty_mask_changes_nothing(tiny: Qwen3) -> None:
    batch = sampled(tiny)
    blank = PolicyBatch(
        batch.prompts, batch.pad, batch.completions, batch.mask & False, batch.logprobs, batch.advantages
    )
    assert policy_gradient(tiny, blank, normaliser=1.0).tokens == 0
    assert (tiny.grad == 0).all()


def test_shapes_that_do_not_belong_together_are_refused(tiny: Qwen3) -> None:
    batch = sampled(tiny)
    with pytest.raises(ConfigurationError, match="don't belong together"):
        PolicyBatch(batch.prompts, batch.pad, batch.completions, batch.mask[:, :, 1:], batch.logprobs, batch.advantages)
    with pytest.raises(ConfigurationError, match="must be positive"):
        policy_gradient(tiny, batch, temperature=0.0, normaliser=1.0)


def test_the_ratio_cap_bounds_tokens_with_a_negative_advantage(tiny: Qwen3) -> None:
    """The plain clip leaves them unbounded: at a ratio of e^3 they would be twenty times the gradient."""
    batch = shifted(sampled(tiny, -np.ones((2, GROUP), np.float32)), 3.0)
    tiny.grad[:] = 0
    policy_gradient(tiny, batch, normaliser=1.0)
    assert np.abs(tiny.grad).max() > 0
    tiny.grad[:] = 0
    assert policy_gradient(tiny, batch, ratio_cap=3.0, normaliser=1.0).clipped == 1.0
    assert np.abs(tiny.grad).max() == 0
    positive = shifted(sampled(tiny, np.ones((2, GROUP), np.float32)), -1.0)
    policy_gradient(tiny, positive, ratio_cap=0.1, normaliser=1.0)
    assert np.abs(tiny.grad).max() > 0  # a positive advantage has the plain clip
    tiny.grad[:] = 0
