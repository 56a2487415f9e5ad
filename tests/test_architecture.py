"""Rooms import downwards, and the light parts stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ai_trains_ai"
FLOORS = [
    {"records", "errors", "pico", "events", "convert", "threads", "blocking"},
    {"interfaces", "workspace", "environments", "store"},
    {"families", "sandbox", "rewards", "transport", "plugins", "report", "trackers"},
    {"validation", "evaluation", "fleet"},
    {"session", "configuration"},
    {"agent", "outer", "inner", "providers"},
    {"loop"},
    {"experiment", "byhand"},
    {"cli", "testing"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def _imports(path: Path) -> set[str]:
    """Rooms that a module imports when it runs; what only a type checker sees doesn't count."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                block[:] = [n for n in block if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test))]
    found = set()
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "ai_trains_ai":
            names += [f"ai_trains_ai.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("ai_trains_ai.")}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_import_downwards(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    upwards = {other for other in _imports(path) - {room} if FLOOR[other] > FLOOR[room]}
    assert not upwards, f"{path} imports upwards: {upwards}"


def test_only_environments_imports_verifiers() -> None:
    """Here, that is: what travels to a pod runs beside the engine's own version."""
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] == "environments" or "pod" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "verifiers" for name in names), path


HEAVY = (
    "torch",
    "verifiers",
    "tinker",
    "runpod",
    "matplotlib",
    "pandas",
    "rich",
    "typer",
    "numpy",
    "pydantic",
    "tokenizers",
    "safetensors",
)
LIGHT = {
    "import": "import ai_trains_ai",
    "every public name": "import ai_trains_ai as ata; [getattr(ata, name) for name in ata.__all__]",
    "an experiment and its plugins": "import ai_trains_ai as ata; ata.Experiment.embedded().plugins",
}


@pytest.mark.parametrize("code", LIGHT.values(), ids=LIGHT)
def test_nothing_heavy_is_imported(code: str) -> None:
    probe = f"import sys; {code}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves() -> None:
    import ai_trains_ai as ata

    for name in ata.__all__:
        assert getattr(ata, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ata.nonsense  # type: ignore[attr-defined]


def test_every_name_of_the_testing_kit_is_what_it_says() -> None:
    from types import ModuleType

    from ai_trains_ai import testing

    for name in testing.__all__:
        assert not isinstance(getattr(testing, name), ModuleType), name
