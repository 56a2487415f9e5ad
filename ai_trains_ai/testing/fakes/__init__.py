"""Fakes of the parts that cost money or minutes, for tests of what is built around them.

Each keeps every sentence of its interface (the contracts run over them) and does nothing real: `FakeGPUProvider` rents
machines of air with faults on demand, `ScriptedAgent` says what a script says, `TinyRunner` ends jobs without training
anything. `run_context` lends them what a run would lend.
"""

from __future__ import annotations

from ai_trains_ai.testing.fakes.agent import ENVIRONMENT, JOB, ScriptedAgent, ScriptedPolicy, environment
from ai_trains_ai.testing.fakes.context import FakeClock, run_context
from ai_trains_ai.testing.fakes.jobs import TinyRunner
from ai_trains_ai.testing.fakes.machines import LOST_REPLY, FakeGPUProvider, Unlisted

__all__ = [
    "ENVIRONMENT",
    "JOB",
    "LOST_REPLY",
    "FakeClock",
    "FakeGPUProvider",
    "ScriptedAgent",
    "ScriptedPolicy",
    "TinyRunner",
    "Unlisted",
    "environment",
    "run_context",
]
