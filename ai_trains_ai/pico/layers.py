"""Primitive layers in float32, each with its hand-written gradient.

A forward function returns its output and what its ``_backward`` needs. No function changes its arguments unless its
name ends in an underscore.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

f4 = np.float32
MASKED = f4(-1e9)
"""Added to a masked attention score: finite, so that a row of a padded query stays finite."""


def rms_norm(x: Array, weight: Array, eps: np.float32) -> tuple[Array, tuple[Array, Array]]:
    """Root-mean-square norm over the last axis. ``x`` [..., d], ``weight`` broadcastable to it."""
    inverse = np.einsum("...i,...i->...", x, x)[..., None]
    inverse *= f4(1.0 / x.shape[-1])
    inverse += eps
    np.sqrt(inverse, out=inverse)
    np.divide(f4(1.0), inverse, out=inverse)
    normed = x * inverse
    return normed * weight, (normed, inverse)


def rms_norm_backward(dy: Array, weight: Array, tape: tuple[Array, Array]) -> tuple[Array, Array]:
    """Gradients of the input and of the weight; the latter summed over all leading axes that ``weight`` lacks."""
    normed, inverse = tape
    letters = "abc"[: weight.ndim]
    flat = (-1, *weight.shape)
    dweight = np.einsum(f"n{letters},n{letters}->{letters}", dy.reshape(flat), normed.reshape(flat))
    dx = dy * weight
    along = np.einsum("...i,...i->...", dx, normed)[..., None]
    along *= f4(1.0 / normed.shape[-1])
    dx -= normed * along
    dx *= inverse
    return dx, dweight


def rotary_tables(positions: int, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosine and sine [positions, head_dim]; the sign of ``rotate_half`` is folded into the sine."""
    angles = np.outer(np.arange(positions), 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim))
    angles = np.concatenate([angles, angles], -1)
    sign = np.repeat([-1.0, 1.0], head_dim // 2)
    return np.cos(angles).astype(f4), (np.sin(angles) * sign).astype(f4)


def _swap_halves(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.concatenate([x[..., half:], x[..., :half]], -1)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary position embedding of ``x`` [n, heads, head_dim]; tables [n, 1, head_dim] or of the shape of ``x``."""
    y = _swap_halves(x)
    y *= sin
    y += x * cos
    return y


def rotate_backward(dy: Array, cos: Array, sin: Array) -> Array:
    """A rotation's gradient is the rotation back: swapping the halves flips the sign of the sine."""
    dx = _swap_halves(dy * sin)
    dx += dy * cos
    return dx


def softmax_(scores: Array) -> Array:
    """Softmax over the last axis, in place."""
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores


def softmax_backward(probabilities: Array, dprobabilities: Array) -> Array:
    """Gradient of the scores."""
    along = np.einsum("...i,...i->...", dprobabilities, probabilities)[..., None]
    scores = dprobabilities - along
    scores *= probabilities
    return scores


def swiglu(gate_up: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    """``silu(gate) * up`` of ``gate_up`` [n, 2f] -> [n, f]."""
    width = gate_up.shape[1] // 2
    gate = gate_up[:, :width]
    sigmoid = np.negative(gate)
    # exp overflows to inf for gates below -88, which gives the right limit 0; only the warning is unwanted
    with np.errstate(over="ignore"):
        np.exp(sigmoid, out=sigmoid)
    sigmoid += f4(1.0)
    np.divide(f4(1.0), sigmoid, out=sigmoid)
    active = gate * sigmoid
    return active * gate_up[:, width:], (gate_up, sigmoid, active)


def swiglu_backward(dy: Array, tape: tuple[Array, Array, Array]) -> Array:
    """Gradient of ``gate_up`` [n, 2f]."""
    gate_up, sigmoid, active = tape
    width = dy.shape[1]
    dgate_up = np.empty_like(gate_up)
    np.multiply(dy, active, out=dgate_up[:, width:])
    slope = active * sigmoid  # silu' = sigmoid + silu * (1 - sigmoid)
    np.subtract(active, slope, out=slope)
    slope += sigmoid
    slope *= gate_up[:, width:]
    slope *= dy
    dgate_up[:, :width] = slope
    return dgate_up


def log_softmax(logits: Array, temperature: float = 1.0) -> Array:
    """Log-probabilities over the last axis of ``logits / temperature``."""
    scaled = logits * f4(1.0 / temperature)
    scaled -= scaled.max(-1, keepdims=True)
    scaled -= np.log(np.exp(scaled).sum(-1, keepdims=True))
    return scaled
