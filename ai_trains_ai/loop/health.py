"""Whether the training of the outer policy is still sound: thresholds on a step's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import evolve, frozen

from ai_trains_ai.errors import ConfigurationError, RunUnhealthy, UnknownName

IDENTICAL: Final = "outer/loss_identical"


@frozen
class Threshold:
    """From which value of a metric on a step warns, or ends the run; ``None``: never.

    ``below`` turns the comparison around. ``remedy`` is said with it.
    """

    what: str
    remedy: str
    warn: float | None = None
    stop: float | None = None
    below: bool = False

    def crossed(self, value: float, limit: float | None) -> bool:
        return limit is not None and (value <= limit if self.below else value >= limit)


THRESHOLDS: Final[Mapping[str, Threshold]] = {
    "outer/kl_v2": Threshold(
        "the sampler's and the trainer's log-probabilities drift apart",
        "Lower max_staleness or the learning rate; a sampler of another version or precision shows here, too.",
        warn=0.02,
    ),
    "outer/entropy": Threshold(
        "the policy hardly varies any more", "Raise group_size, or stop: it has settled.", warn=0.005, below=True
    ),
    "outer/ratio_max": Threshold(
        "a token has become far more likely than when it was sampled", "Lower max_staleness or the learning rate.", 50.0
    ),
    "outer/grad_norm": Threshold("the gradient is large", "Lower the learning rate, or clip the gradient.", warn=100.0),
    "outer/segment_breaks_per_episode": Threshold(
        "prompts do not extend what was sampled, so that every turn is read and trained on again",
        "Choose a renderer that keeps the history (thinking is dropped by some).",
        warn=0.25,
    ),
    "outer/parse_failures": Threshold(
        "many tool calls can't be parsed", "Check the renderer, and that max_tokens holds a whole call.", warn=0.5
    ),
    "outer/staleness/max": Threshold("episodes are older than wanted", "Lower max_staleness.", warn=4.0),
    "outer/masked_share": Threshold(
        "infrastructure breaks many episodes", "Look at the notes of the masked episodes.", warn=0.25
    ),
    IDENTICAL: Threshold(
        "two updates in a row had exactly the same loss: the weights may not be the ones that were trained",
        "Resume the run from its last checkpoint, and report it to the service.",
        warn=1.0,
    ),
}
"""By metric. A trainer that does not report one is not judged by it."""


class Health:
    """Judges steps in order. ``changes`` are ``{metric: {"warn": …, "stop": …}}`` over `THRESHOLDS`.

    Raises:
        ConfigurationError: a metric, or a field of it, that is not known.
    """

    def __init__(self, changes: Mapping[str, Mapping[str, float]]) -> None:
        self._thresholds = dict(THRESHOLDS)
        for key, change in changes.items():
            if key not in THRESHOLDS:
                raise UnknownName.of("health metric", key, THRESHOLDS)
            if unknown := set(change) - {"warn", "stop"}:
                raise ConfigurationError(f"health[{key!r}] takes warn and stop, not {', '.join(sorted(unknown))}.")
            usual = THRESHOLDS[key]
            warn, stop = change.get("warn", usual.warn), change.get("stop", usual.stop)
            self._thresholds[key] = evolve(usual, warn=warn, stop=stop)
        self._loss: float | None = None

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What is judged beside the step's own metrics. Call it once a step, in order."""
        loss = metrics.get("outer/loss")
        trained = metrics.get("outer/tokens", 0.0) > 0
        identical = trained and loss is not None and loss == self._loss
        if trained:
            self._loss = loss
        return {IDENTICAL: float(identical)} if loss is not None else {}

    def check(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What a step has to be warned of.

        Raises:
            RunUnhealthy: a threshold that ends the run is crossed.
        """
        said = []
        for key, threshold in self._thresholds.items():
            if key not in metrics:
                continue
            value = metrics[key]
            text = f"step {step}: {key} is {value:.4g}: {threshold.what}. {threshold.remedy}"
            if threshold.crossed(value, threshold.stop):
                raise RunUnhealthy(
                    f"Stopped at {text} Everything is kept; go on with another threshold: "
                    f"ata.resume(path, health={{{key!r}: {{'stop': …}}}})."
                )
            if threshold.crossed(value, threshold.warn):
                said.append(text)
        return said
