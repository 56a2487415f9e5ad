"""Weights and recipes are frozen by hash: what is reported was run with these, and not tuned afterwards."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_weights_and_recipes_are_the_frozen_ones(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    import freeze

    frozen = json.loads((freeze.MODELS / "provenance.json").read_text())
    changed = [path for path, digest in freeze.hashes().items() if frozen.get(path) != digest]
    assert not changed, f"changed since they were frozen: {changed}; rebuild the weights and run recipes/freeze.py"
    sys.modules.pop("freeze")


def test_all_shipped_models_fit_into_a_few_megabytes() -> None:
    size = sum(path.stat().st_size for path in (ROOT / "ai_trains_ai/pico/models").rglob("*") if path.is_file())
    assert size < 4 << 20
