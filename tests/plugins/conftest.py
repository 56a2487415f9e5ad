"""Plugins as an installer leaves them on disk: a module and the entry point that names it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

collect_ignore = ["ata-thrift"]  # a package of its own, with its own tests

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install("name", source)`` puts a distribution on the path; all installed plugins are allowed."""
    numbers = itertools.count()
    monkeypatch.delenv("AI_TRAINS_AI_PLUGINS", raising=False)
    monkeypatch.delenv("AI_TRAINS_AI_DISABLE_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, source: str, *, point: str = "", attribute: str = "", version: str = "1.0") -> None:
        module = f"plugin_{abs(hash(tmp_path))}_{next(numbers)}"  # never one that another test has imported
        (tmp_path / f"{module}.py").write_text(source)
        information = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        information.mkdir(exist_ok=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        points = information / "entry_points.txt"
        before = points.read_text() if points.exists() else "[ai_trains_ai]\n"
        points.write_text(f"{before}{point or name} = {module}{attribute and ':' + attribute}\n")

    return put


HEAD = "from ai_trains_ai import hookimpl, RewardFn, Reward\n"
REWARD = HEAD + (
    "class {cls}(RewardFn):\n"
    "    def __call__(self, outcome): return Reward({value}, {{}}, {{}})\n"
    "@hookimpl\n"
    "def register_rewards(register): register('{name}', {cls}, summary='always {value}')"
)


def rewarding(name: str, value: float = 0.5) -> str:
    """The source of a plugin that registers one reward."""
    return REWARD.format(cls="Flat", name=name, value=value)
