"""What the built-in families share: worked replies, their metrics, and sampling that respects the hidden class.

A reply is ``<step> <step> ... so <answer>``. The exact metric reads only what follows the last ``so``.
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.families.hidden import reserved
from ai_trains_ai.interfaces import TaskFamily
from ai_trains_ai.records import Item, Task

_SO = re.compile(r"\bso\b")
_EXAMPLES = 4


def final_answer(reply: str) -> str | None:
    """What follows the last word ``so``, white space normalised; ``None`` when the reply never says it."""
    _, *after = _SO.split(reply)
    return " ".join(after[-1].split()) if after else None


class WorkedFamily(TaskFamily):
    """A family whose items are solved in ``low`` to ``high`` steps.

    Class attributes:
        shallowest: Smallest depth that `draw` accepts.
        deepest: Largest depth that `draw` accepts.
    """

    shallowest: ClassVar[int]
    deepest: ClassVar[int]

    @abstractmethod
    def draw(self, rng: random.Random, depth: int) -> Item:
        """One item of ``depth`` steps, of either class."""

    def check_depths(self, low: int, high: int) -> None:
        """Raises `ConfigurationError` unless ``low`` to ``high`` is a range of depths of this family."""
        if not self.shallowest <= low <= high <= self.deepest:
            allowed = f"{self.shallowest} <= low <= high <= {self.deepest}"
            raise ConfigurationError(f"{self.name}: depths must satisfy {allowed}, got low={low}, high={high}.")

    def draw_class(self, rng: random.Random, low: int, high: int, *, hidden: bool) -> Item:
        """One item of uniform depth in ``low`` to ``high``, of the hidden class or of the public one."""
        depth = rng.randint(low, high)
        while True:
            item = self.draw(rng, depth)
            if reserved(item.key) == hidden:
                return item

    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        """See `TaskFamily.items`. Raises `ConfigurationError` when the task has too few distinct items."""
        low, high = int(task.parameters["low"]), int(task.parameters["high"])
        self.check_depths(low, high)
        found: dict[str, Item] = {}
        misses = 0
        while len(found) < n:
            item = self.draw_class(rng, low, high, hidden=hidden)
            misses = misses + 1 if item.key in found else 0
            if misses > 1_000:
                kind = "hidden" if hidden else "public"
                raise ConfigurationError(f"{task.id} has no {n} distinct {kind} items; it ran dry at {len(found)}.")
            found[item.key] = item
        return list(found.values())

    def gold(self, item: Item) -> str:
        """See `TaskFamily.gold`: every step, then the answer, with the blank that follows the prompt's arrow."""
        return f" {' '.join(item.steps)} so {item.answer}"

    def score(self, item: Item, reply: str) -> float:
        """1 when what follows the last ``so`` is the answer, else 0."""
        return float(final_answer(reply) == item.answer)

    def partial(self, item: Item, reply: str) -> float:
        """1 for a right answer, else half the share of steps that stand at their place."""
        if self.score(item, reply) == 1.0:
            return 1.0
        said = _SO.split(reply, maxsplit=1)[0].split()
        right = sum(a == b for a, b in zip(said, item.steps, strict=False))
        return 0.5 * right / len(item.steps)

    def _task(self, suffix: str, title: str, brief: str, low: int, high: int) -> Task:
        """A task with public examples that never change."""
        task = Task(f"{self.name}{suffix}", self.name, title, brief, {"low": low, "high": high})
        examples: Sequence[Item] = self.items(task, random.Random(task.id), _EXAMPLES, hidden=False)
        return Task(task.id, task.family, task.title, task.brief, task.parameters, tuple(examples))
