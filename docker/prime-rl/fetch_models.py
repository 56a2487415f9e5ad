"""Puts base models into an image: ``fetch_models.py FOLDER NAME[@REVISION]…``, each below its hub name.

Safetensors, config and tokenizer alone: nothing that has to be unpickled, and no code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.jinja"]


def fetch(folder: Path, model: str) -> None:
    name, _, revision = model.partition("@")
    commit = HfApi().model_info(name, revision=revision or "main").sha
    target = folder / name
    snapshot_download(name, revision=commit, local_dir=target, allow_patterns=WANTED)
    if not list(target.glob("*.safetensors")):
        sys.exit(f"{name} has no safetensors at {commit}.")
    (target / "REVISION").write_text(f"{commit}\n")
    print(f"{name} at {commit}")


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        fetch(Path(sys.argv[1]), wanted)
