"""Alert triage: read a level and a team off fixed tables, and name priority and team.

``alert prod eu db disk 83 ->`` asks for `` mid data so p2 data``. 77,760 prompts; the region says nothing, so they are
19,440 problems (about 2,430 hidden). Values are 10 to 99 and are read digit by digit; thresholds are tens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ai_trains_ai.families.worked import WorkedFamily
from ai_trains_ai.records import Item, Task

TEAMS: Mapping[str, str] = {
    "db": "data", "cache": "data", "queue": "data", "index": "data",
    "web": "edge", "cdn": "edge", "dns": "edge", "proxy": "edge",
    "auth": "core", "pay": "core", "mail": "core", "cart": "core",
}  # fmt: skip
THRESHOLDS: Mapping[str, tuple[int, int]] = {
    "disk": (90, 70), "cpu": (80, 60), "memory": (80, 50), "errors": (50, 20), "delay": (70, 30), "load": (60, 40),
}  # fmt: skip
"""Metric -> value from which the level is high, and from which it is mid."""
ENVIRONMENTS: Mapping[str, int] = {"prod": 0, "stage": 1, "test": 2}
"""Environment -> how many priorities less urgent than prod."""
REGIONS = ("eu", "us", "asia", "africa")
LEVELS: Mapping[str, int] = {"high": 1, "mid": 2, "low": 3}
_BRIEF = (
    "An alert names environment, region, component, metric and value."
    " Reply with the level and the component's team, then so, the priority and the team."
)


class Triage(WorkedFamily):
    """Two look-ups and one sum; every item takes two steps."""

    name = "triage"
    summary = "Read level, team and priority of an alert off fixed tables."
    shallowest = 2
    deepest = 2

    def tasks(self) -> Sequence[Task]:
        """One task."""
        return (self._task("", "Alert triage, 2 to 2 steps", _BRIEF, 2, 2),)

    def draw(self, rng: random.Random, depth: int) -> Item:
        """See `WorkedFamily.draw`."""
        return _solve(
            rng.choice(tuple(ENVIRONMENTS)),
            rng.choice(REGIONS),
            rng.choice(tuple(TEAMS)),
            rng.choice(tuple(THRESHOLDS)),
            rng.randint(10, 99),
        )

    def item(self, prompt: str) -> Item | None:
        """See `TaskFamily.item`."""
        words = prompt.split()
        if len(words) != 7 or words[0] != "alert" or words[-1] != "->":
            return None
        environment, region, component, metric, value = words[1:-1]
        known = environment in ENVIRONMENTS and region in REGIONS and component in TEAMS and metric in THRESHOLDS
        if not known or len(value) != 2 or not (value.isascii() and value.isdecimal()) or value[0] == "0":
            return None
        return _solve(environment, region, component, metric, int(value))


def _solve(environment: str, region: str, component: str, metric: str, value: int) -> Item:
    high, mid = THRESHOLDS[metric]
    level = "high" if value >= high else "mid" if value >= mid else "low"
    priority, team = LEVELS[level] + ENVIRONMENTS[environment], TEAMS[component]
    return Item(
        prompt=f"alert {environment} {region} {component} {metric} {value} ->",
        answer=f"p{priority} {team}",
        steps=(level, team),
        key=f"{Triage.name}: {environment} {component} {metric} {value}",
    )
