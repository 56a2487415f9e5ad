"""The sandboxed child's side of a validation. It only produces data; the verdict is made by the trusted side.

Frames of `load`: ``rows`` (one JSON object a line), ``about`` (JSON), ``end``. Frames of `score`: ``scores`` (JSON, per
case the rewards of two passes), ``end``. An environment that can't be used gives ``invalid`` (JSON) and ``end``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from ai_trains_ai.environments.loader import load_environment
from ai_trains_ai.environments.scoring import Scorer
from ai_trains_ai.errors import InvalidEnvironment, RewardError


class Channel(Protocol):
    """Where the frames go; the sandbox's."""

    def send(self, kind: str, data: bytes) -> None: ...


def load(payload: bytes, channel: Channel) -> None:
    """Load ``environment.py`` of the working folder. Payload: JSON ``{"environment": table}``."""
    request = json.loads(payload)

    def work() -> None:
        loaded = load_environment(".", request["environment"])
        rows = loaded.rows()
        scorer = Scorer(loaded)
        channel.send("rows", "\n".join(rows).encode())
        about = {"weights": loaded.reward_weights, "multi_turn": loaded.multi_turn, "fast": scorer.fast}
        channel.send("about", json.dumps(about).encode())

    _report(work, channel)


def score(payload: bytes, channel: Channel) -> None:
    """Score replies twice, the second time backwards.

    Payload: JSON ``{"environment": table, "rows": […], "cases": [[row, [reply, …]], …]}``.
    """
    request = json.loads(payload)

    def work() -> None:
        loaded = load_environment(".", request["environment"])
        tasks = loaded.tasks_from_rows(request["rows"])
        scorer = Scorer(loaded)
        cases = [(tasks[row], replies[0] if len(replies) == 1 else replies) for row, replies in request["cases"]]
        first = [scorer.score(task, reply) for task, reply in cases]
        second = [scorer.score(task, reply) for task, reply in reversed(cases)]
        channel.send("scores", json.dumps(list(zip(first, reversed(second), strict=True))).encode())

    _report(work, channel)


def _report(work: Callable[[], None], channel: Channel) -> None:
    try:
        work()
    except InvalidEnvironment as error:
        said = {"code": error.code, "message": error.message, "hint": error.hint, "place": error.place}
        channel.send("invalid", json.dumps(said).encode())
    except RewardError as error:
        said = {"code": error.code, "message": error.message, "hint": "Repair the reward.", "place": error.place}
        channel.send("invalid", json.dumps(said).encode())
    channel.send("end", b"")
