"""Importance-sampling GRPO: group advantages and the clipped policy gradient.

The objective is ``sum(min(r*A, clip(r)*A)) / normaliser`` over the tokens that the policy sampled, with the ratio
``r = exp(trainer logprob - sampler logprob)`` and one advantage per completion (DeepSeekMath,
https://arxiv.org/abs/2402.03300; clip-higher from DAPO, https://arxiv.org/abs/2503.14476).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.pico.layers import Array, Bools, Ints, f4
from ai_trains_ai.pico.model import Qwen3


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """G completions of each of P prompts, with what the sampler knew of them.

    Attributes:
        prompts: Token ids [P, Lp], padded on the left.
        pad: Padding tokens [P] of each prompt.
        completions: Token ids [P, G, L], padded on the right.
        mask: True [P, G, L] where the policy sampled the token; false on padding and on text of tools.
        logprobs: Natural log-probabilities [P, G, L] of the sampling policy, read where ``mask``.
        advantages: [P, G].
    """

    prompts: Ints
    pad: Ints
    completions: Ints
    mask: Bools
    logprobs: Array
    advantages: Array

    def __post_init__(self) -> None:
        shape = self.completions.shape
        if self.mask.shape != shape or self.logprobs.shape != shape or self.advantages.shape != shape[:2]:
            raise ConfigurationError(
                f"PolicyBatch: completions {shape}, mask {self.mask.shape}, logprobs {self.logprobs.shape} and "
                f"advantages {self.advantages.shape} don't belong together."
            )
        if self.prompts.shape[0] != shape[0] or self.pad.shape != shape[:1]:
            raise ConfigurationError(
                f"PolicyBatch: {self.prompts.shape[0]} prompts and {self.pad.shape[0]} paddings for {shape[0]} groups."
            )

    def select(self, prompts: Bools | Ints) -> PolicyBatch:
        """The batch of some of the prompts."""
        return PolicyBatch(
            self.prompts[prompts],
            self.pad[prompts],
            self.completions[prompts],
            self.mask[prompts],
            self.logprobs[prompts],
            self.advantages[prompts],
        )


class PolicyStats(NamedTuple):
    """Means over the sampled tokens of one batch (zero when it has none).

    ``kl`` estimates KL(sampler || trainer) in nats by ``r - 1 - log r``, which is never negative (Schulman's k3);
    ``entropy`` is the trainer's, in nats; ``clipped`` the share of tokens whose gradient the clip took away.
    """

    tokens: int
    loss: float
    kl: float
    entropy: float
    ratio_mean: float
    ratio_max: float
    clipped: float


def group_advantages(rewards: Array, std_normalise: bool = True) -> Array:
    """Reward minus the mean of its group, [P, G] -> [P, G] float32.

    With ``std_normalise`` divided by the group's standard deviation. A degenerate group (all equal) gets exact zeros.
    """
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - rewards.mean(1, keepdims=True)
    spread = rewards.std(1, keepdims=True)
    centred = np.where(spread > 1e-8, centred, 0.0)
    return (centred / (spread + 1e-4) if std_normalise else centred).astype(f4)


def policy_gradient(
    model: Qwen3,
    batch: PolicyBatch,
    *,
    temperature: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float | None = None,
    normaliser: float,
) -> PolicyStats:
    """Accumulate into ``model.grad`` the gradient of the negative objective (an optimizer descends).

    Args:
        model: The trainer's policy; only its gradients change.
        batch: What was sampled. Split a large batch and call once per part with the same normaliser.
        temperature: That of the sampling (above 0): log-probabilities of another law don't match.
        clip_low: The ratio stops counting below ``1 - clip_low`` for a negative advantage,
        clip_high: and above ``1 + clip_high`` for a positive one.
        ratio_cap: The ratio also stops counting above this for a negative advantage ("dual clip",
            https://arxiv.org/abs/1912.09729): the plain clip leaves it unbounded there, and one token can then be the
            whole gradient. ``None``: no cap.
        normaliser: Divides the sum, e.g. the number of sampled tokens of the whole batch.

    Raises:
        ConfigurationError: temperature or normaliser is not positive.
    """
    if temperature <= 0 or normaliser <= 0:
        raise ConfigurationError(f"temperature ({temperature}) and normaliser ({normaliser}) must be positive.")
    if not batch.mask.any():
        return PolicyStats(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    hidden, tape = model.forward(batch.prompts, batch.pad, batch.completions)
    logits, head_tape = model.head(hidden[batch.mask])
    probabilities, logprobs, entropy = _law(logits, batch.completions[batch.mask], temperature)

    advantages = np.broadcast_to(batch.advantages[:, :, None], batch.mask.shape)[batch.mask]
    log_ratio = logprobs - batch.logprobs[batch.mask]
    ratio = np.exp(np.minimum(log_ratio, f4(20.0)))  # a broken log-probability must not overflow
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    live = ~(too_high | too_low)
    if ratio_cap is not None:
        live &= ~((advantages < 0) & (ratio > ratio_cap))
    # d(-objective)/dlogits = weight * (p - onehot) / temperature, with the clip's gradient zero outside
    weight = (ratio * advantages * live).astype(f4) * f4(1.0 / (normaliser * temperature))
    tokens = np.arange(len(weight))
    probabilities[tokens, batch.completions[batch.mask]] -= 1
    probabilities *= weight[:, None]
    dhidden = np.zeros_like(hidden)
    dhidden[batch.mask] = model.head_backward(probabilities, head_tape)
    model.backward(dhidden, tape)

    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    return PolicyStats(
        tokens=len(weight),
        loss=-float(surrogate.sum()) / normaliser,
        kl=float((ratio - 1 - log_ratio).mean()),
        entropy=float(entropy.mean()),
        ratio_mean=float(ratio.mean()),
        ratio_max=float(ratio.max()),
        clipped=1.0 - float(live.mean()),
    )


def _law(logits: Array, tokens: Ints, temperature: float) -> tuple[Array, Array, Array]:
    """Probabilities [n, V], log-probabilities of ``tokens`` [n] and entropies [n] of logits [n, V] (overwritten)."""
    logits *= f4(1.0 / temperature)
    logits -= logits.max(-1, keepdims=True)
    probabilities = np.exp(logits)
    total = probabilities.sum(-1)
    probabilities /= total[:, None]
    log_total = np.log(total)
    logprobs = logits[np.arange(len(tokens)), tokens] - log_total
    entropy = log_total - np.einsum("nv,nv->n", probabilities, logits)
    return probabilities, logprobs, entropy
