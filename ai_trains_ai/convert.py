"""Records to and from JSON, in this one place. Bytes travel as base85 text, tuples as lists."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def _converter() -> Any:
    from cattrs.preconf.json import make_converter

    return make_converter(omit_if_default=True)


def to_data(record: object) -> Any:
    """A record as plain JSON values."""
    return _converter().unstructure(record)


def to_json(record: object) -> str:
    """A record as compact JSON text."""
    # ASCII: an agent may write lone surrogates, which no UTF-8 file takes
    return json.dumps(to_data(record), separators=(",", ":"))


def from_data(data: Any, kind: type[T]) -> T:
    """The record of type ``kind`` that ``to_data`` made."""
    return _converter().structure(data, kind)


def from_json(text: str, kind: type[T]) -> T:
    """The record of type ``kind`` that ``to_json`` made."""
    return from_data(json.loads(text), kind)
