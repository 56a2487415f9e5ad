"""Live tests rent real machines: they run when they are asked for by name and there is a key, and never otherwise."""

from __future__ import annotations

import os
import re

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    live = [item for item in items if item.get_closest_marker("live")]
    if not re.search(r"(?<!not )\blive\b", config.option.markexpr):
        items[:] = [item for item in items if item not in live]
        config.hook.pytest_deselected(items=live)
    elif not os.environ.get("RUNPOD_API_KEY"):
        for item in live:
            item.add_marker(pytest.mark.skip(reason="the live tests need the environment variable RUNPOD_API_KEY"))
