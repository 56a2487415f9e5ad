"""The pipelined outer loop against one that waits for every job of a step, over the same jobs, as a ratio of wall time.

Run: ``python benchmarks/pipeline.py``. The real loop, store, validation and evaluation play a scripted agent whose jobs
only take time: log-normal around 25 minutes and cut to 10-60, drawn from the job's id, thus equal in both arms, on as
many slots as the published run had pods. An update takes two minutes and a turn one. Time is scaled: a minute is a
fifth of a second. Prints the wall time of a step, how long slots were busy, and how stale the batches were.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ai_trains_ai as ata
from ai_trains_ai.interfaces import RunContext
from ai_trains_ai.records import (
    Checkpoint,
    EpisodeGroup,
    JobResult,
    Message,
    SamplingParams,
    TrainingJob,
    TrainStep,
    Turn,
)
from ai_trains_ai.testing.fakes import ScriptedAgent, ScriptedPolicy, TinyRunner

MINUTE = 0.2  # seconds
TURN, UPDATE = 1.0, 2.0  # minutes
MEDIAN, SPREAD, SHORTEST, LONGEST = 25.0, 0.5, 10.0, 60.0  # minutes of a job
SLOTS = 16


def minutes(job_id: str) -> float:
    drawn = MEDIAN * math.exp(SPREAD * random.Random(job_id).gauss(0.0, 1.0))
    return min(LONGEST, max(SHORTEST, drawn))


class SlowPolicy(ScriptedPolicy):
    """Needs a minute for a turn."""

    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        await asyncio.sleep(TURN * MINUTE)
        return await super().act(conversation, tools, params)


class SlowAgent(ScriptedAgent):
    """Needs two minutes for an update."""

    async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
        await super().start(run, checkpoint)
        self.policy = SlowPolicy(self.version)

    async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
        await asyncio.sleep(UPDATE * MINUTE)
        done = await super().train_step(groups)
        self.policy = SlowPolicy(self.version)
        return done


class SlowRunner(TinyRunner):
    """Its jobs queue for a slot and hold it for as long as their id says."""

    async def start(self, run: RunContext) -> None:
        await super().start(run)
        self._free = asyncio.Semaphore(SLOTS)
        self.busy = 0.0

    async def _execute(self, job: TrainingJob) -> JobResult:
        async with self._free:
            await asyncio.sleep(minutes(job.id) * MINUTE)
            self.busy += minutes(job.id)
            return await super()._execute(job)


def measure(staleness: int, steps: int, folder: Path) -> tuple[float, float, float]:
    """Minutes of a step, share of the slots' time that jobs held them, and mean staleness."""
    runner = SlowRunner(SLOTS)
    experiment = ata.Experiment(
        outer=SlowAgent(),
        inner=runner,
        families=["chained-arithmetic", "multi-hop"],
        max_staleness=staleness,
        probe_episodes=0,
        eval_items=8,
    )
    run = experiment.run_sync(steps, out=folder)
    wall = sum(step["seconds"] for step in run.steps) / MINUTE
    return wall / steps, runner.busy / (SLOTS * wall), sum(step["outer/staleness/mean"] for step in run.steps) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    walls = []
    for name, staleness in (("barrier", 0), ("pipelined", 1)):
        with tempfile.TemporaryDirectory() as folder:
            wall, busy, stale = measure(staleness, steps, Path(folder) / "run")
        walls.append(wall)
        print(f"{name:10} {wall:6.1f} min a step   slots busy {busy:4.0%}   mean staleness {stale:.2f}")
    print(f"ratio      {walls[0] / walls[1]:6.2f}")


if __name__ == "__main__":
    main()
