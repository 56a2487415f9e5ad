"""Parts that tests compose experiments from. One BLAS thread a process, as the library recommends."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ["AI_TRAINS_AI_PLUGINS"] = ""  # what a developer has installed must not change a test

import pytest

from ai_trains_ai.inner.embedded import EmbeddedJobRunner
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.records import SandboxResult
from ai_trains_ai.sandbox import BubblewrapSandbox
from ai_trains_ai.testing import ScriptedAgent
from ai_trains_ai.testing.fakes import JOB, ScriptedPolicy, environment

__all__ = ["JOB", "ScriptedPolicy", "ScriptedTrainer", "Shared", "environment"]


@pytest.fixture
def job_folder(tmp_path: Path) -> Path:
    """A small valid submission on disk."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "environment.py").write_text(environment())
    (folder / "job.toml").write_text(JOB)
    return folder


class ScriptedTrainer(ScriptedAgent):
    """Writes the same job for every task; every fourth conversation gives up at once."""


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
