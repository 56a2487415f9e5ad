"""Which file names a workspace accepts.

A strict allow-list: names travel into sandboxes, archives, training jobs and onto other operating systems, so
everything that any of them reads as more than a plain name is refused.
"""

from __future__ import annotations

import re

from ai_trains_ai.errors import WorkspaceError

MAX_PATH_LENGTH = 200
MAX_DEPTH = 6

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
# Python, pytest and shells run or read these by themselves.
_MAGIC_NAMES = frozenset({"sitecustomize.py", "usercustomize.py", "conftest.py", "__pycache__", "__editable__"})
_MAGIC_SUFFIXES = (
    *(".pth", ".so", ".pyd", ".dll", ".dylib", ".pyc", ".pkl", ".pickle", ".pt", ".bin"),
    *(".zip", ".tar", ".gz", ".whl", ".egg"),
)
_WINDOWS_DEVICES = frozenset(
    {"con", "prn", "aux", "nul"} | {f"{kind}{n}" for kind in ("com", "lpt") for n in range(10)}
)


def check_path(path: str) -> str:
    """Return ``path`` when a workspace accepts it as a file name; raise `WorkspaceError` with the reason otherwise."""
    if not isinstance(path, str) or not path:
        raise WorkspaceError("The path is empty. Give a name like environment.py.")
    if len(path) > MAX_PATH_LENGTH:
        raise WorkspaceError(f"The path is longer than {MAX_PATH_LENGTH} characters.")
    shown = ascii(path)[1:-1]
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        raise WorkspaceError(f"{shown}: more than {MAX_DEPTH} parts.")
    for part in parts:
        if part in ("", ".", ".."):
            raise WorkspaceError(f"{shown}: the path must be relative, without '.' or '..'. Use a name like notes.txt.")
        if not _PART.fullmatch(part) or part.endswith("."):
            raise WorkspaceError(f"{shown}: only letters, digits, '.', '_' and '-' are allowed in names.")
        name = part.lower()
        if name in _MAGIC_NAMES or name.endswith(_MAGIC_SUFFIXES) or name.split(".")[0] in _WINDOWS_DEVICES:
            raise WorkspaceError(f"{shown}: this name is not allowed. Use another one.")
    return path
