"""The contracts catch faults: every broken implementation fails the tests that are about its fault, and no others.

``broken/<kind>.py`` holds subclasses of a contract with one fault each; ``fails`` names the contract tests that catch
it. ``TestWhole``, where a file has one, is what the others break, and fails nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES = sorted(Path(__file__).with_name("broken").glob("*.py"))
SECONDS = 300
SLOW = ("provider", "runner", "sandbox")  # about a minute each: real processes, time limits


def _classes(file: Path) -> list[str]:
    return [
        node.name
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
    ]


CLASSES = [
    pytest.param(file, name, id=f"{file.stem}-{name}", marks=[pytest.mark.slow] * (file.stem in SLOW))
    for file in FILES
    for name in _classes(file)
]


@cache
def _module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"broken_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _tests(kind: type) -> set[str]:
    return {name for name in dir(kind) if name.startswith("test_")}


def run_pytest(target: Path, folder: Path, cwd: Path, *options: str) -> dict[str, dict[str, bool]]:
    """Whether each test passed (or was skipped), by class and name, in a process of its own."""
    report = folder / f"{target.stem}.xml"
    command = [sys.executable, "-m", "pytest", str(target), "-q", "-o", "python_files=*.py", f"--junitxml={report}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:xdist", *options],
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    passed: dict[str, dict[str, bool]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        owner, name = case.get("classname", "").rpartition(".")[2], case.get("name", "").partition("[")[0]
        good = case.find("failure") is None and case.find("error") is None
        tests = passed.setdefault(owner, {})
        tests[name] = tests.get(name, True) and good
    return passed


@cache
def _results(file: Path, folder: Path) -> dict[str, dict[str, bool]] | str:
    """What each test of a file came to, or why that isn't known: a hang is waited for once, not once a test."""
    try:
        return run_pytest(file, folder, REPOSITORY)
    except subprocess.TimeoutExpired as error:
        return f"{file.name} was not done after {error.timeout} s"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broken")


@pytest.mark.parametrize(("file", "name"), CLASSES)
def test_a_broken_part_fails_the_tests_of_its_fault_and_no_others(file: Path, name: str, folder: Path) -> None:
    kind = getattr(_module(file), name)
    results = _results(file, folder)
    assert not isinstance(results, str), results
    passed = results[name]
    assert set(passed) == _tests(kind)
    assert {test for test, good in passed.items() if not good} == set(kind.fails)
    assert bool(kind.fails) == (name != "TestWhole")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_test_of_a_contract_catches_a_fault(file: Path) -> None:
    kinds = [getattr(_module(file), name) for name in _classes(file)]
    assert set().union(*(kind.fails for kind in kinds)) == set().union(*map(_tests, kinds))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_whole_part_passes_in_a_project_without_a_configuration(file: Path, tmp_path: Path) -> None:
    """As an author has it: no conftest and no option of this repository, so that pytest-asyncio is strict."""
    copy = Path(shutil.copy(file, tmp_path))
    passed = run_pytest(copy, tmp_path, tmp_path, "-k", "TestWhole", "-c", os.devnull, "--strict-markers")
    assert set(passed) == {"TestWhole"}
    assert {test for test, good in passed["TestWhole"].items() if not good} == set()
