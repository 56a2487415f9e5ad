"""Small safetensors files, by hand."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

BF16_ONE, BF16_NAN, BF16_INF = b"\x80\x3f", b"\xc0\x7f", b"\x80\x7f"

Tensors = Mapping[str, tuple[tuple[int, ...], bytes]]
"""Name -> shape and bytes."""


def write(path: Path, tensors: Tensors, dtype: str = "BF16") -> Path:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path
