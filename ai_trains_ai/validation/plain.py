"""Numbers and JSON of unknown origin, read so that no bytes can raise anything but `UntrustedDataError`."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ai_trains_ai.errors import UntrustedDataError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def finite(value: object) -> float | None:
    """``value`` as a finite float; ``None`` for other types, NaN, infinities and integers that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def strict_json(data: bytes | str) -> Any:
    """JSON without NaN, infinities, repeated keys and lone surrogates. Raises `UntrustedDataError`."""
    try:
        # Given bytes, the standard parser would guess UTF-16 and let surrogates pass.
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise UntrustedDataError(f"not strict JSON: {type(error).__name__}") from None
    return value


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("repeated key")
    return table
