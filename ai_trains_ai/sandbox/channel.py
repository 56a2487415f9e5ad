"""Frames over a pipe: what a sandboxed child sends, and how the trusted side reads it.

A frame is ``!HI`` (length of the kind, length of the data), the kind (ASCII) and the data. The pipe is opened before
untrusted code runs; code in the child can write anything into it, so the reader believes nothing but the caps.
"""

from __future__ import annotations

import os
import re
import struct

_HEADER = struct.Struct("!HI")
_KIND = re.compile(rb"[a-z0-9_.-]{1,32}")
_READY = _HEADER.pack(0, 0)
# What a frame costs the trusted side beyond its data, charged against the cap: many empty frames are a memory bomb too.
_OVERHEAD = 64


class Channel:
    """The child's end. `send` blocks while the reader is behind."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def ready(self) -> None:
        """Tell the trusted side that the jail stands and the next thing to run is untrusted."""
        self._write(_READY)

    def send(self, kind: str, data: bytes) -> None:
        """Send one frame. ``kind`` is 1-32 characters of ``a-z 0-9 _ . -``."""
        name = kind.encode()
        if not _KIND.fullmatch(name):
            raise ValueError(f"{kind!r} is no frame kind")
        self._write(_HEADER.pack(len(name), len(data)) + name + data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


class FrameReader:
    """The trusted end: takes bytes as they come and gives whole frames.

    Attributes:
        ready: Whether the jail stood before untrusted code ran.
        broken: Why nothing more is read: ``"result_limit"``, ``"malformed"`` or empty.
    """

    def __init__(self, limit: int) -> None:
        self.ready = False
        self.broken = ""
        self._limit = limit
        self._used = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Frames completed by ``data``."""
        frames: list[tuple[str, bytes]] = []
        if self.broken:
            return frames
        self._buffer += data
        while not self.broken and (frame := self._next()):
            frames.append(frame)
        return frames

    def _next(self) -> tuple[str, bytes] | None:
        buffer = self._buffer
        if not self.ready and len(buffer) >= _HEADER.size:
            self.ready = buffer.startswith(_READY)
            if not self.ready:
                self._break("malformed")
                return None
            del buffer[: _HEADER.size]
        if len(buffer) < _HEADER.size:
            return None
        kind_size, size = _HEADER.unpack_from(buffer)
        if not 1 <= kind_size <= 32:
            self._break("malformed")
            return None
        if self._used + size + _OVERHEAD > self._limit:
            self._break("result_limit")
            return None
        end = _HEADER.size + kind_size + size
        if len(buffer) < end:
            return None
        kind = bytes(buffer[_HEADER.size : _HEADER.size + kind_size])
        if not _KIND.fullmatch(kind):
            self._break("malformed")
            return None
        frame = kind.decode(), bytes(buffer[_HEADER.size + kind_size : end])
        del buffer[:end]
        self._used += size + _OVERHEAD
        return frame

    def _break(self, why: str) -> None:
        self.broken = why
        self._buffer.clear()


class OutputTail:
    """Keeps the beginning and the end of an output of any length.

    Attributes:
        total: Bytes seen.
    """

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def value(self) -> bytes:
        """What was kept, with a line that says how much was left out."""
        tail = self._tail[-self._half :]
        lost = self.total - len(self._head) - len(tail)
        gap = f"\n[... {lost} bytes left out ...]\n".encode() if lost else b""
        return bytes(self._head) + gap + bytes(tail)
