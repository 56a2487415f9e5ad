"""The hand-written backward agrees with finite differences, tensor by tensor."""

from __future__ import annotations

import numpy as np
import pytest

from ai_trains_ai.pico.grpo import PolicyBatch, policy_gradient
from ai_trains_ai.pico.model import Qwen3, left_pad
from ai_trains_ai.pico.supervised import completion_arrays, supervised_gradient

EPS = 4e-3


def slope(loss, model: Qwen3, direction: np.ndarray) -> float:
    """Central difference of ``loss`` along ``direction``."""
    start = model.flat.copy()
    model.flat[:] = start + np.float32(EPS) * direction
    above = loss()
    model.flat[:] = start - np.float32(EPS) * direction
    below = loss()
    model.flat[:] = start
    return (above - below) / (2 * EPS)


def assert_gradient(model: Qwen3, loss) -> None:
    """Along each tensor's own gradient the loss must rise by that gradient's norm."""
    model.grad[:] = 0
    loss()
    gradient = model.grad.copy()
    for name, _, view in model.named_views(gradient):
        direction = np.zeros_like(gradient)
        target = next(v for n, _, v in model.named_views(direction) if n == name)
        norm = float(np.linalg.norm(view))
        assert norm > 1e-4, f"{name} gets no gradient, so this test would say nothing"
        target[:] = view / norm
        assert slope(loss, model, direction) == pytest.approx(norm, rel=0.02, abs=2e-4), name


def test_supervised_gradient_of_every_tensor(tiny: Qwen3) -> None:
    prompts, pad = left_pad([[5, 6, 7], [8, 9, 10, 11, 12], [3]])
    completions, weights = completion_arrays([[4, 9, 2, 1], [6, 1], [7, 7, 30, 31, 1]])
    weights[0, 0, 1] = 0.25
    assert_gradient(tiny, lambda: supervised_gradient(tiny, prompts, pad, completions, weights))


def test_policy_gradient_of_every_tensor(tiny: Qwen3) -> None:
    rng = np.random.default_rng(0)
    prompts, pad = left_pad([[5, 6, 7], [8, 9, 10, 11, 12]])
    completions = rng.integers(3, 40, (2, 3, 4))
    batch = PolicyBatch(
        prompts,
        pad,
        completions,
        rng.random((2, 3, 4)) < 0.8,
        np.full((2, 3, 4), -3.5, np.float32),
        rng.standard_normal((2, 3)).astype(np.float32),
    )
    # wide clips: at a kink a finite difference has no meaning
    wide = {"clip_low": 1.0, "clip_high": 1e9}
    assert_gradient(tiny, lambda: policy_gradient(tiny, batch, temperature=0.8, normaliser=6.0, **wide).loss)


def test_gradients_accumulate_over_calls(tiny: Qwen3) -> None:
    prompts, pad = left_pad([[5, 6], [7, 8, 9]])
    completions, weights = completion_arrays([[4, 1], [6, 5, 1]])
    supervised_gradient(tiny, prompts, pad, completions, weights)
    whole = tiny.grad.copy()
    tiny.grad[:] = 0
    for row in (slice(0, 1), slice(1, 2)):
        supervised_gradient(tiny, prompts[row], pad[row], completions[row], weights[row], float(weights.sum()))
    np.testing.assert_allclose(tiny.grad, whole, atol=1e-5)


def test_padding_changes_nothing(tiny: Qwen3) -> None:
    completions = np.array([[[4, 9, 2, 1]]])
    bare, _ = tiny.forward(np.array([[5, 6, 7]]), np.array([0]), completions)
    padded, _ = tiny.forward(np.array([[0, 0, 5, 6, 7]]), np.array([2]), completions)
    np.testing.assert_allclose(padded, bare, atol=1e-5)


def test_prompt_is_shared_by_its_group(tiny: Qwen3) -> None:
    prompt, pad = np.array([[5, 6, 7]]), np.array([0])
    completions = np.random.default_rng(0).integers(3, 40, (1, 4, 5))
    grouped, _ = tiny.forward(prompt, pad, completions)
    apart, _ = tiny.forward(np.repeat(prompt, 4, 0), np.repeat(pad, 4), completions.reshape(4, 1, 5))
    np.testing.assert_allclose(grouped[0], apart[:, 0], atol=1e-5)
