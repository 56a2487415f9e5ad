"""What an update is made of: the segments of episodes as arrays that are checked before anything is sent.

Arrays are aligned to the next token: position *i* predicts ``targets[i]`` from ``inputs[: i + 1]``. Positions that the
policy did not sample have advantage 0 and log-probability 0, so that they contribute nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from ai_trains_ai.errors import PolicyError
from ai_trains_ai.records import EpisodeGroup, Segment

MAX_LOG_RATIO = 20.0  # in diagnostics: beyond it exp() says nothing any more


@frozen(eq=False)
class Example:
    """One segment: ``inputs``, ``targets`` int64 [n]; ``logprobs``, ``advantages`` float32 [n]; ``mask`` bool [n]."""

    source: str
    inputs: np.ndarray
    targets: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray


def examples(groups: Sequence[EpisodeGroup]) -> list[Example]:
    """The trainable segments of groups, one example each.

    An advantage is divided by the sampled tokens of all started episodes, masked and degenerate ones included: a token
    of a long episode weighs as much as one of a short one, and a group as much however its neighbours went.

    Raises:
        PolicyError: an array is not finite, or lengths differ; names the episode.
    """
    started = sum(sum(s.mask) for group in groups for e in group.episodes for s in e.segments)
    return [
        _example(f"{episode.id}, segment {number}", segment, advantage / started)
        for group in groups
        if not group.degenerate
        for episode, advantage in zip(group.episodes, group.advantages, strict=True)
        if advantage
        for number, segment in enumerate(episode.segments)
    ]


def _example(source: str, segment: Segment, advantage: float) -> Example:
    if not len(segment.ids) == len(segment.mask) == len(segment.logprobs):
        raise PolicyError(
            f"{source}: {len(segment.ids)} ids, {len(segment.mask)} mask and {len(segment.logprobs)} logprobs"
        )
    ids = np.asarray(segment.ids, np.int64)
    mask = np.asarray(segment.mask, bool)[1:]
    logprobs = np.where(mask, np.asarray(segment.logprobs, np.float32)[1:], 0.0).astype(np.float32)
    if len(ids) < 2 or not mask.any():
        raise PolicyError(f"{source}: no token of it was sampled behind a prompt")
    if not math.isfinite(advantage) or not np.isfinite(logprobs).all():
        raise PolicyError(f"{source}: an advantage or log-probability is not finite; nothing was sent.")
    if (logprobs > 1e-3).any():
        raise PolicyError(f"{source}: a log-probability is above 0; nothing was sent.")
    advantages = np.where(mask, advantage, 0.0).astype(np.float32)
    return Example(source, ids[:-1], ids[1:], logprobs, advantages, mask)


def diagnostics(batch: Sequence[Example], trained: Sequence[np.ndarray]) -> dict[str, float]:
    """How far the trainer's log-probabilities ``trained`` ([n] per example) are from the sampler's.

    ``outer/kl`` is the mean of log p(sampler) - log p(trainer), ``outer/kl_v2`` half its mean square; the ratio is
    p(trainer) / p(sampler); entropy is estimated as the mean of -log p(sampler) over sampled tokens.

    Raises:
        PolicyError: the service gave other lengths, or values that are not finite.
    """
    if len(trained) != len(batch):
        raise PolicyError(f"the service gave log-probabilities of {len(trained)} examples, not of {len(batch)}")
    for example, given in zip(batch, trained, strict=True):
        if given.shape != example.logprobs.shape or not np.isfinite(given[example.mask]).all():
            raise PolicyError(f"{example.source}: the service gave log-probabilities that are not finite, or too few")
    sampler = np.concatenate([example.logprobs[example.mask] for example in batch]).astype(np.float64)
    trainer = np.concatenate([given[example.mask] for example, given in zip(batch, trained, strict=True)])
    difference = sampler - trainer.astype(np.float64)
    ratio = np.exp(np.clip(-difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return {
        "outer/kl": float(difference.mean()),
        "outer/kl_v2": float((difference**2).mean() / 2),
        "outer/entropy": float(-sampler.mean()),
        "outer/ratio_mean": float(ratio.mean()),
        "outer/ratio_max": float(ratio.max()),
    }
