"""Multi-hop: follow edges of a small graph that is listed in any order.

``k > a g > e e > k | g hop 2 ->`` asks for `` e k so k``. Five edges form one path over six of twelve letters; there
are 665,280 such graphs, so every depth has over 80,000 hidden items. The key sorts the edges.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ai_trains_ai.families.worked import WorkedFamily
from ai_trains_ai.records import Item, Task

LETTERS = "abcdefghijkl"
_EDGES = 5
_PROMPT = re.compile(r"((?:[a-l] > [a-l] )+)\| ([a-l]) hop ([1-9]) ->")
_BRIEF = (
    "Edges x > y are listed in any order. Start at a letter and follow {low} to {high} edges."
    " Reply with the letter after each hop, then so and the last letter."
)


class MultiHop(WorkedFamily):
    """Follow several edges of a shuffled path."""

    name = "multi-hop"
    summary = "Follow several edges of a small graph whose edges are listed in any order."
    shallowest = 1
    deepest = _EDGES

    def tasks(self) -> Sequence[Task]:
        """Two tasks: two to three hops, and two to four."""
        return tuple(
            self._task(f"-{a}-{b}", f"Multi-hop, {a} to {b} hops", _BRIEF.format(low=a, high=b), a, b)
            for a, b in ((2, 3), (2, 4))
        )

    def draw(self, rng: random.Random, depth: int) -> Item:
        """See `WorkedFamily.draw`."""
        path = rng.sample(LETTERS, _EDGES + 1)
        start = path[rng.randint(0, _EDGES - depth)]
        edges = list(pairwise(path))
        rng.shuffle(edges)
        item = _solve(edges, start, depth)
        assert item is not None  # the path is long enough from this start
        return item

    def item(self, prompt: str) -> Item | None:
        """See `TaskFamily.item`. Any graph with at most one edge out of a letter is read."""
        match = _PROMPT.fullmatch(" ".join(prompt.split()))
        if match is None:
            return None
        listed, start, hops = match.groups()
        words = listed.split()
        return _solve(list(zip(words[0::3], words[2::3], strict=True)), start, int(hops))


def _solve(edges: Sequence[tuple[str, str]], start: str, hops: int) -> Item | None:
    follow: Mapping[str, str] = dict(edges)
    if len(follow) != len(edges):
        return None
    at, steps = start, []
    for _ in range(hops):
        if at not in follow:
            return None
        at = follow[at]
        steps.append(at)
    question = f"| {start} hop {hops}"
    prompt = " ".join(f"{a} > {b}" for a, b in edges) + f" {question} ->"
    key = " ".join(f"{a} > {b}" for a, b in sorted(edges)) + f" {question}"
    return Item(prompt, at, tuple(steps), f"{MultiHop.name}: {key}")
