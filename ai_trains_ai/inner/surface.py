"""The vocabulary of hyperparameters: every key that any runner may expose, defined once.

Spelling follows prime-rl (``optim.lr``, ``sampling.max_completion_tokens``); where prime-rl has no such key the
comment says whose name it is. A runner picks the keys that it honours and sets its own defaults and bounds with
`surface`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve

from ai_trains_ai.records import ConfigKey, ConfigRule, ConfigSurface

VOCABULARY: Final = {
    key.path: key
    for key in (
        ConfigKey("max_steps", "int", 12, "optimizer steps", low=1, reason="a job must end"),
        ConfigKey("batch_size", "int", 64, "rollouts per step", low=2),
        ConfigKey("group_size", "int", 8, "rollouts per prompt", low=2, reason="a group of one has no advantage"),
        ConfigKey("optim.type", "str", "adamw", "optimizer", choices=("adamw", "sgd", "muon", "sign_sgd")),
        ConfigKey("optim.lr", "float", 1e-6, "peak learning rate", low=0.0),
        ConfigKey("optim.weight_decay", "float", 0.01, "decoupled weight decay", low=0.0, high=1.0),
        ConfigKey("optim.max_norm", "float", 1.0, "gradient norm is clipped to this", low=1e-3, high=100.0),
        ConfigKey(
            "scheduler.type", "str", "constant", "learning-rate schedule", choices=("constant", "linear", "cosine")
        ),
        ConfigKey("scheduler.warmup_steps", "int", 0, "steps of linear warm-up", low=0),
        ConfigKey("sampling.temperature", "float", 1.0, "sampling temperature", low=0.0, high=2.0),
        ConfigKey("sampling.max_completion_tokens", "int", 10, "longest reply in tokens", low=1),
        # prime-rl masks by probability difference; this is the PPO clip of the importance ratio (TRL: epsilon)
        ConfigKey("loss.ratio_clip", "float", 0.2, "importance ratio is clipped to 1 ± this", low=0.01, high=10.0),
        # TRL calls it num_iterations; prime-rl's counterpart is max_off_policy_steps
        ConfigKey("updates_per_batch", "int", 1, "optimizer steps on each batch", low=1, high=4),
        # prime-rl's GRPO never divides by the standard deviation; TRL calls it scale_rewards
        ConfigKey("advantage.normalize_std", "bool", True, "divide advantages by the group's standard deviation"),
    )
}


def surface(changes: Mapping[str, Mapping[str, Any]], rules: tuple[ConfigRule, ...]) -> ConfigSurface:
    """The surface of one runner: the keys of ``changes``, each with the runner's own default and bounds.

    >>> surface({"max_steps": {"default": 4, "high": 8}}, ()).key("max_steps").high
    8
    """
    return ConfigSurface(tuple(evolve(VOCABULARY[path], **change) for path, change in changes.items()), rules)


DIVISIBLE = ConfigRule(
    "batch-not-divisible",
    lambda config: config["batch_size"] % config["group_size"] == 0,
    "batch_size is not a multiple of group_size.",
    "Choose batch_size as prompts times group_size.",
)

WARMUP_FITS = ConfigRule(
    "warmup-too-long",
    lambda config: config["scheduler.warmup_steps"] < config["max_steps"],
    "scheduler.warmup_steps is not below max_steps.",
    "Shorten the warm-up.",
)
