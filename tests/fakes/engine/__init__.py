"""A stand-in for prime-rl's programs on a machine without a GPU.

`install` writes a folder of programs that read the very configs of the real ones (v0.8.0's layout, and the later one
where the config names a run), open their ports, and write their files and log lines. The environment is not run: its
server only looks whether the first statement of environment.py raises. What goes wrong is a word in a file beside them.
With `learning.py` the environment is played by verifiers and a tiny model learns from it.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path

from attrs import asdict, frozen

from ai_trains_ai.pico import model_folder

LEARNING = {"inference": "-I ", "vllm": "-I ", "torchrun": "-I ", "env-server": "", "orchestrator": ""}
"""The programs that really learn, and whether what a pod has on its path is kept from them."""
PROGRAMS = ("rl", "inference", "env-server", "orchestrator", "torchrun", "vllm", "nvidia-smi")
FAULTS = (
    "slow-steps",
    "config-unknown-key",
    "vllm-memory",
    "vllm-never-ready",
    "vllm-exits-0",
    "environment-import",
    "environment-killed",
    "zero-signal",
    "trainer-memory",
    "broadcast",
    "disk-full",
    "stands-still",
    "host-memory",
    "no-weights",
    "not-finite",
    "untrained",
    "orchestrator-lingers",
    "orchestrator-fails-at-the-end",
    "launcher-hangs",
    "configs-elsewhere",
    "replies-dead",
    "reward-raises",
    "gpu-lost",
    "first-step-late",
    "other-shapes",
)


@frozen
class Told:
    """What a program writes in the midst of its work, and its end: an exit status, or ``None``: all stand still."""

    program: str
    text: str
    status: int | None


def install(
    folder: Path, *, fault: str = "", gpus: int = 1, preflight: str = "", told: Told | None = None, learns: bool = False
) -> Path:
    """Write the programs; what ``nvidia-smi`` shows are A40s.

    ``preflight`` is what a pre-flight's client prints; without it the real one runs. ``learns`` takes the programs that
    play the environment and train a tiny model for real; they know no faults.
    """
    assert fault in ("", *FAULTS), fault
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    for name in PROGRAMS:
        how = f"{LEARNING[name]}{here}/learning.py" if learns and name in LEARNING else f"-I {here}/programs.py"
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {how} {name} "{programs}" "$@"\n')
        (programs / name).chmod(0o755)
    said = f'case "$*" in *pod.preflight*) cat {programs}/preflight; exit;; esac\n' if preflight else ""
    if fault == "replies-dead":
        said += 'case "$*" in *pod.replies*) exit 3;; esac\n'
    (programs / "preflight").write_text(preflight)
    (programs / "python").write_text(f'#!/bin/sh\n{said}exec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    (programs / "fault").write_text(fault)
    (programs / "told.json").write_text(json.dumps(told and asdict(told)))
    (programs / "gpus").write_text(str(gpus))
    return programs


def models(folder: Path) -> Path:
    """Two base models with a few tensors and tied embeddings."""
    for name, width in (("Qwen/Qwen3-0.6B", 8), ("Qwen/Qwen3-1.7B", 16)):
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        tensors = {"model.embed_tokens.weight": (64, width), "model.layers.0.self_attn.q_proj.weight": (width, width)}
        header, body = {}, b""
        for tensor, shape in tensors.items():
            data = b"\x80\x3f" * (shape[0] * shape[1])
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
            body += data
        text = json.dumps(header).encode()
        (target / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
        (target / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "hidden_size": width}))
        (target / "tokenizer.json").write_text("{}")
    return folder


def learning_models(folder: Path) -> Path:
    """The shipped tiny models under the names of real ones."""
    for name, tiny in (("Qwen/Qwen3-0.6B", "pico-m"), ("Qwen/Qwen3-1.7B", "pico-s")):
        shutil.copytree(model_folder(tiny), folder / name, dirs_exist_ok=True)
    return folder
