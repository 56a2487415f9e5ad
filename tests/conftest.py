"""Parts that tests compose experiments from. One BLAS thread a process, as the library recommends."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ["AI_TRAINS_AI_PLUGINS"] = ""  # what a developer has installed must not change a test

import pytest

from ai_trains_ai.inner.embedded import EmbeddedJobRunner
from ai_trains_ai.interfaces import OuterTrainer, Policy, RunContext, Sandbox
from ai_trains_ai.outer.chat import call_text, parse_calls
from ai_trains_ai.records import (
    Checkpoint,
    EpisodeGroup,
    Exported,
    Message,
    SamplingParams,
    SandboxResult,
    TrainStep,
    Turn,
)
from ai_trains_ai.sandbox import BubblewrapSandbox

ENVIRONMENT = """\
import verifiers.v1 as vf
from ai_trains_ai.families.practice import practice

__all__ = ["Rows"]

class Row(vf.TaskData):
    answer: str
    steps: list[str]

class Worked(vf.Task[Row]):
    @vf.reward
    async def worth(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split("so")[-1].strip() == self.data.answer)

class Rows(vf.Taskset[Worked, vf.TasksetConfig]):
    def load(self):
        for row in practice("{family}", {low}, {high}):
            yield Worked(Row(**row), self.config.task)
"""
JOB = 'base_model = "pico-m"\n\n[prime_rl]\nmax_steps = 3\nbatch_size = 24\noptim.lr = 1e-3\n'


def environment(family: str = "chained-arithmetic", low: int = 2, high: int = 3) -> str:
    return ENVIRONMENT.replace("{family}", family).replace("{low}", str(low)).replace("{high}", str(high))


@pytest.fixture
def job_folder(tmp_path: Path) -> Path:
    """A small valid submission on disk."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "environment.py").write_text(environment())
    (folder / "job.toml").write_text(JOB)
    return folder


class ScriptedPolicy(Policy):
    """Writes the same job for every task; every fourth conversation gives up at once."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.conversations = 0

    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        spoken = sum(message.role == "assistant" for message in conversation)
        if spoken == 0:
            self.conversations += 1
        lines = conversation[1].content.lower()
        family = "multi-hop" if "multi-hop" in lines else "triage" if "triage" in lines else "chained-arithmetic"
        depths = (2, 2) if family == "triage" else (2, 3)
        script = [
            call_text("write_file", path="environment.py", content=environment(family, *depths)),
            call_text("write_file", path="job.toml", content=JOB),
            call_text("submit"),
        ]
        text = "No." if spoken == 0 and self.conversations % 4 == 0 else script[min(spoken, len(script) - 1)]
        ids = (params.seed % 7 + 1, spoken + 1)
        last = next((message.turn for message in reversed(conversation) if message.turn), None)
        prompt = (*last.prompt_ids, *last.ids, 9) if last else (8,)
        return Turn(text, parse_calls(text), "stop", self.version, prompt, ids, (-0.1, -0.2))


class ScriptedTrainer(OuterTrainer):
    """An outer trainer that learns nothing but keeps every contract; counts what it was given."""

    def __init__(self) -> None:
        self.version = 0
        self.trained: list[list[EpisodeGroup]] = []

    async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
        self.run = run
        self.version = checkpoint.version if checkpoint else 0
        self.policy = ScriptedPolicy(self.version)

    async def snapshot(self) -> Policy:
        return self.policy

    async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
        self.trained.append(list(groups))
        self.version += 1
        self.policy = ScriptedPolicy(self.version)
        return TrainStep(self.version, {"outer/kl": 0.0}, sum(len(g.episodes) for g in groups))

    async def save(self, name: str) -> Checkpoint:
        return Checkpoint(name, f"checkpoints/{name}", self.version)

    async def export(self, checkpoint: Checkpoint, folder: Path) -> Exported:
        return Exported(str(folder), "weights")


class Shared(Sandbox):
    """A started sandbox that a run may use and close without ending it: starting one imports verifiers for seconds."""

    def __init__(self, agents: Sandbox, clean: Sandbox) -> None:
        self._agents, self._clean = agents, clean
        self.guarantees = agents.guarantees

    def preload(self, *targets: str) -> None: ...  # what jobs and validation need is there already

    def another(self, preload: Sequence[str] = ()) -> Sandbox:
        return Shared(self._clean, self._clean)

    async def start(self) -> None:
        await self._agents.start()

    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        return await self._agents.run(target, payload, **options)

    async def close(self) -> None: ...


@pytest.fixture(scope="session")
async def sandbox() -> AsyncIterator[Sandbox]:
    """One pair of real bubblewrap servers for the whole session."""
    agents = BubblewrapSandbox(EmbeddedJobRunner.sandbox_preload)
    clean = agents.another(("ai_trains_ai.inner.embedded_job:warm_up",))
    await agents.start()
    yield Shared(agents, clean)
    await agents.close()
    await clean.close()
