"""An experiment's parts as ``config.toml`` holds them, and back.

A part with a name is written as its name and arguments; one that was an instance or a class only as a note of what it
was, since a file can't hold it. Arguments are plain values, paths, specs, and lists and mappings of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.plugins import Spec


class _Unwritable(Exception):
    """An argument that a file can't hold."""


def describe(part: Any) -> dict[str, Any]:
    """A part as a table."""
    if isinstance(part, str):
        return {"name": part}
    if not isinstance(part, Spec):
        kind = part if isinstance(part, type) else type(part)
        return {"instance": f"{kind.__module__}:{kind.__qualname__}"}
    try:
        arguments = {name: _write(value) for name, value in part.arguments.items()}
    except _Unwritable as lost:
        return {"instance": f"{part.name} with {lost}"}
    return {"name": part.name} | ({"arguments": arguments} if arguments else {})


def revive(argument: str, kind: str, described: Any) -> Any:
    """The part that `describe` wrote, or a list of them, for an argument of the experiment.

    Raises:
        ConfigurationError: it was something that a file can't hold, and must be passed again.
    """
    if isinstance(described, list):
        return [revive(argument, kind, part) for part in described]
    if "instance" in described:
        raise ConfigurationError(
            f"The run was started with {described['instance']} as {argument!r}, which a file can't hold. "
            f"Pass it again: ata.resume(path, {argument}=…)."
        )
    return _spec(kind, described)


def _spec(kind: str, described: Mapping[str, Any]) -> Spec:
    return Spec(kind, described["name"], {k: _read(v) for k, v in described.get("arguments", {}).items()})


def _write(value: Any) -> Any:
    """An argument as TOML has it. What TOML lacks is a table of one key: {none}, {path}, {spec}, {table}."""
    if value is None:
        return {"none": True}
    if isinstance(value, Spec):
        inner = describe(value)
        if "instance" in inner:
            raise _Unwritable(inner["instance"])
        return {"spec": value.kind, **inner}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"table": {key: _write(item) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_write(item) for item in value]
    plain = value.item() if hasattr(value, "item") and not hasattr(value, "__len__") else value  # a NumPy scalar
    if isinstance(plain, str) and not plain.isascii():
        try:
            plain.encode()
        except UnicodeEncodeError:
            raise ConfigurationError(f"{plain!r} is no valid text, and can't be an argument of a part.") from None
    if isinstance(plain, str | int | float | bool):
        return plain
    kind = plain if isinstance(plain, type) else type(plain)
    raise _Unwritable(f"{kind.__module__}:{kind.__qualname__}")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "none" in value:
        return None
    if "path" in value:
        return Path(value["path"])
    if "spec" in value:
        return _spec(value["spec"], value)
    return {key: _read(item) for key, item in value["table"].items()}
