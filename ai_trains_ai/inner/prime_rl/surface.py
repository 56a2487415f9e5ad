"""What an agent may set for a prime-rl job: the one table of keys, and the rules over several of them.

From this table come the agent's guide, the validation and the compiler. Keys that other runners share are taken from
the vocabulary with prime-rl's own default and bounds; those that only prime-rl has are defined here, once. Where a
key lands in ``rl.toml`` is the business of a version's profile.

prime-rl's schema lets through much that its trainer then punishes: a group of one, a learning rate of 0, a reply
longer than the sequence. Bounds and rules catch these before a machine is rented, with the engine's reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import evolve

from ai_trains_ai.inner.prime_rl.memory import Machine, Shape, plan, shortfall
from ai_trains_ai.inner.surface import DIVISIBLE, VOCABULARY, WARMUP_FITS
from ai_trains_ai.records import ConfigKey, ConfigRule, ConfigSurface

PROMPT_TOKENS: Final = 64  # left for the prompt, at the least
SEQ_LEN, MAX_SEQ_LEN, MAX_RANK = 2048, 4096, 64


def _shared(path: str, **changes: Any) -> ConfigKey:
    return evolve(VOCABULARY[path], **changes)


KEYS: Final = (
    _shared("max_steps", default=40, high=500, reason="prime-rl trains for ever without it."),
    ConfigKey("seq_len", "int", SEQ_LEN, "most tokens of prompt and reply together", low=256, high=MAX_SEQ_LEN),
    _shared("batch_size", default=64, low=16, high=512),
    _shared("group_size", low=4, high=32, reason="A group of one has no advantage; groups below 4 rarely have one."),
    ConfigKey(
        "max_inflight_episodes", "int", 64, "rollouts sampled at a time", low=4, high=512, reason="It holds a group."
    ),
    ConfigKey("max_off_policy_steps", "int", 8, "a rollout older than so many steps is dropped", low=0, high=8),
    _shared("sampling.temperature", low=0.6, high=1.3, reason="Colder groups agree, hotter ones are noise."),
    _shared("sampling.max_completion_tokens", default=512, high=MAX_SEQ_LEN - PROMPT_TOKENS),
    ConfigKey("renderer.enable_thinking", "bool", False, "the model may think before it replies"),
    ConfigKey("filter_zero_advantages", "bool", True, "drop groups whose rewards are all equal"),
    ConfigKey("algo.type", "str", "grpo", "how rewards become advantages", choices=("grpo", "max_rl")),
    ConfigKey(
        "algo.length_penalty.num_output_tokens_weight", "float", 0.0, "how much long replies lose", low=0.0, high=1.0
    ),
    _shared("optim.type"),
    _shared("optim.lr", default=3e-6, low=1e-8, high=1e-3, reason="A rate of 0 trains nothing."),
    _shared("optim.weight_decay"),
    _shared("optim.max_norm"),
    _shared("scheduler.type"),
    _shared("scheduler.warmup_steps", high=499),
    ConfigKey("scheduler.decay_steps", "int", 0, "last steps, in which the rate falls to min_lr", low=0, high=500),
    ConfigKey("scheduler.min_lr", "float", 0.0, "learning rate at the end", low=0.0, high=1e-3),
    ConfigKey("loss.type", "str", "default", "policy-gradient loss", choices=("default", "ipo")),
    ConfigKey("loss.dppo_mask_low", "float", 0.2, "tokens that became rarer by more are masked", low=0.0, high=1.0),
    ConfigKey("loss.dppo_mask_high", "float", 0.2, "tokens that became likelier by more are masked", low=0.0, high=1.0),
    ConfigKey("loss.ipo_threshold", "float", 0.1, "probability change at which IPO masks a token", low=0.0, high=1.0),
    ConfigKey("loss.adv_tau", "float", 1.0, "weight of the advantage", low=0.01, high=10.0),
    ConfigKey("loss.kl_tau", "float", 1e-3, "weight of the KL to the policy that sampled", low=0.0, high=1.0),
    ConfigKey("lora.rank", "int", 0, "rank of a LoRA adapter; 0 trains all weights", low=0, high=MAX_RANK),
    ConfigKey("lora.alpha", "float", 32.0, "scale of the adapter", low=1.0, high=256.0),
    ConfigKey("lora.dropout", "float", 0.0, "dropout in the adapter", low=0.0, high=0.5),
)

ONLY: Final[Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    "algo.length_penalty.num_output_tokens_weight": ("algo.type", ("grpo",)),
    "scheduler.warmup_steps": ("scheduler.type", ("linear", "cosine")),
    "scheduler.decay_steps": ("scheduler.type", ("linear",)),
    "scheduler.min_lr": ("scheduler.type", ("linear", "cosine")),
    "loss.dppo_mask_low": ("loss.type", ("default",)),
    "loss.dppo_mask_high": ("loss.type", ("default",)),
    "loss.ipo_threshold": ("loss.type", ("ipo",)),
}
"""Keys that prime-rl has in some variants only, and refuses as extra inputs in others: key -> (switch, its values)."""


def applies(path: str, config: Mapping[str, Any]) -> bool:
    """Whether prime-rl has a field for this key in the variants that ``config`` chooses."""
    if path.startswith("lora.") and config["lora.rank"] == 0:
        return False
    switch, values = ONLY.get(path, ("", ()))
    return not switch or config[switch] in values


def _variant(path: str, default: Any) -> ConfigRule:
    switch, values = ONLY[path]
    return ConfigRule(
        f"no-{path.rpartition('.')[2].replace('_', '-')}",
        lambda config: applies(path, config) or config[path] == default,
        f"{path} is set, but prime-rl has it only with {switch} {' or '.join(values)}.",
        f"Leave it out or change {switch}.",
    )


RULES: Final = (
    DIVISIBLE,
    ConfigRule(
        "too-few-in-flight",
        lambda config: config["max_inflight_episodes"] >= config["group_size"],
        "max_inflight_episodes is below group_size: prime-rl never completes a group.",
        "Use at least group_size.",
    ),
    ConfigRule(
        "completion-too-long",
        lambda config: config["sampling.max_completion_tokens"] + PROMPT_TOKENS <= config["seq_len"],
        f"sampling.max_completion_tokens leaves fewer than {PROMPT_TOKENS} tokens of seq_len for the prompt: "
        "prime-rl truncates what is longer.",
        "Lower max_completion_tokens or raise seq_len.",
    ),
    WARMUP_FITS,
    ConfigRule(
        "schedule-too-long",
        lambda config: (
            config["scheduler.type"] != "linear"
            or config["scheduler.warmup_steps"] + config["scheduler.decay_steps"] <= config["max_steps"]
        ),
        "scheduler.warmup_steps and decay_steps together exceed max_steps: prime-rl refuses the schedule.",
        "Shorten one of them.",
    ),
    ConfigRule(
        "schedule-empty",
        lambda config: (
            config["scheduler.type"] != "linear"
            or config["scheduler.warmup_steps"] + config["scheduler.decay_steps"] > 0
        ),
        "A linear schedule without warmup_steps and decay_steps: prime-rl refuses it.",
        "Set decay_steps, or use constant.",
    ),
    ConfigRule(
        "min-lr-too-high",
        lambda config: config["scheduler.min_lr"] <= config["optim.lr"],
        "scheduler.min_lr is above optim.lr: the rate would rise.",
        "Lower min_lr.",
    ),
    ConfigRule(
        "no-adapter",
        lambda config: config["lora.rank"] > 0 or (config["lora.alpha"] == 32.0 and config["lora.dropout"] == 0.0),
        "lora.alpha or lora.dropout is set without an adapter.",
        "Set lora.rank, or leave them out.",
    ),
    *(_variant(key.path, key.default) for key in KEYS if key.path in ONLY),
)


def prime_rl_surface(models: Sequence[Shape] = (), machines: Sequence[Machine] = ()) -> ConfigSurface:
    """The surface whose bounds hold for each of ``models`` on the weakest of ``machines``.

    Where a model can't be trained in full, ``lora.rank`` starts at 4 and says why; ``seq_len`` ends at the longest
    that fits everywhere.

    Raises:
        ConfigurationError: a model does not fit on a machine with an adapter either; shows the arithmetic.
    """
    pairs = [(model, machine) for model in models for machine in machines]
    changes: dict[str, dict[str, Any]] = {}
    rank, longest = 0, MAX_SEQ_LEN
    for pair in pairs:
        if why := shortfall(*pair, SEQ_LEN):
            rank = MAX_RANK
            changes["lora.rank"] = {"low": 4, "default": 16, "reason": why}
            changes["optim.lr"] = {"default": 2e-5}  # adapters want a higher one
    for model, machine in pairs:
        plan(model, machine, seq_len=SEQ_LEN, lora_rank=rank)  # refuses what never fits, so that the loop ends
        while why := shortfall(model, machine, longest, rank):
            longest -= 128
            changes["seq_len"] = {"high": longest, "reason": why}
            changes["sampling.max_completion_tokens"] = {"high": longest - PROMPT_TOKENS}
    return ConfigSurface(tuple(evolve(key, **changes.get(key.path, {})) for key in KEYS), RULES)
