"""What goes into a run: payload and files as one blob."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping


def pack_bundle(payload: bytes, files: Mapping[str, bytes]) -> bytes:
    """A JSON line with the sizes, then the bytes of payload and files."""
    header = json.dumps([len(payload), [[path, len(data)] for path, data in files.items()]]).encode()
    return b"".join([header, b"\n", payload, *files.values()])


def unpack_bundle(fd: int) -> bytes:
    """Lay the files of a bundle (the trusted side's) into the working folder; return the payload."""
    with os.fdopen(fd, "rb") as bundle:
        bundle.seek(0)
        size, files = json.loads(bundle.readline())
        payload = bundle.read(size)
        for path, length in files:
            if "/" in path:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.write(bundle.read(length))
    return payload
