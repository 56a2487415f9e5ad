"""The embedded engine: Qwen3 in NumPy, its optimizers, the GRPO step, and the shipped tiny models.

Light on purpose: importing this package imports no NumPy. Take what you need from its modules:
`model` (forward and backward), `decode` and `stream` (samplers with a key/value cache), `optim`, `grpo`,
`supervised`, `tokenizer`, `checkpoint` (the Hugging Face layout).

Set ``OPENBLAS_NUM_THREADS=1`` (and ``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``) before NumPy is first imported: at
these sizes one thread a process is fastest, and several processes otherwise fight for the cores.
"""

from __future__ import annotations

from pathlib import Path

from ai_trains_ai.errors import UnknownName

__all__ = ["model_folder", "model_names"]

_MODELS = Path(__file__).parent / "models"


def model_names() -> list[str]:
    """Names of the models that ship with the package, sorted."""
    return sorted(folder.name for folder in _MODELS.iterdir() if (folder / "config.json").is_file())


def model_folder(name: str) -> Path:
    """Folder of a shipped model in the Hugging Face layout.

    Raises:
        UnknownName: no such model ships with this version.
    """
    folder = _MODELS / name
    if name not in model_names():
        raise UnknownName.of("shipped model", name, model_names())
    return folder
