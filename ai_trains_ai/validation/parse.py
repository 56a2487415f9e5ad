"""Stage 1: bytes to TOML tables, source text and probes. Agent text is parsed here, so every parser is fenced in."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from ai_trains_ai.errors import UntrustedDataError
from ai_trains_ai.records import Finding
from ai_trains_ai.validation.codes import StageFailed, finding
from ai_trains_ai.validation.plain import finite, strict_json
from ai_trains_ai.workspace import SUBMITTED

STAGE = "parse"
MAX_BYTES = {"environment.py": 64 << 10, "job.toml": 16 << 10, "probes.jsonl": 64 << 10}
MAX_PROBES = 32
MAX_REPLIES = 8
# tomllib's time is quadratic in the depth of dotted keys: 64 KB of "a.a.a…" take 18 CPU seconds.
_MAX_DOTS = 6
_MAX_LINE = 2_000


@frozen
class Probe:
    """A check that the agent asks for: the reward of these replies (one per turn) to a row, within bounds."""

    replies: tuple[str, ...]
    row: int
    low: float
    high: float
    place: str


@frozen
class Parsed:
    """A submission as data."""

    job: Mapping[str, Any]
    source: str
    probes: tuple[Probe, ...]


def parse(files: Mapping[str, bytes]) -> Parsed:
    """Parse a submission's files. Raises `StageFailed`."""
    problems: list[Finding] = [
        finding("unknown-file", STAGE, "Not a file of a submission.", f"Use {', '.join(SUBMITTED)}.", ascii(name)[1:-1])
        for name in sorted(set(files) - set(SUBMITTED))
    ]
    for name, code in (("environment.py", "no-environment"), ("job.toml", "no-job")):
        if name not in files:
            problems.append(finding(code, STAGE, f"There is no {name}.", f"Write {name}."))
    texts: dict[str, str] = {}
    for name, limit in MAX_BYTES.items():
        data = files.get(name, b"")
        if len(data) > limit:
            problems.append(finding("file-too-big", STAGE, f"More than {limit >> 10} KiB.", "Shorten it.", name))
            continue
        try:
            texts[name] = data.decode("utf-8")
        except UnicodeDecodeError:
            problems.append(finding("not-utf8", STAGE, "Not UTF-8 text.", "Write plain text.", name))
    if problems:
        raise StageFailed(*problems)
    return Parsed(_toml(texts["job.toml"]), texts["environment.py"], tuple(_probes(texts["probes.jsonl"])))


def _toml(text: str) -> dict[str, Any]:
    for number, line in enumerate(text.splitlines(), 1):
        key = line.split("=", 1)[0]
        nested = key.count(".") > _MAX_DOTS or line.count("[") > 40 or line.count("{") > 20
        if nested or len(line) > _MAX_LINE:
            raise StageFailed(
                finding("toml-syntax", STAGE, "Line too long or nested.", "Simplify.", f"job.toml:{number}")
            )
    try:
        return tomllib.loads(text)
    except (
        Exception
    ) as error:  # the standard library's parser promises TOMLDecodeError alone, but agents write the text
        at = re.search(r"line (\d+)", str(error))
        place = f"job.toml:{at[1]}" if at else "job.toml"
        raise StageFailed(
            finding("toml-syntax", STAGE, "Not valid TOML.", 'Write key = value, text in "…".', place)
        ) from None


def _probes(text: str) -> list[Probe]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) > MAX_PROBES:
        raise StageFailed(
            finding("probes-syntax", STAGE, f"More than {MAX_PROBES} probes.", "Remove some.", "probes.jsonl")
        )
    return [_probe(line, f"probes.jsonl:{number}") for number, line in lines]


def _probe(line: str, place: str) -> Probe:
    try:
        data = strict_json(line)
        replies, row = data.pop("replies"), data.pop("row", 0)
        low, high = _bound(data, "min", -math.inf), _bound(data, "max", math.inf)
        good = (
            not data
            and isinstance(replies, list)
            and 1 <= len(replies) <= MAX_REPLIES
            and all(isinstance(reply, str) for reply in replies)
            and type(row) is int
            and row >= 0
            and low <= high
        )
    except (UntrustedDataError, TypeError, KeyError, AttributeError):
        good = False
    if not good:
        hint = 'Write {"replies": ["so 5"], "min": 0.9}.'
        raise StageFailed(finding("probes-syntax", STAGE, "Not a probe.", hint, place))
    return Probe(tuple(replies), row, low, high, place)


def _bound(data: dict[str, Any], name: str, default: float) -> float:
    if name not in data:
        return default
    bound = finite(data.pop(name))
    if bound is None:
        raise UntrustedDataError(f"{name} is no finite number")
    return bound
