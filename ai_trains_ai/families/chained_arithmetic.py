"""Chained arithmetic: a running digit, modulo 10.

``start 7 add 5 times 3 ->`` asks for `` 2 6 so 6``. There are 10 * 22**depth items a depth: 4,840 of two steps (612
hidden), 106,480 of three, 2.3 million of four.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from ai_trains_ai.families.worked import WorkedFamily
from ai_trains_ai.records import Item, Task

_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: (a + b) % 10,
    "minus": lambda a, b: (a - b) % 10,
    "times": lambda a, b: (a * b) % 10,
}
_DRAWN: Mapping[str, range] = {"add": range(1, 10), "minus": range(1, 10), "times": range(2, 6)}
_BRIEF = (
    "Start with a digit and apply {low} to {high} operations, each modulo 10."
    " Reply with the digit after each operation, then so and the last digit."
)


class ChainedArithmetic(WorkedFamily):
    """Apply operations one after the other, keeping the last digit."""

    name = "chained-arithmetic"
    summary = "Apply add, minus and times to a digit one after the other, modulo 10."
    shallowest = 1
    deepest = 6

    def tasks(self) -> Sequence[Task]:
        """Two tasks: two to three operations, and three to four."""
        return tuple(
            self._task(f"-{a}-{b}", f"Chained arithmetic, {a} to {b} steps", _BRIEF.format(low=a, high=b), a, b)
            for a, b in ((2, 3), (3, 4))
        )

    def draw(self, rng: random.Random, depth: int) -> Item:
        """See `WorkedFamily.draw`."""
        operations = []
        for _ in range(depth):
            name = rng.choice(tuple(_OPERATIONS))
            operations.append((name, rng.choice(_DRAWN[name])))
        return _solve(rng.randrange(10), operations)

    def item(self, prompt: str) -> Item | None:
        """See `TaskFamily.item`. Any number of operations with digits 0 to 9 is read."""
        words = prompt.split()
        if len(words) < 5 or len(words) % 2 == 0 or words[0] != "start" or words[-1] != "->":
            return None
        names, digits = words[2:-1:2], [words[1], *words[3:-1:2]]
        if any(name not in _OPERATIONS for name in names) or not all(_is_digit(digit) for digit in digits):
            return None
        first, *rest = map(int, digits)
        return _solve(first, list(zip(names, rest, strict=True)))


def _is_digit(word: str) -> bool:
    return len(word) == 1 and word in "0123456789"


def _solve(first: int, operations: Sequence[tuple[str, int]]) -> Item:
    value, steps = first, []
    for name, operand in operations:
        value = _OPERATIONS[name](value, operand)
        steps.append(str(value))
    key = f"start {first} " + " ".join(f"{name} {operand}" for name, operand in operations)
    return Item(f"{key} ->", str(value), tuple(steps), f"{ChainedArithmetic.name}: {key}")
