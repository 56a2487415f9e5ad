"""Stage 4: task rows from the sandboxed child, read strictly, without those of the hidden class."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from attrs import frozen

from ai_trains_ai.errors import UntrustedDataError
from ai_trains_ai.families.hidden import CLASSES
from ai_trains_ai.interfaces import Sandbox, TaskFamily
from ai_trains_ai.records import Finding, Item, Limits
from ai_trains_ai.validation.child import run_child
from ai_trains_ai.validation.codes import StageFailed, finding
from ai_trains_ai.validation.plain import strict_json

STAGE = "load"
TARGET = "ai_trains_ai.environments.probe:load"
MAX_ROWS = 4096
MAX_ROW_CHARACTERS = 64 << 10
MAX_CHARACTERS = (8 << 20) + MAX_ROWS
# How far a row is searched for a hidden item inside of other text: messages and lines as a whole, and their ends.
_MAX_TEXTS = 32
_MAX_ENDS = 64
_MAX_WORDS = 40
_MAX_LINE = 1_000
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


@frozen
class _Row:
    """A row as the trusted side understands it."""

    text: str
    prompt: str
    contents: tuple[str, ...]

    @property
    def trained(self) -> str:
        """What a base model, which knows no roles, is trained on: the contents of all messages, one after another."""
        return "".join(self.contents)


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
    # Thousands of rows take a while; other episodes go on meanwhile.
    return await asyncio.to_thread(freeze, frames, family, reserved)


def freeze(frames: Mapping[str, bytes], family: TaskFamily, reserved: Callable[[str], bool]) -> Loaded:
    """The rows of a finished child, without those of the hidden class. Raises `StageFailed`."""
    try:
        rows = [_row(line) for line in _lines(frames["rows"])]
        multi_turn = bool(strict_json(frames["about"])["multi_turn"])
    except (UntrustedDataError, KeyError, TypeError, UnicodeDecodeError):
        raise StageFailed(
            finding("crash", STAGE, "The tasks can't be read.", "Use plain data.", "environment.py")
        ) from None
    read = _Reader(family)
    items = [read(row.prompt) for row in rows]
    found = [{item.key for item in _readings(row, item, read)} for row, item in zip(rows, items, strict=True)]
    keys = set().union(*found)
    hidden = set(filter(reserved, keys))
    kept = [index for index, own in enumerate(found) if not own & hidden]
    if not kept:
        hint = "Draw more tasks."
        raise StageFailed(finding("no-rows-left", STAGE, "All tasks are of the hidden class.", hint, "environment.py"))
    return Loaded(
        rows=tuple(rows[index].text for index in kept),
        items=tuple(items[index] for index in kept),
        indices=tuple(kept),
        total=len(rows),
        multi_turn=multi_turn,
        warnings=tuple(_warnings(rows, items, len(hidden), len(keys))),
    )


def _lines(data: bytes) -> list[str]:
    """The lines of the frame, counted before anything is made of them. The child keeps to the same caps."""
    if data.count(b"\n") >= MAX_ROWS:
        raise UntrustedDataError("too many rows")
    text = data.decode("utf-8")
    if len(text) > MAX_CHARACTERS:
        raise UntrustedDataError("too many characters")
    return text.split("\n")


def _row(text: str) -> _Row:
    if len(text) > MAX_ROW_CHARACTERS:
        raise UntrustedDataError("row too big")
    data = strict_json(text)
    if not isinstance(data, dict):
        raise UntrustedDataError("a row is no object")
    prompt = data.get("prompt")
    if prompt is None or isinstance(prompt, str):
        messages = [("user", prompt or "")]
    else:
        messages = [(message["role"], _content(message["content"])) for message in prompt]
    contents = (_content(data.get("system_prompt")), *(content for _, content in messages))
    return _Row(text, "\n\n".join(content for role, content in messages if role == "user"), contents)


def _content(content: Any) -> str:
    """The text of a message, as the jobs read it: a list of parts counts with the text of each."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content if isinstance(part, dict))


class _Reader:
    """Reads texts with a family; what it fails on counts as foreign."""

    def __init__(self, family: TaskFamily) -> None:
        self._family = family
        self._failed = False

    def __call__(self, text: str) -> Item | None:
        try:
            return self._family.item(text)
        except Exception:
            if not self._failed:
                _logger.warning("family %s can't read a prompt", self._family.name, exc_info=True)
            self._failed = True
            return None


def _readings(row: _Row, item: Item | None, read: _Reader) -> Iterator[Item]:
    """Every item that is cheaply found in what a row trains on; ``item`` is that of its prompt."""
    if item is not None:
        yield item
        if row.trained == row.prompt:
            return
    texts = list(dict.fromkeys((row.trained, *row.contents, *row.trained.splitlines())))[:_MAX_TEXTS]
    found = [read(text) for text in texts]
    yield from (whole for whole in found if whole is not None)
    unread = [text for text, whole in zip(texts, found, strict=True) if whole is None and len(text) <= _MAX_LINE]
    done: set[str] = set()
    for text, end in islice(((line, end) for line in unread for end in _ends(line)), _MAX_ENDS):
        if text not in done and (inner := read(end)) is not None:
            done.add(text)  # shorter ends of it may be items too, but not the one that was asked
            yield inner


def _ends(text: str) -> Iterator[str]:
    """The text without its first word, without its first two words, and so on."""
    words = text.split()[-_MAX_WORDS:]
    return (" ".join(words[start:]) for start in range(1, len(words)))


def _warnings(rows: Sequence[_Row], items: Sequence[Item | None], hidden: int, read: int) -> Iterator[Finding]:
    """``hidden`` of ``read`` distinct items in the rows are of the hidden class."""
    total = len(rows)
    if unread := sum(item is None for item in items):
        yield finding(
            "unread-prompts",
            STAGE,
            f"{unread} of {total} prompts are not of this family.",
            "",
            "environment.py",
            "warning",
        )
    distinct = len({row.prompt for row in rows})
    if distinct * 2 < total:
        yield finding(
            "duplicate-rows", STAGE, f"Only {distinct} of {total} prompts differ.", "", "environment.py", "warning"
        )
    if hidden and chance_of(hidden, read) < _CHANCE:
        message = f"{hidden} of {read} tasks are of the hidden class."
        yield finding("hidden-overlap", STAGE, message, "", "environment.py", "warning")


def chance_of(hits: int, n: int, share: float = 1 / CLASSES) -> float:
    """Probability of at least ``hits`` successes in ``n`` draws (binomial)."""
    return math.fsum(
        math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) * share**k * (1 - share) ** (n - k)
        for k in range(hits, n + 1)
    )
