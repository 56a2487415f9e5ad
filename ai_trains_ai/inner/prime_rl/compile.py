"""From a training job to the text of ``rl.toml``, by allow-list.

The file is built from two sources alone: the surface's keys, each put where the version's profile says, and what the
harness locks. The agent's table is never passed through. Its ``[environment]`` table goes to its own taskset's config,
below names that the engine does not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tomli_w

from ai_trains_ai.errors import ConfigurationError, did_you_mean
from ai_trains_ai.inner.prime_rl.memory import Plan
from ai_trains_ai.inner.prime_rl.profiles import Locks, Profile, Site
from ai_trains_ai.inner.prime_rl.surface import KEYS, RULES, applies
from ai_trains_ai.records import TrainingJob

_TYPES: Final = {"int": int, "float": float, "str": str, "bool": bool}
TASKSET: Final = "orchestrator.train.source[].env.taskset"
RESERVED: Final = ("id", "system_prompt", "task.judges", "task.metrics", "task.rewards", "task.stops")
"""Fields of a taskset's config that the engine itself acts on: they load code, read files or call other models."""


def compile_job(job: TrainingJob, profile: Profile, plan: Plan, site: Site) -> str:
    """The text of ``rl.toml`` for a valid job.

    Raises:
        ConfigurationError: the job's config is not one of the surface (a key too many or too few, a value of another
            type, a broken rule), sets what the harness locks, or belongs to another plan.
    """
    config = job.config
    _check(job, plan)
    table: dict[str, Any] = {}
    for key in KEYS:
        # a penalty of 0 is none at all: the engine's table would bring penalties of its own
        none = key.path == "algo.length_penalty.num_output_tokens_weight" and config[key.path] == 0
        if applies(key.path, config) and not none:
            place = profile.places[key.path]
            put(table, place.path, place.form(config[key.path]))
    innermost(table, TASKSET).update(job.environment)
    for path, value in profile.locked(site, Locks(plan, config["seq_len"], job.seed)).items():
        put(table, path, value)
    return tomli_w.dumps(table)


def innermost(table: dict[str, Any], path: str) -> dict[str, Any]:
    """The table at a dotted path, made where it is missing; ``name[]`` is the one table of an array."""
    for name in path.split("."):
        table = table.setdefault(name[:-2], [{}])[0] if name.endswith("[]") else table.setdefault(name, {})
    return table


def put(table: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path."""
    outer, _, name = path.rpartition(".")
    (innermost(table, outer) if outer else table)[name] = value


def _check(job: TrainingJob, plan: Plan) -> None:
    """Validation has refused all this with findings; here it would mean that what runs is not what was validated."""
    config, known = job.config, {key.path: key for key in KEYS}
    problems = [f"{path!r} can't be set. {did_you_mean(path, known)}".strip() for path in config if path not in known]
    problems += [f"{path!r} is missing: give the resolved config." for path in known if path not in config]
    problems += [
        f"{path} is {config[path]!r}, not of type {key.type}."
        for path, key in known.items()
        if path in config and type(config[path]) is not _TYPES[key.type]
    ]
    problems += [f"environment.{name} is the harness's. Remove it." for name in RESERVED if _has(job.environment, name)]
    if not problems:
        problems = [f"{rule.message} {rule.hint}" for rule in RULES if not rule.holds(config)]
        if (plan.mode == "adapter") != (config["lora.rank"] > 0):
            problems.append(f"The memory plan is for mode {plan.mode!r}, the job has lora.rank {config['lora.rank']}.")
    if problems:
        raise ConfigurationError(f"Job {job.id} can't be compiled for prime-rl: " + " ".join(problems))


def _has(table: Mapping[str, Any], path: str) -> bool:
    name, _, rest = path.partition(".")
    inner = table.get(name)
    return name in table and (not rest or (isinstance(inner, Mapping) and _has(inner, rest)))
