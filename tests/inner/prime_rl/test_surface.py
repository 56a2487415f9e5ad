"""The surface of prime-rl: one table, from which the agent's guide and the validation come."""

from __future__ import annotations

from typing import Any

import pytest
from inner.prime_rl.jobs import A40, LARGER, RTX_4090, SMALL, SURFACE, TWO_A5000, config, corners

from ai_trains_ai.agent.guide import config_markdown
from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.inner.prime_rl.memory import SHAPES, Machine, Shape, shortfall
from ai_trains_ai.inner.prime_rl.surface import RULES, prime_rl_surface
from ai_trains_ai.inner.surface import VOCABULARY
from ai_trains_ai.records import BaseModel, ConfigSurface, TaskLimits
from ai_trains_ai.validation.codes import StageFailed
from ai_trains_ai.validation.schema import check_schema

MODELS = [BaseModel(SMALL.name, SMALL.parameters)]
ROLLOUTS = TaskLimits(rollouts=10**9)

FLEETS = {
    "A40, small": ([SMALL], [A40]),
    "A40, both": ([SMALL, LARGER], [A40]),
    "4090, small": ([SMALL], [RTX_4090]),
    "4090, both": ([SMALL, LARGER], [RTX_4090]),
    "mixed, both": ([SMALL, LARGER], [A40, RTX_4090, TWO_A5000]),
}
each_fleet = pytest.mark.parametrize(("models", "machines"), FLEETS.values(), ids=FLEETS)


def findings(surface: ConfigSurface = SURFACE, /, **changes: Any) -> list[str]:
    table = {name.replace("__", "."): value for name, value in changes.items()}
    try:
        check_schema({"base_model": SMALL.name, "prime_rl": table}, surface, MODELS, ROLLOUTS)
    except StageFailed as failed:
        return [finding.text() for finding in failed.findings]
    return []


def test_keys_of_the_vocabulary_keep_their_type_and_help() -> None:
    shared = [key for key in SURFACE.keys if key.path in VOCABULARY]
    assert [(k.type, k.help, k.choices) for k in shared] == [
        (v.type, v.help, v.choices) for v in (VOCABULARY[key.path] for key in shared)
    ]


def test_every_key_is_there_once() -> None:
    assert len({key.path for key in SURFACE.keys}) == len(SURFACE.keys)


@each_fleet
def test_defaults_are_valid_on_every_fleet(models: list[Shape], machines: list[Machine]) -> None:
    surface = prime_rl_surface(models, machines)
    assert findings(surface, **surface.defaults()) == []


# ---------------------------------------------------------------------------------------------- rules and bounds


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "batch-not-divisible": ({"batch_size": 60}, "not a multiple"),
    "too-few-in-flight": ({"max_inflight_episodes": 4}, "never completes a group"),
    "completion-too-long": ({"sampling.max_completion_tokens": 2000}, "truncates"),
    "warmup-too-long": ({"scheduler.type": "cosine", "scheduler.warmup_steps": 40}, "not below max_steps"),
    "schedule-too-long": ({"scheduler.type": "linear", "scheduler.decay_steps": 41}, "exceed max_steps"),
    "schedule-empty": ({"scheduler.type": "linear"}, "refuses it"),
    "min-lr-too-high": ({"scheduler.type": "cosine", "scheduler.min_lr": 1e-4}, "would rise"),
    "no-adapter": ({"lora.alpha": 16.0}, "without an adapter"),
    "no-num-output-tokens-weight": (
        {"algo.type": "max_rl", "algo.length_penalty.num_output_tokens_weight": 0.5},
        "only with algo.type grpo",
    ),
    "no-warmup-steps": ({"scheduler.warmup_steps": 4}, "only with scheduler.type linear or cosine"),
    "no-decay-steps": ({"scheduler.type": "cosine", "scheduler.decay_steps": 4}, "only with scheduler.type linear"),
    "no-min-lr": ({"scheduler.min_lr": 1e-7}, "only with scheduler.type linear or cosine"),
    "no-dppo-mask-low": ({"loss.type": "ipo", "loss.dppo_mask_low": 0.1}, "only with loss.type default"),
    "no-dppo-mask-high": ({"loss.type": "ipo", "loss.dppo_mask_high": 0.1}, "only with loss.type default"),
    "no-ipo-threshold": ({"loss.ipo_threshold": 0.2}, "only with loss.type ipo"),
}


