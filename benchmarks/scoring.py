"""Cost of scoring one reply: the fast path of `Scorer` against verifiers' own `Task.score`.

Run: ``python benchmarks/scoring.py``. Prints CPU milliseconds per rollout, building of the trace included, and their
ratio. Two rewards and one metric; the best of several rounds, since other load only adds.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = """
import verifiers.v1 as vf
__all__ = ["Rows"]
class Row(vf.TaskData):
    answer: str
    steps: list[str]
class Worked(vf.Task[Row]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split("so")[-1].strip() == self.data.answer)
    @vf.reward(weight=0.3)
    async def partial(self, trace: vf.Trace) -> float:
        words = trace.last_reply.split()
        return sum(step in words for step in self.data.steps) / len(self.data.steps)
    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)
class Rows(vf.Taskset[Worked, vf.TasksetConfig]):
    def load(self):
        for n in range(64):
            yield Worked(Row(prompt=f"start {n} add 1", answer=str(n + 1), steps=[str(n + 1)]), self.config.task)
"""
REPLY = "1 2 so 2"
ROUNDS = 5


def best(work: Callable[[], Any], rollouts: int) -> float:
    """CPU milliseconds per rollout of the fastest round."""
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1000 * min(times) / rollouts


def main() -> None:
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode

    from ai_trains_ai.environments.loader import load_environment
    from ai_trains_ai.environments.scoring import Scorer
    from ai_trains_ai.environments.seat import new_trace, opening_messages

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "environment.py").write_text(SOURCE)
        loaded = load_environment(folder)
        tasks = loaded.tasks_from_rows(loaded.rows())
        scorer = Scorer(loaded)

    async def official() -> None:
        for task in tasks:
            trace = new_trace(task)
            for message in [*opening_messages(task), vf.AssistantMessage(content=REPLY)]:
                trace.nodes.append(MessageNode(message=message, sampled=message.role == "assistant"))
            await task.score(trace)

    gc.collect()
    gc.freeze()
    fast = best(lambda: [scorer.score(task, REPLY) for task in tasks for _ in range(8)], 8 * len(tasks))
    full = best(lambda: [scorer.score(task, [REPLY]) for task in tasks], len(tasks))
    theirs = best(lambda: asyncio.run(official()), len(tasks))
    print(f"Scorer, fast path   {fast:7.3f} ms CPU per rollout")
    print(f"Scorer, full path   {full:7.3f} ms")
    print(f"Task.score          {theirs:7.3f} ms   ratio {theirs / fast:.1f}")


if __name__ == "__main__":
    main()
