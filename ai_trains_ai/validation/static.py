"""Stage 3: what the syntax tree of environment.py shows. Suspicion only warns; isolation is what protects."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ai_trains_ai.records import Finding
from ai_trains_ai.validation.codes import StageFailed, finding

STAGE = "static"
_SUSPICIOUS_MODULES = frozenset(
    {"ctypes", "gc", "importlib", "inspect", "multiprocessing", "os", "pickle", "shutil", "signal", "socket"}
    | {"subprocess", "sys", "threading", "time"}
)
_SUSPICIOUS_CALLS = frozenset({"__import__", "compile", "eval", "exec", "globals", "open"})
_V1 = "Write: import verifiers.v1 as vf, then a class Rows(vf.Taskset[...])."


def scan(source: str) -> tuple[Finding, ...]:
    """Warnings about the source. Raises `StageFailed` for what can't work."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        place = f"environment.py:{error.lineno or 1}"
        raise StageFailed(finding("syntax-error", STAGE, "Not valid Python.", "Repair this line.", place)) from None
    except (ValueError, MemoryError, RecursionError):
        raise StageFailed(finding("syntax-error", STAGE, "Not valid Python.", "Simplify.", "environment.py")) from None
    classic = list(_classic(tree))
    if classic:
        raise StageFailed(*classic[:1])
    if not any(_assigns_all(node) for node in tree.body):
        raise StageFailed(finding("no-all", STAGE, "No __all__.", 'Add __all__ = ["Rows"].', "environment.py"))
    return tuple(_suspicious(tree))


def _classic(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        old = (
            (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "load_environment")
            or (isinstance(node, ast.Import) and any(alias.name == "verifiers" for alias in node.names))
            or (
                isinstance(node, ast.ImportFrom)
                and node.module == "verifiers"
                and any(alias.name != "v1" for alias in node.names)
            )
        )
        if old:
            yield finding("classic-api", STAGE, "This verifiers API is gone.", _V1, f"environment.py:{_line(node)}")


def _assigns_all(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _suspicious(tree: ast.Module) -> Iterator[Finding]:
    seen: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module.split(".")[0]]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SUSPICIOUS_CALLS:
            names = [node.func.id]
        for name in names:
            if name in (_SUSPICIOUS_MODULES | _SUSPICIOUS_CALLS) and name not in seen:
                seen.add(name)
                place = f"environment.py:{_line(node)}"
                yield finding("suspicious-code", STAGE, f"Uses {name}.", "", place, "warning")


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 1)
