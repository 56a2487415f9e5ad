"""Which verifiers this library works with. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import re

from ai_trains_ai.errors import MissingDependency

SUPPORTED = ">=0.3.1,<0.5"
_LOWEST, _TOO_NEW = (0, 3, 1), (0, 5)


def require_verifiers() -> str:
    """The installed version of verifiers. Raises `MissingDependency` when it is absent, too old or too new."""
    command = f"pip install 'verifiers{SUPPORTED}'"
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependency(
            f"verifiers is not installed; versions {SUPPORTED} are supported. Install it with: {command}"
        ) from None
    release = tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))
    if not _LOWEST <= release < _TOO_NEW:
        age = "too new" if release >= _TOO_NEW else "too old"
        raise MissingDependency(
            f"verifiers {version} is {age}; versions {SUPPORTED} are supported. Install one with: {command}"
        )
    return version
