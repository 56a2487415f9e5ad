"""Public practice rows for environments that agents write."""

from __future__ import annotations

import random
from typing import Any

from ai_trains_ai.families import load


def practice(family: str, low: int, high: int, n: int = 128, seed: int = 0) -> list[dict[str, Any]]:
    """``n`` public problems of a family, solved in ``low`` to ``high`` steps.

    Never one of the hidden class. Small problem spaces repeat rows.

    Args:
        family: Name of a built-in family, e.g. ``"chained-arithmetic"``.
        low: Fewest steps.
        high: Most steps.
        n: Number of rows.
        seed: The same arguments give the same rows.

    Returns:
        Rows ``{"prompt": str, "answer": str, "steps": list[str]}``.

    Raises:
        UnknownName: no such family.
        ConfigurationError: the depths are outside of what the family knows.
    """
    generator = load(family)
    generator.check_depths(low, high)
    rng = random.Random(f"{family} {low} {high} {seed}")
    drawn = (generator.draw_class(rng, low, high, hidden=False) for _ in range(n))
    return [{"prompt": item.prompt, "answer": item.answer, "steps": list(item.steps)} for item in drawn]