@pytest.mark.parametrize("code", [rule.code for rule in RULES])
def test_a_rule_refuses_with_the_engines_reason(code: str) -> None:
    changes, reason = REFUSED[code]
    (found,) = findings(**changes)
    assert found.startswith(f"[{code}]")
    assert reason in found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 1}, "A group of one has no advantage"),
        ({"optim.lr": 0.0}, "A rate of 0 trains nothing"),
        ({"max_steps": 0}, "trains for ever"),
        ({"sampling.temperature": 2.0}, "hotter ones are noise"),
    ],
)
def test_a_bound_says_why(changes: dict[str, Any], words: str) -> None:
    (found,) = findings(**changes)
    assert found.startswith("[out-of-range]")
    assert words in found


@pytest.mark.parametrize(
    "path",
    [
        "max_async_level",
        "rollouts_per_example",
        "loss.ratio_type",
        "optim.betas",
        "output_dir",
        "model.name",
        "env_vars.LD_PRELOAD",
        "inference.vllm_extra.hf_token",
        "loss.import_path",
        "sampling.extra_body",
        "gpu_memory_utilization",
        "seed",
    ],
)
def test_what_is_the_harnesss_or_long_gone_is_no_key(path: str) -> None:
    (found,) = findings(**{path: 1})
    assert found.startswith("[unknown-key]")


# ----------------------------------------------------------------------------------------------------- the guide


def test_the_guide_has_a_line_for_each_key() -> None:
    guide = config_markdown(MODELS, SURFACE)
    assert [key.path for key in SURFACE.keys if f"* `{key.path}` (" not in guide] == []


def test_the_guide_has_a_line_for_each_rule() -> None:
    guide = config_markdown(MODELS, SURFACE)
    assert [rule.code for rule in RULES if f"* refused: {rule.message}\n" not in guide] == []


# ------------------------------------------------------------------------------------------------------ machines


@each_fleet
def test_every_corner_fits_every_model_on_every_machine(models: list[Shape], machines: list[Machine]) -> None:
    surface = prime_rl_surface(models, machines)
    settings = {(c["seq_len"], c["lora.rank"], c["optim.type"]) for c in corners(surface)}
    pairs = [(model, machine) for model in models for machine in machines]
    assert [why for setting in settings for pair in pairs if (why := shortfall(*pair, *setting))] == []


@each_fleet
def test_every_corner_of_a_fleets_surface_is_valid(models: list[Shape], machines: list[Machine]) -> None:
    surface = prime_rl_surface(models, machines)
    assert {line for corner in corners(surface) for line in findings(surface, **corner)} == set()


def test_where_full_training_does_not_fit_a_rank_is_asked_for_with_the_reason() -> None:
    surface = prime_rl_surface([SMALL, LARGER], [A40, RTX_4090])
    (found,) = findings(surface, lora__rank=0)
    assert "Qwen/Qwen3-1.7B can't be trained in full" in found
    assert "39.8 GiB" in found


def test_one_weak_machine_shortens_the_sequences_of_all() -> None:
    surface = prime_rl_surface([SMALL, LARGER], [A40, RTX_4090])
    (found,) = findings(surface, seq_len=4096)
    assert "RTX 4090" in found


def test_a_model_that_fits_nowhere_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigurationError, match=r"trainer: .* = .* GiB"):
        prime_rl_surface([SHAPES["Qwen/Qwen3-4B"]], [RTX_4090])


def test_without_machines_the_surface_is_the_widest() -> None:
    assert prime_rl_surface().defaults() == config()
