"""The taskset of the env server: what the agent's ``environment.py`` in the folder ``ATA_SUBMISSION`` exports.

The engine finds it under the name ``ata_job``. It takes some exceptions at import for a module that isn't there, and
goes on or says so: whatever goes wrong here is therefore one kind of error that it lets through, with the real reason.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers.v1 as vf

FILE = "environment.py"


def _import(folder: Path) -> ModuleType:
    """The agent's module, found and named as where it was validated."""
    sys.path.insert(0, str(folder))  # for the agent's own helper modules
    spec = importlib.util.spec_from_file_location("environment", folder / FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = module  # pydantic and verifiers look names up here
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        said = error.msg if isinstance(error, SyntaxError) else error
        reason = f"{type(error).__name__}: {said}".split("\n")[0][:300]
        raise ImportError(f"Failed to load environment '{FILE}': {reason} ({_place(error, folder)})") from error
    return module


def _place(error: BaseException, folder: Path) -> str:
    """The innermost line of the agent's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == folder]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else FILE


def _exported(module: ModuleType, base: type[Any], required: bool) -> type[Any] | None:
    names = getattr(module, "__all__", ())
    found = [
        value
        for value in (getattr(module, name, None) for name in names)
        if isinstance(value, type) and issubclass(value, base) and value is not base
    ]
    if len(found) > 1 or (required and not found):
        kind = base.__name__
        raise ImportError(f"Failed to load environment '{FILE}': __all__ names {len(found)} {kind}s, not one.")
    return found[0] if found else None


_module = _import(Path(os.environ["ATA_SUBMISSION"]).resolve())
_found = [_exported(_module, vf.Taskset, True), _exported(_module, vf.Env, False)]
globals().update({exported.__name__: exported for exported in _found if exported is not None})
__all__ = [exported.__name__ for exported in _found if exported is not None]
