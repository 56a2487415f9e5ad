"""What the sandbox's fork server imports and builds once, so that a validation or a job starts in milliseconds.

Use as ``BubblewrapSandbox(preload=("ai_trains_ai.environments.warm:warm_up",))``.
"""

from __future__ import annotations

import importlib
import json

# Verifiers looks plugins up in these packages first; the first look costs seconds.
_PLUGIN_PACKAGES = ("tasksets", "envs", "harnesses", "harnesses.null", "utils.loaders")


def warm_up() -> None:
    """Import verifiers and go once through loading and scoring, so that forks inherit schemas and caches."""
    import verifiers.v1 as vf

    for name in _PLUGIN_PACKAGES:
        importlib.import_module(f"verifiers.v1.{name}")
    for name in ("probe", "loader", "scoring", "seat"):
        importlib.import_module(f"ai_trains_ai.environments.{name}")
    from ai_trains_ai.environments.loader import LoadedEnvironment
    from ai_trains_ai.environments.scoring import Scorer

    class Row(vf.TaskData):
        answer: str

    class Check(vf.Task[Row]):
        @vf.reward
        async def right(self, trace: vf.Trace) -> float:
            return float(trace.last_reply == self.data.answer)

    class Rows(vf.Taskset[Check, vf.TasksetConfig]):
        def load(self) -> list[Check]:
            return [Check(Row(prompt="1 + 1", answer="2"), self.config.task)]

    loaded = LoadedEnvironment(Rows(vf.TasksetConfig(id="environment")), None)
    (task,) = loaded.tasks_from_rows(loaded.rows())
    scorer = Scorer(loaded)
    scores = [scorer.score(task, "2"), scorer.score(task, ["3"])]
    scorer.close()
    if scores != [1.0, 0.0]:
        raise RuntimeError(f"the warm-up environment scores {json.dumps(scores)} instead of [1.0, 0.0]")
