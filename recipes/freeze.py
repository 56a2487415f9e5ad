"""Write `provenance.json`: the hashes of the shipped weights and of the recipes that made them.

    python recipes/freeze.py

Run it once, when weights are final and before any run that is reported. A test holds the files to it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "ai_trains_ai/pico/models"
FILES = ("config.json", "tokenizer.json", "model.safetensors")
RECIPES = ("base_models.py", "outer_model.py", "job_grammar.py")


def hashes() -> dict[str, str]:
    """SHA-256 by path relative to the repository."""
    paths = [MODELS / name / file for name in ("outer", "pico-m", "pico-s") for file in FILES]
    paths += [ROOT / "recipes" / name for name in RECIPES]
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


if __name__ == "__main__":
    (MODELS / "provenance.json").write_text(json.dumps(hashes(), indent=2) + "\n")
