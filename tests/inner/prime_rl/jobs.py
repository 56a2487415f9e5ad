"""Jobs for the tests of prime-rl: any config of the surface, and all of its corners."""

from __future__ import annotations

import itertools
import socket
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from ai_trains_ai.inner.prime_rl.memory import SHAPES, Machine, Plan, plan
from ai_trains_ai.inner.prime_rl.profiles import Site
from ai_trains_ai.inner.prime_rl.surface import PROMPT_TOKENS, applies, prime_rl_surface
from ai_trains_ai.records import ConfigSurface, TaskLimits, TrainingJob

SURFACE = prime_rl_surface()
SMALL, LARGER = SHAPES["Qwen/Qwen3-0.6B"], SHAPES["Qwen/Qwen3-1.7B"]
A40, TWO_A5000 = Machine("NVIDIA A40", 1), Machine("NVIDIA RTX A5000", 2)
RTX_4090 = Machine("NVIDIA GeForce RTX 4090", 1)
SITE = Site("/data/out/1", "/models/Qwen3-0.6B")


def config(**changes: Any) -> dict[str, Any]:
    """The defaults with changes; ``__`` in a name is a dot."""
    return {**SURFACE.defaults(), **{name.replace("__", "."): value for name, value in changes.items()}}


def job(config: Mapping[str, Any], environment: Mapping[str, Any] | None = None) -> TrainingJob:
    return TrainingJob(
        "job-1", "episode-1", "task-1", SMALL.name, {}, config, environment or {}, (), 7, TaskLimits(), "hash"
    )


def plan_of(config: Mapping[str, Any]) -> Plan:
    return plan(
        SMALL,
        A40,
        seq_len=config["seq_len"],
        lora_rank=config["lora.rank"],
        optimizer=config["optim.type"],
        in_flight=config["max_inflight_episodes"],
    )


def mended(values: Mapping[str, Any], surface: ConfigSurface = SURFACE) -> dict[str, Any]:
    """The nearest config that keeps the rules."""
    c = dict(values)
    c["batch_size"] = min(512, -(-c["batch_size"] // c["group_size"]) * c["group_size"])
    c["batch_size"] -= c["batch_size"] % c["group_size"]
    c["max_inflight_episodes"] = max(c["max_inflight_episodes"], c["group_size"])
    c["sampling.max_completion_tokens"] = min(c["sampling.max_completion_tokens"], c["seq_len"] - PROMPT_TOKENS)
    c["scheduler.warmup_steps"] = min(c["scheduler.warmup_steps"], c["max_steps"] - 1)
    c["scheduler.decay_steps"] = min(c["scheduler.decay_steps"], c["max_steps"] - c["scheduler.warmup_steps"])
    if c["scheduler.warmup_steps"] + c["scheduler.decay_steps"] == 0:
        c["scheduler.decay_steps"] = 1
    c["scheduler.min_lr"] = min(c["scheduler.min_lr"], c["optim.lr"])
    defaults = surface.defaults()
    return {path: value if applies(path, c) else defaults[path] for path, value in c.items()}


def corners(surface: ConfigSurface = SURFACE) -> Iterator[dict[str, Any]]:
    """Every combination of choices, with all numbers at their lowest and at their highest, made to keep the rules."""
    switches: dict[str, tuple[str | bool, ...]] = {key.path: key.choices for key in surface.keys if key.choices}
    switches |= {key.path: (False, True) for key in surface.keys if key.type == "bool"}
    for highest, *chosen in itertools.product((False, True), *switches.values()):
        numbers = {
            key.path: _number(key.high if highest else key.low, key.type) for key in surface.keys if key.low is not None
        }
        yield mended({**surface.defaults(), **numbers, **dict(zip(switches, chosen, strict=True))}, surface)


def _number(value: float | None, kind: str) -> float:
    bound = 1.0 if value is None else value
    return float(bound) if kind == "float" else int(bound)


def read(text: str) -> dict[str, Any]:
    """A compiled file as the engine reads it: the text "None" is null there."""
    return _nulls(tomllib.loads(text))


def _nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nulls(inner) for name, inner in value.items()}
    return [_nulls(inner) for inner in value] if isinstance(value, list) else None if value == "None" else value


def at(document: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of a compiled file."""
    value: Any = document
    for name in path.split("."):
        value = value[name[:-2]][0] if name.endswith("[]") else value[name]
    return value


def free_ports() -> tuple[int, int, int]:
    """Ports for the first two slots of a machine: each has its own, and so has what is ten above."""
    found: list[int] = []
    while len(found) < 3:
        with socket.socket() as probe, socket.socket() as above:
            try:
                probe.bind(("127.0.0.1", 0))
                above.bind(("127.0.0.1", probe.getsockname()[1] + 10))
                found.append(probe.getsockname()[1])
            except OSError:
                continue
    return found[0], found[1], found[2]
