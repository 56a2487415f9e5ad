"""Optimizers on a model's flat buffer, and learning-rate schedules.

Every optimizer takes the learning rate per step, clips the gradient by its global norm, applies decoupled weight decay,
reports and skips a gradient that is not finite, and zeroes the gradient afterwards. Names are those of prime-rl.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ai_trains_ai.errors import ConfigurationError, UnknownName
from ai_trains_ai.pico.layers import Array, f4
from ai_trains_ai.pico.model import Qwen3

State = dict[str, np.ndarray]


class Update(NamedTuple):
    """What a step did. ``grad_norm`` is the norm before clipping; ``skipped``: not finite, nothing changed."""

    grad_norm: float
    skipped: bool


class Optimizer(ABC):
    """Owns the moments for one model; changes the model's ``flat`` in place."""

    def __init__(self, model: Qwen3, *, weight_decay: float = 0.0, max_norm: float | None = 1.0) -> None:
        self.model = model
        self.weight_decay = weight_decay
        self.max_norm = max_norm
        self.steps = 0

    def step(self, lr: float) -> Update:
        """Apply the accumulated gradient at learning rate ``lr`` and zero it."""
        grad = self.model.grad
        norm = math.sqrt(float(np.dot(grad, grad)))
        if not math.isfinite(norm):
            grad[:] = 0
            return Update(norm, True)
        if self.max_norm is not None and norm > self.max_norm:
            grad *= f4(self.max_norm / norm)
        self.steps += 1
        if self.weight_decay:
            self.model.flat *= f4(1.0 - lr * self.weight_decay)
        self._apply(lr)
        grad[:] = 0
        return Update(norm, False)

    @abstractmethod
    def _apply(self, lr: float) -> None:
        """Move ``model.flat`` along ``model.grad`` (clipped, finite)."""

    @abstractmethod
    def _moments(self) -> dict[str, Array]:
        """The live arrays to save."""

    def state(self) -> State:
        """Copies of all that a resume needs."""
        return {"steps": np.array(self.steps), **{name: array.copy() for name, array in self._moments().items()}}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` gave.

        Raises:
            ConfigurationError: the state is of another kind of optimizer or of a model of another size.
        """
        moments = self._moments()
        if state.keys() != {"steps", *moments} or any(state[k].shape != v.shape for k, v in moments.items()):
            raise ConfigurationError(f"The saved optimizer state does not fit {type(self).__name__} on this model.")
        self.steps = int(state["steps"])
        for name, array in moments.items():
            array[:] = state[name]


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101)."""

    def __init__(
        self,
        model: Qwen3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float | None = 1.0,
    ) -> None:
        super().__init__(model, weight_decay=weight_decay, max_norm=max_norm)
        self.betas, self.eps = betas, eps
        self.first, self.second = np.zeros_like(model.flat), np.zeros_like(model.flat)

    def _apply(self, lr: float) -> None:
        self.model.flat -= self._direction(lr, self.model.grad)

    def _direction(self, lr: float, grad: Array) -> Array:
        b1, b2 = self.betas
        self.first += f4(1 - b1) * (grad - self.first)
        self.second += f4(1 - b2) * (grad * grad - self.second)
        scale = np.sqrt(self.second * f4(1.0 / (1 - b2**self.steps)))
        scale += f4(self.eps)
        return np.divide(self.first * f4(lr / (1 - b1**self.steps)), scale, out=scale)

    def _moments(self) -> dict[str, Array]:
        return {"first": self.first, "second": self.second}


class SGD(Optimizer):
    """Gradient descent with momentum, Nesterov's by default; the formula of ``torch.optim.SGD``."""

    def __init__(
        self,
        model: Qwen3,
        *,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        max_norm: float | None = 1.0,
    ) -> None:
        super().__init__(model, weight_decay=weight_decay, max_norm=max_norm)
        self.momentum, self.nesterov = momentum, nesterov
        self.velocity = np.zeros_like(model.flat)

    def _apply(self, lr: float) -> None:
        grad = self.model.grad
        self.velocity *= f4(self.momentum)
        self.velocity += grad
        direction = grad + f4(self.momentum) * self.velocity if self.nesterov else self.velocity
        self.model.flat -= f4(lr) * direction

    def _moments(self) -> dict[str, Array]:
        return {"velocity": self.velocity}


class SignSGD(Optimizer):
    """Moves every weight by ``lr`` against the sign of its gradient (https://arxiv.org/abs/1802.04434)."""

    def _apply(self, lr: float) -> None:
        self.model.flat -= f4(lr) * np.sign(self.model.grad)

    def _moments(self) -> dict[str, Array]:
        return {}


class Muon(AdamW):
    """Momentum, orthogonalised, for matrices; Adam for embeddings and norms (https://kellerjordan.github.io/posts/muon).

    ``matrix_ratio`` is the learning rate of matrices over that of the rest. Fused projections are orthogonalised apart.
    """

    def __init__(
        self,
        model: Qwen3,
        *,
        momentum: float = 0.95,
        matrix_ratio: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float | None = 1.0,
    ) -> None:
        super().__init__(model, betas=betas, eps=eps, weight_decay=weight_decay, max_norm=max_norm)
        self.momentum, self.matrix_ratio = momentum, matrix_ratio
        self.velocity = np.zeros_like(model.flat)

    def _apply(self, lr: float) -> None:
        model = self.model
        self.velocity *= f4(self.momentum)
        self.velocity += model.grad
        ahead = model.grad + f4(self.momentum) * self.velocity
        step = self._direction(lr, model.grad)
        views = zip(model.named_views(ahead), model.named_views(step), strict=True)
        for (name, shape, matrix), (_, _, target) in views:
            if len(shape) == 2 and name != "embed":
                # written over Adam's step: the matrices' Adam moments are kept but not used
                target[:] = self._orthogonal_parts(name, matrix) * f4(lr * self.matrix_ratio)
        model.flat -= step

    def _orthogonal_parts(self, name: str, matrix: Array) -> Array:
        model = self.model
        if name.endswith(".qkv"):
            queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
            parts = np.split(matrix, [queries, queries + keys])
        elif name.endswith(".gate_up"):
            parts = np.split(matrix, 2)
        else:
            parts = [matrix]
        return np.concatenate([orthogonalise(p) * f4(math.sqrt(max(1.0, p.shape[0] / p.shape[1]))) for p in parts])

    def _moments(self) -> dict[str, Array]:
        return {**super()._moments(), "velocity": self.velocity}


def orthogonalise(matrix: Array, iterations: int = 5) -> Array:
    """Nearest (semi-)orthogonal matrix, roughly: Newton-Schulz with Muon's coefficients; singular values in 0.7-1.2."""
    x = matrix / (f4(np.linalg.norm(matrix)) + f4(1e-7))
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(iterations):
        gram = x @ x.T
        x = f4(3.4445) * x + (f4(-4.7750) * gram + f4(2.0315) * (gram @ gram)) @ x
    return x.T if tall else x


OPTIMIZERS: Mapping[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD, "sign_sgd": SignSGD, "muon": Muon}


def optimizer(kind: str, model: Qwen3, **options: Any) -> Optimizer:
    """An optimizer by its prime-rl name (``adamw``, ``sgd``, ``sign_sgd``, ``muon``)."""
    if kind not in OPTIMIZERS:
        raise UnknownName.of("optimizer", kind, OPTIMIZERS)
    return OPTIMIZERS[kind](model, **options)


SCHEDULES = ("constant", "linear", "cosine")


def schedule(
    kind: str,
    step: int,
    max_steps: int,
    *,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    min_lr_ratio: float = 0.0,
) -> float:
    """Factor on the learning rate at ``step`` (from 0) of ``max_steps``.

    ``constant`` stays at 1 after the warm-up; ``linear`` falls to ``min_lr_ratio`` over the last ``decay_steps``
    (default: all after the warm-up); ``cosine`` falls over everything after the warm-up. The warm-up rises linearly and
    reaches 1 at step ``warmup_steps``; its first step already moves. The last step has ``min_lr_ratio`` exactly.

    Raises:
        UnknownName: no such schedule.
        ConfigurationError: warm-up and decay don't fit into ``max_steps``.
    """
    if kind not in SCHEDULES:
        raise UnknownName.of("learning-rate schedule", kind, SCHEDULES)
    after = max_steps - warmup_steps
    decay = after if decay_steps is None else decay_steps
    if warmup_steps < 0 or decay < 0 or after < 0 or (kind == "linear" and decay > after):
        raise ConfigurationError(
            f"warmup_steps ({warmup_steps}) and decay_steps ({decay}) don't fit into max_steps ({max_steps})."
        )
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return 1.0
    if kind == "cosine":
        decay = after
    progress = min(1.0, max(0.0, (step - (max_steps - decay)) / max(1, decay - 1)))
    shape = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr_ratio + (1.0 - min_lr_ratio) * shape
