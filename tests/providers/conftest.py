"""A local Runpod for the tests of its providers.

Live tests rent real machines: they run when they are asked for by name and there is a key, and never otherwise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.runpod import LocalRunpod


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    live = [item for item in items if item.get_closest_marker("live")]
    if not re.search(r"(?<!not )\blive\b", config.option.markexpr):
        items[:] = [item for item in items if item not in live]
        config.hook.pytest_deselected(items=live)
    elif not os.environ.get("RUNPOD_API_KEY"):
        for item in live:
            item.add_marker(pytest.mark.skip(reason="the live tests need the environment variable RUNPOD_API_KEY"))


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRunpod]:
    with LocalRunpod(tmp_path / "cloud", 60.0, requests_per_minute=600) as cloud:
        monkeypatch.setenv("RUNPOD_API_KEY", cloud.key)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        yield cloud
    assert cloud.processes == []
    assert cloud.foreign_untouched
