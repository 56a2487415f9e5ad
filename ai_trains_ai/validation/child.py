"""Run the sandboxed side of a stage and read its frames: untrusted bytes in, plain data or a finding out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ai_trains_ai.errors import SandboxError, UntrustedDataError
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.records import Finding, Limits, SandboxResult
from ai_trains_ai.validation.codes import CODES, StageFailed, finding
from ai_trains_ai.validation.plain import strict_json

_MAX_TEXT = 200
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")
_ENDS = {
    "timeout": ("timeout", "Takes too long.", "Do less work."),
    "cpu_limit": ("timeout", "Takes too long.", "Do less work."),
    "memory_limit": ("memory-limit", "Takes too much memory.", "Keep less data."),
    "output_limit": ("output-limit", "Prints too much.", "Remove the prints."),
    "result_limit": ("result-limit", "The tasks are too big.", "Give less data."),
}


async def run_child(
    sandbox: Sandbox, target: str, request: Mapping[str, Any], files: Mapping[str, bytes], limits: Limits, stage: str
) -> dict[str, bytes]:
    """Frames of a finished child, by kind.

    Raises:
        StageFailed: The child found the environment invalid, hit a limit, or ended in any way but the regular one.
        SandboxError: The sandbox itself failed.
    """
    result = await sandbox.run(target, json.dumps(request).encode(), files=files, limits=limits)
    if result.outcome in ("sandbox_error", "cancelled"):
        raise SandboxError(f"A validation's {stage} run failed: {result.outcome}: {result.detail}")
    frames = dict(result.frames)
    if len(frames) != len(result.frames) or not _ended_well(result):
        raise StageFailed(_bad_end(result, stage))
    if "invalid" in frames:
        raise StageFailed(_invalid(frames["invalid"], stage))
    return frames


def _ended_well(result: SandboxResult) -> bool:
    """By the sandbox's word, and with the last frame last: an early ``os._exit(0)`` doesn't look like success."""
    return result.outcome == "exited" and result.code == 0 and bool(result.frames) and result.frames[-1] == ("end", b"")


def _bad_end(result: SandboxResult, stage: str) -> Finding:
    code, message, hint = _ENDS.get(result.outcome, ("crash", "The process ended early.", "Don't exit the process."))
    return finding(code, stage, message, hint, "environment.py")


def _invalid(data: bytes, stage: str) -> Finding:
    """The finding that the child reports of itself; believing it can only harm the agent's own submission."""
    try:
        said = strict_json(data)
        code, message, hint, place = (plain_text(said[name]) for name in ("code", "message", "hint", "place"))
    except (UntrustedDataError, TypeError, KeyError):
        code = ""
    if code not in CODES:
        return finding("crash", stage, "The process ended early.", "Don't exit the process.", "environment.py")
    return finding(code, stage, message, hint, place)


def plain_text(text: Any) -> str:
    """Untrusted text, short and in printable ASCII."""
    if not isinstance(text, str):
        raise UntrustedDataError("not a text")
    return _UNPRINTABLE.sub("?", text)[:_MAX_TEXT]
