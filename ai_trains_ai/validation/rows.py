"""Stage 4: task rows from the sandboxed child, read strictly, without those of the hidden class."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from ai_trains_ai.errors import UntrustedDataError
from ai_trains_ai.interfaces import Sandbox, TaskFamily
from ai_trains_ai.records import Finding, Item, Limits
from ai_trains_ai.validation.child import run_child, strict_json
from ai_trains_ai.validation.codes import StageFailed, finding

STAGE = "load"
TARGET = "ai_trains_ai.environments.probe:load"
MAX_ROWS = 4096
MAX_ROW_BYTES = 64 << 10
HIDDEN_SHARE = 1 / 8
_CHANCE = 1e-4
_logger = logging.getLogger(__name__)


@frozen
class Loaded:
    """The frozen rows.

    ``items`` pairs with them: the family's reading of the prompt, ``None`` where it has none. ``indices`` are their
    positions among the ``total`` rows that load() gave.
    """

    rows: tuple[str, ...]
    items: tuple[Item | None, ...]
    indices: tuple[int, ...]
    total: int
    multi_turn: bool
    warnings: tuple[Finding, ...]


async def load_rows(
    sandbox: Sandbox,
    files: Mapping[str, bytes],
    environment: Mapping[str, Any],
    limits: Limits,
    family: TaskFamily,
    reserved: Callable[[str], bool],
) -> Loaded:
    """Load the environment in a child and freeze its rows. Raises `StageFailed` and `SandboxError`."""
    frames = await run_child(sandbox, TARGET, {"environment": environment}, files, limits, STAGE)
    try:
        rows = frames["rows"].decode("utf-8").split("\n")
        prompts = [_prompt(row) for row in rows]
        multi_turn = bool(strict_json(frames["about"])["multi_turn"])
        if len(rows) > MAX_ROWS:
            raise UntrustedDataError("too many rows")
    except (UntrustedDataError, KeyError, TypeError, UnicodeDecodeError):
        raise StageFailed(
            finding("crash", STAGE, "The tasks can't be read.", "Use plain data.", "environment.py")
        ) from None
    items = [_read(family, prompt) for prompt in prompts]
    kept = [index for index, item in enumerate(items) if item is None or not reserved(item.key)]
    if not kept:
        hint = "Draw more tasks."
        raise StageFailed(finding("no-rows-left", STAGE, "All tasks are of the hidden class.", hint, "environment.py"))
    return Loaded(
        rows=tuple(rows[index] for index in kept),
        items=tuple(items[index] for index in kept),
        indices=tuple(kept),
        total=len(rows),
        multi_turn=multi_turn,
        warnings=tuple(_warnings(prompts, items, reserved)),
    )


def _prompt(row: str) -> str:
    """The prompt text of a row; empty when the environment speaks first."""
    if len(row) > MAX_ROW_BYTES:
        raise UntrustedDataError("row too big")
    data = strict_json(row)
    prompt = data.get("prompt") if isinstance(data, dict) else data
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    texts = [message["content"] for message in prompt if message["role"] == "user"]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _read(family: TaskFamily, prompt: str) -> Item | None:
    try:
        return family.item(prompt)
    except Exception:
        _logger.warning("family %s can't read a prompt", family.name, exc_info=True)
        return None


def _warnings(
    prompts: Sequence[str], items: Sequence[Item | None], reserved: Callable[[str], bool]
) -> Iterator[Finding]:
    total = len(prompts)
    if unread := sum(item is None for item in items):
        yield finding(
            "unread-prompts",
            STAGE,
            f"{unread} of {total} prompts are not of this family.",
            "",
            "environment.py",
            "warning",
        )
    distinct = len(set(prompts))
    if distinct * 2 < total:
        yield finding(
            "duplicate-rows", STAGE, f"Only {distinct} of {total} prompts differ.", "", "environment.py", "warning"
        )
    keys = {item.key for item in items if item is not None}
    hits = sum(map(reserved, keys))
    if hits and chance_of(hits, len(keys)) < _CHANCE:
        message = f"{hits} of {len(keys)} tasks are of the hidden class."
        yield finding("hidden-overlap", STAGE, message, "", "environment.py", "warning")


def chance_of(hits: int, n: int, share: float = HIDDEN_SHARE) -> float:
    """Probability of at least ``hits`` successes in ``n`` draws (binomial)."""
    return math.fsum(
        math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) * share**k * (1 - share) ** (n - k)
        for k in range(hits, n + 1)
    )
