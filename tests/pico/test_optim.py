"""Optimizers against their formulas written out in float64, and the schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from ai_trains_ai.errors import ConfigurationError, UnknownName
from ai_trains_ai.pico.config import Config
from ai_trains_ai.pico.model import Qwen3
from ai_trains_ai.pico.optim import OPTIMIZERS, SGD, AdamW, Muon, SignSGD, optimizer, orthogonalise, schedule

LR = 0.03
STEPS = 5


@pytest.fixture
def model() -> Qwen3:
    config = Config(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=6,
        max_position_embeddings=8,
    )
    return Qwen3.initialise(config, np.random.default_rng(0))


def gradients(size: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).standard_normal(size, np.float32) for seed in range(STEPS)]


def run(opt, model: Qwen3) -> np.ndarray:
    for gradient in gradients(model.flat.size):
        model.grad[:] = gradient
        opt.step(LR)
    return model.flat


def reference(model: Qwen3, update: Callable[[int, np.ndarray], np.ndarray], decay: float = 0.0) -> np.ndarray:
    weights = model.flat.astype(np.float64)
    for number, gradient in enumerate(gradients(weights.size), 1):
        weights = weights * (1 - LR * decay) - LR * update(number, gradient.astype(np.float64))
    return weights


def adam_formula(b1: float, b2: float, eps: float) -> Callable[[int, np.ndarray], np.ndarray]:
    moments = [0.0, 0.0]

    def update(number: int, g: np.ndarray) -> np.ndarray:
        moments[0] = b1 * moments[0] + (1 - b1) * g
        moments[1] = b2 * moments[1] + (1 - b2) * g * g
        return (moments[0] / (1 - b1**number)) / (np.sqrt(moments[1] / (1 - b2**number)) + eps)

    return update


def test_adamw_with_decoupled_decay(model: Qwen3) -> None:
    expected = reference(model, adam_formula(0.8, 0.9, 1e-6), decay=0.2)
    got = run(AdamW(model, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, max_norm=None), model)
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_with_momentum(model: Qwen3, nesterov: bool) -> None:
    velocity = [0.0]

    def update(_: int, g: np.ndarray) -> np.ndarray:
        velocity[0] = 0.7 * velocity[0] + g
        return g + 0.7 * velocity[0] if nesterov else velocity[0]

    expected = reference(model, update)
    np.testing.assert_allclose(
        run(SGD(model, momentum=0.7, nesterov=nesterov, max_norm=None), model), expected, atol=2e-6
    )


def test_sign_sgd_moves_by_the_learning_rate(model: Qwen3) -> None:
    expected = reference(model, lambda _, g: np.sign(g), decay=0.1)
    np.testing.assert_allclose(run(SignSGD(model, weight_decay=0.1), model), expected, atol=2e-6)


def test_muon_orthogonalises_matrices_and_adapts_the_rest(model: Qwen3) -> None:
    start, gradient = model.flat.copy(), gradients(model.flat.size)[0]
    twin = model.clone()
    model.grad[:], twin.grad[:] = gradient, gradient
    Muon(model, momentum=0.9, matrix_ratio=2.0, max_norm=None).step(LR)
    AdamW(twin, max_norm=None).step(LR)
    moved, adam = start - model.flat, start - twin.flat
    for (name, shape, step), (_, _, expected), (_, _, g) in zip(
        *(model.named_views(buffer) for buffer in (moved, adam, gradient)), strict=True
    ):
        if name == "embed" or len(shape) == 1:
            np.testing.assert_allclose(step, expected, atol=1e-6, err_msg=name)
            continue
        # queries (8 rows), keys (4), values (4); gate and up (6 each)
        cuts = {"layers.0.qkv": [8, 12], "layers.0.gate_up": [6]}.get(name, [])
        for part, source in zip(np.split(step, cuts), np.split(g, cuts), strict=True):
            scale = math.sqrt(max(1.0, source.shape[0] / source.shape[1]))
            np.testing.assert_allclose(part, LR * 2.0 * scale * orthogonalise(source), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_orthogonalise_keeps_directions_and_levels_singular_values(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).standard_normal(shape, np.float32)
    result = orthogonalise(matrix)
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    diagonal = u.T @ result @ vt.T
    assert ((np.diag(diagonal) > 0.6) & (np.diag(diagonal) < 1.3)).all()
    np.testing.assert_allclose(diagonal - np.diag(np.diag(diagonal)), 0, atol=0.02)


def test_gradient_is_clipped_by_its_global_norm_and_zeroed(model: Qwen3) -> None:
    start = model.flat.copy()
    model.grad[:] = 3.0
    update = SGD(model, momentum=0.0, nesterov=False, max_norm=1.0).step(1.0)
    assert update.grad_norm == pytest.approx(3.0 * math.sqrt(model.flat.size), rel=1e-4)
    assert np.linalg.norm(start - model.flat) == pytest.approx(1.0, rel=1e-4)
    assert not update.skipped
    assert (model.grad == 0).all()


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_reported_and_skipped(model: Qwen3, kind: str, bad: float) -> None:
    opt, start = optimizer(kind, model, weight_decay=0.1), model.flat.copy()
    model.grad[3] = bad
    before = opt.state()
    assert opt.step(LR).skipped
    np.testing.assert_array_equal(model.flat, start)
    assert (model.grad == 0).all()
    for name, array in opt.state().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_a_resumed_optimizer_goes_on_where_it_stopped(model: Qwen3, kind: str) -> None:
    straight = optimizer(kind, model)
    run(straight, model)
    twin = model.clone()
    resumed = optimizer(kind, twin)
    resumed.load_state(straight.state())
    np.testing.assert_array_equal(run(straight, model), run(resumed, twin))


def test_a_state_of_another_kind_is_refused(model: Qwen3) -> None:
    with pytest.raises(ConfigurationError, match="does not fit AdamW"):
        AdamW(model).load_state(SGD(model).state())


def test_unknown_optimizer_suggests_one(model: Qwen3) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'adamw'"):
        optimizer("adam", model)


def factors(kind: str, steps: int, **options) -> list[float]:
    return [round(schedule(kind, step, steps, **options), 4) for step in range(steps)]


def test_constant_schedule_warms_up() -> None:
    assert factors("constant", 5) == [1.0] * 5
    assert factors("constant", 5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_schedule_falls_over_its_last_steps() -> None:
    assert factors("linear", 5) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert factors("linear", 6, warmup_steps=1, decay_steps=3, min_lr_ratio=0.2) == [0.5, 1.0, 1.0, 1.0, 0.6, 0.2]


def test_cosine_schedule_falls_from_the_warm_up_to_the_floor() -> None:
    assert factors("cosine", 5) == [1.0, 0.8536, 0.5, 0.1464, 0.0]
    assert factors("cosine", 6, warmup_steps=1, min_lr_ratio=0.1) == [0.5, 1.0, 0.8682, 0.55, 0.2318, 0.1]


def test_schedules_refuse_what_they_cannot_do() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'cosine'"):
        schedule("cosin", 0, 10)
    with pytest.raises(ConfigurationError, match="don't fit"):
        schedule("linear", 0, 10, warmup_steps=5, decay_steps=6)
    with pytest.raises(ConfigurationError, match="don't fit"):
        schedule("cosine", 0, 10, warmup_steps=11)
