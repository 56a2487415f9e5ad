"""Stage 2: the job's table against the config surface: names, exact types, bounds, rules over several keys."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from ai_trains_ai.records import BaseModel, ConfigKey, ConfigSurface, Finding, TaskLimits
from ai_trains_ai.validation.codes import StageFailed, finding
from ai_trains_ai.validation.plain import finite

STAGE = "schema"
_TABLES = ("base_model", "environment", "prime_rl")
_TYPES = {"int": int, "float": float, "str": str, "bool": bool}
_MAX_TEXT = 200
# Of nested tables and lists. Recursion over what an agent wrote must end long before the interpreter's limit.
_MAX_DEPTH = 32


@frozen
class JobSettings:
    """What a job.toml says, resolved: ``config`` has every key of the surface, ``configured`` names those it sets."""

    base_model: str
    environment: Mapping[str, Any]
    config: Mapping[str, Any]
    configured: tuple[str, ...]


def check_schema(
    job: Mapping[str, Any], surface: ConfigSurface, base_models: Sequence[BaseModel], limits: TaskLimits
) -> JobSettings:
    """Check a parsed job.toml. Raises `StageFailed` with everything that is wrong."""
    problems = [
        finding("unknown-table", STAGE, "Unknown key.", _suggest(name, _TABLES), f"job.toml: {_shown(name)}")
        for name in job
        if name not in _TABLES
    ]
    problems += _check_base_model(job.get("base_model"), [model.name for model in base_models])
    environment = job.get("environment", {})
    problems += _check_environment(environment)
    config, configured = surface.defaults(), []
    for path, value in _flatten(job.get("prime_rl", {})):
        key = surface.key(path)
        if key is None:
            hint = _suggest(path, [key.path for key in surface.keys])
            problems.append(finding("unknown-key", STAGE, "Unknown key.", hint, f"prime_rl.{_shown(path)}"))
        elif problem := _check_value(key, value):
            problems.append(problem)
        else:
            config[path] = float(value) if key.type == "float" else value
            configured.append(path)
    if problems:
        raise StageFailed(*problems)
    problems = [
        Finding(rule.code, STAGE, rule.message, rule.hint, "prime_rl")
        for rule in surface.rules
        if not rule.holds(config)
    ]
    problems += _check_budget(config, limits)
    if problems:
        raise StageFailed(*problems)
    return JobSettings(job["base_model"], environment, config, tuple(configured))


def _check_base_model(name: object, known: list[str]) -> Iterator[Finding]:
    listed = f"Use {' or '.join(known)}."
    if name is None:
        yield finding("no-base-model", STAGE, "No base_model.", listed, "job.toml")
    elif name not in known:
        yield finding("unknown-base-model", STAGE, "Unknown base model.", listed, "base_model")


def _check_environment(table: object) -> Iterator[Finding]:
    try:
        good = isinstance(table, dict) and not _too_deep(table) and json.dumps(table, allow_nan=False) is not None
    except (TypeError, ValueError, RecursionError):
        good = False
    if not good:
        hint = "Use text, numbers, true, false and lists."
        yield finding("wrong-type", STAGE, "Not a table of plain values.", hint, "environment")


def _too_deep(value: object, depth: int = 0) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > _MAX_DEPTH or any(_too_deep(part, depth + 1) for part in inner)


def _flatten(table: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf; nested tables and dotted keys are the same thing."""
    if not isinstance(table, dict):
        yield prefix.rstrip(".") or "prime_rl", table
        return
    for name, value in table.items():
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            yield from _flatten(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _check_value(key: ConfigKey, value: Any) -> Finding | None:
    place = f"prime_rl.{key.path}"
    exact = type(value) is _TYPES[key.type] or (key.type == "float" and type(value) is int)
    if not exact or (isinstance(value, str) and len(value) > _MAX_TEXT):
        return finding("wrong-type", STAGE, f"Not {_article(key.type)}.", f"Write {_literal(key.default)}.", place)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low = -math.inf if key.low is None else key.low
        high = math.inf if key.high is None else key.high
        if finite(value) is None or not low <= value <= high:
            hint = f"Use {_bounds(key)}.{' ' + key.reason if key.reason else ''}"
            return finding("out-of-range", STAGE, "Out of range.", hint, place)
    if key.choices and value not in key.choices:
        return finding("not-a-choice", STAGE, "Not a choice.", f"Use {' or '.join(key.choices)}.", place)
    return None


def _check_budget(config: Mapping[str, Any], limits: TaskLimits) -> Iterator[Finding]:
    """``batch_size`` is rollouts per step, so the product is what the job samples."""
    steps, batch = config.get("max_steps"), config.get("batch_size")
    if steps is not None and batch is not None and steps * batch > limits.rollouts:
        hint = f"max_steps * batch_size must be at most {limits.rollouts}."
        yield finding("over-budget", STAGE, "Too many rollouts.", hint, "prime_rl")


def _suggest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name[:80], known, 1)
    return f"Did you mean {close[0]}?" if close else f"Keys: {', '.join(known[:12])}."


def _shown(name: str) -> str:
    return ascii(name[:60])[1:-1]


def _article(kind: str) -> str:
    return {"int": "an integer", "float": "a number", "str": "text", "bool": "true or false"}[kind]


def _literal(value: Any) -> str:
    return json.dumps(value)


def _bounds(key: ConfigKey) -> str:
    if key.low is not None and key.high is not None:
        return f"{key.low:g} to {key.high:g}"
    return (
        f"{key.low:g} or more"
        if key.low is not None
        else f"{key.high:g} or less"
        if key.high is not None
        else "a finite number"
    )
