"""Supervised learning on prompt and completion: the weighted cross-entropy and its gradient."""

from __future__ import annotations

import numpy as np

from ai_trains_ai.pico.layers import Array, Ints, f4, log_softmax
from ai_trains_ai.pico.model import Qwen3


def supervised_gradient(
    model: Qwen3, prompts: Ints, pad: Ints, completions: Ints, weights: Array, normaliser: float | None = None
) -> float:
    """Accumulate the gradient of the weighted mean cross-entropy of ``completions`` and return that mean in nats.

    Args:
        model: Only its gradients change.
        prompts: Token ids [P, Lp], padded on the left by ``pad`` [P] tokens.
        pad: Padding tokens [P] of each prompt.
        completions: Token ids [P, G, L].
        weights: Weight of each completion token [P, G, L]; 0 leaves it out of the loss (padding, tool text).
        normaliser: Divides the weighted sum; the sum of ``weights`` when not given. Give the whole batch's sum when one
            batch is accumulated in parts.
    """
    chosen = weights > 0
    hidden, tape = model.forward(prompts, pad, completions)
    logits, head_tape = model.head(hidden[chosen])
    logprobs = log_softmax(logits)
    rows, targets = np.arange(len(logits)), completions[chosen]
    share = (weights[chosen] / (normaliser or float(weights.sum()))).astype(f4)
    loss = -float(np.dot(share, logprobs[rows, targets]))
    dlogits = np.exp(logprobs)
    dlogits[rows, targets] -= 1.0
    dlogits *= share[:, None]
    dhidden = np.zeros_like(hidden)
    dhidden[chosen] = model.head_backward(dlogits, head_tape)
    model.backward(dhidden, tape)
    return loss


def completion_arrays(completions: list[list[int]], pad_id: int = 0) -> tuple[Ints, Array]:
    """One completion per prompt as ids [P, 1, L] padded on the right, and weights [P, 1, L]: 1 on real tokens."""
    length = max(map(len, completions))
    ids = np.full((len(completions), 1, length), pad_id, np.int64)
    weights = np.zeros(ids.shape, f4)
    for row, tokens in enumerate(completions):
        ids[row, 0, : len(tokens)] = tokens
        weights[row, 0, : len(tokens)] = 1.0
    return ids, weights
