"""Trained weights on the pod's disk: the newest complete ones, and whether they are what they should be.

Everything here is untrusted until `check` has passed: only safetensors are read, with the base model's names, shapes
and types and finite values, and a server gets them beside the base model's own config and tokenizer.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

MAX_HEADER = 64 << 20  # bytes of a safetensors header that are read at most
CHUNK = 64 << 20  # bytes of a tensor that are looked at in one go
_BITS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F80_0000)}
"""Type -> how its bytes are read, and the exponent that infinities and NaNs have."""
TIED = "lm_head.weight"
UNTRAINED, NOT_FINITE = "the weights are those of the base model", "not finite"


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is: file, first byte, number of bytes."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    size: int


def newest(folder: Path, templates: Mapping[str, str], marker: str, last: int) -> tuple[int, Path] | None:
    """Step and folder of the newest complete weights below ``folder``; those of step 0 are untrained.

    ``last`` is the job's last step.

    ``templates`` are folders with ``{step}`` in their name, the preferred one first.
    """
    found: dict[int, Path] = {}
    for template in reversed(list(templates.values())):
        parent, _, name = template.rpartition("/")
        pattern = re.compile(re.escape(name).replace(r"\{step\}", r"(\d{1,9})"))
        for path in (folder / parent).glob("*"):
            match = pattern.fullmatch(path.name)
            if match and 0 < int(match.group(1)) <= last and (path / marker).is_file():
                found[int(match.group(1))] = path
    return max(found.items()) if found else None


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the ``*.safetensors`` of a folder.

    Raises:
        ValueError: a file is none, a tensor lies outside of it, or a name occurs twice.
    """
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path.name} leads out of the folder")
        for name, tensor in _read(path):
            if name in found:
                raise ValueError(f"tensor {name[:80]!r} is there twice")
            found[name] = tensor
    return found


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    total = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else total
        if length > min(MAX_HEADER, total - 8):
            raise ValueError(f"{path.name} is no safetensors file")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise ValueError(f"{path.name} has no readable header")
    for name, about in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = map(index, about["data_offsets"])
            tensor = Tensor(about["dtype"], tuple(map(index, about["shape"])), path, 8 + length + begin, end - begin)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"tensor {name[:80]!r} is not described") from None
        if begin < 0 or end < begin or 8 + length + end > total:
            raise ValueError(f"tensor {name[:80]!r} lies outside of {path.name}")
        yield name, tensor


def check(folder: Path, base: Path, adapter_rank: int = 0) -> str:
    """What is wrong with trained weights, in a few words; "" when nothing is.

    They end in `UNTRAINED` when the weights are those of the base model, in `NOT_FINITE` when a value is none.

    ``adapter_rank`` is that of a LoRA adapter that was not merged; 0: whole weights.
    """
    try:
        trained, pristine = tensors(folder), tensors(base)
        if not trained:
            return "there is no safetensors file"
        optional = {TIED} if _tied(base) else set()
        odd = _misfit_adapter(trained, pristine, adapter_rank) if adapter_rank else _misfit(trained, pristine, optional)
        if odd:
            return odd
        changed = False
        for name, tensor in trained.items():
            finite, same = _look(tensor, None if adapter_rank else pristine.get(name))
            if not finite:
                return f"tensor {name[:80]!r} has values that are {NOT_FINITE}"
            changed = changed or not (same or ".lora_A." in name)  # an A alone changes nothing: B begins as zero
        return "" if changed else UNTRAINED
    except (OSError, ValueError) as error:
        return str(error)


def _tied(base: Path) -> bool:
    """Whether the output head is the embeddings: then a copy of it may be there or not, in either."""
    return bool(json.loads((base / "config.json").read_text()).get("tie_word_embeddings", False))


def _misfit(trained: Mapping[str, Tensor], base: Mapping[str, Tensor], optional: Container[str]) -> str:
    missing = [name for name in base if name not in trained and name not in optional]
    extra = [name for name in trained if name not in base and name not in optional]
    if missing or extra:
        what, name = ("missing", missing[0]) if missing else ("not the base model's", extra[0])
        return f"tensor {name[:80]!r} is {what}"
    for name, tensor in trained.items():
        model = base.get(name) or base["model.embed_tokens.weight"]
        if (tensor.dtype, tensor.shape) != (model.dtype, model.shape):
            return f"tensor {name[:80]!r} is {tensor.dtype} {tensor.shape}, not {model.dtype} {model.shape}"
        if tensor.size != model.size:
            return f"tensor {name[:80]!r} has {tensor.size} bytes, not {model.size}"
    return ""


def _misfit_adapter(trained: Mapping[str, Tensor], base: Mapping[str, Tensor], rank: int) -> str:
    """A LoRA pair of a weight [out, in] is A [rank, in] and B [out, rank]."""
    for name, tensor in trained.items():
        match = re.fullmatch(r"(?:base_model\.model\.)?(.{1,200})\.lora_([AB])\.weight", name)
        model = base.get(f"{match.group(1)}.weight") if match else None
        if match is None or model is None or len(model.shape) != 2:
            return f"tensor {name[:80]!r} adapts nothing of the base model"
        shape = (rank, model.shape[1]) if match.group(2) == "A" else (model.shape[0], rank)
        width = {"BF16": 2, "F16": 2, "F32": 4}.get(tensor.dtype, 0)
        if tensor.shape != shape or tensor.size != width * shape[0] * shape[1]:
            return f"tensor {name[:80]!r} is {tensor.dtype} {tensor.shape}, not {shape}"
    return ""


def _look(tensor: Tensor, pristine: Tensor | None) -> tuple[bool, bool]:
    """Whether all values are finite, and whether they are those of ``pristine`` (``None``: zeros)."""
    import numpy as np  # every engine has it

    if tensor.dtype not in _BITS:
        raise ValueError(f"a tensor has type {tensor.dtype[:20]}, which no trained weight has")
    kind, exponent = _BITS[tensor.dtype]
    same = True
    with tensor.path.open("rb") as file, (pristine or tensor).path.open("rb") as other:
        file.seek(tensor.start)
        other.seek((pristine or tensor).start)
        for begin in range(0, tensor.size, CHUNK):
            size = min(CHUNK, tensor.size - begin)
            bits = np.frombuffer(file.read(size), kind)
            if ((bits & exponent) == exponent).any():
                return False, False
            as_before = not bits.any() if pristine is None else bits.tobytes() == other.read(size)
            same = same and as_before
    return True, same


def lay_out(target: Path, weights: Path | None, base: Path, adapter: Mapping[str, Any] | None = None) -> None:
    """A folder to serve: checked weights (``None``: the base model's) beside the base model's own other files.

    With ``adapter`` (its config, made by us) the weights go to ``target/adapter`` and the base model is whole.
    """
    target.mkdir(parents=True)
    whole = weights is None or adapter is not None
    for path in base.iterdir():
        if path.is_file() and (whole or not path.name.startswith(("model", "pytorch_model"))):
            (target / path.name).symlink_to(path.resolve())
    if weights is None:
        return
    place = target
    if adapter is not None:
        place = target / "adapter"
        place.mkdir()
        (place / "adapter_config.json").write_text(json.dumps(adapter))
    for path in weights.glob("*.safetensors"):
        (place / path.name).symlink_to(path.resolve())
    listed = weights / "model.safetensors.index.json"
    if adapter is None and listed.is_file():
        files = {name: tensor.path.name for name, tensor in tensors(weights).items()}  # never the job's own index
        (place / listed.name).write_text(json.dumps({"metadata": {}, "weight_map": files}))
