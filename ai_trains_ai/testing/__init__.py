"""For authors of parts: contract test classes to subclass with one fixture, and fakes to build tests from.

>>> import pytest
>>> from ai_trains_ai.testing import RewardFnContract
>>> class TestMyReward(RewardFnContract):
...     @pytest.fixture
...     def reward(self):
...         return MyReward()

Needs pytest and, for the contracts with asynchronous tests, pytest-asyncio: ``pip install 'ai-trains-ai[test]'``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ai_trains_ai.testing.cases import outcomes
    from ai_trains_ai.testing.fakes import (
        LOST_REPLY,
        FakeClock,
        FakeGPUProvider,
        ScriptedAgent,
        TinyRunner,
        Unlisted,
        run_context,
    )
    from ai_trains_ai.testing.family import TaskFamilyContract
    from ai_trains_ai.testing.provider import GPUProviderContract
    from ai_trains_ai.testing.reward import RewardFnContract
    from ai_trains_ai.testing.runner import InnerJobRunnerContract
    from ai_trains_ai.testing.sandbox import SandboxContract
    from ai_trains_ai.testing.tracker import TrackerContract
    from ai_trains_ai.testing.trainer import OuterPolicyContract, OuterTrainerContract

_HOMES = {
    "GPUProviderContract": "provider",
    "InnerJobRunnerContract": "runner",
    "OuterPolicyContract": "trainer",
    "OuterTrainerContract": "trainer",
    "RewardFnContract": "reward",
    "SandboxContract": "sandbox",
    "TaskFamilyContract": "family",
    "TrackerContract": "tracker",
    "LOST_REPLY": "fakes",
    "FakeClock": "fakes",
    "FakeGPUProvider": "fakes",
    "ScriptedAgent": "fakes",
    "TinyRunner": "fakes",
    "Unlisted": "fakes",
    "outcomes": "cases",
    "run_context": "fakes",
}
__all__ = [
    "LOST_REPLY",
    "FakeClock",
    "FakeGPUProvider",
    "GPUProviderContract",
    "InnerJobRunnerContract",
    "OuterPolicyContract",
    "OuterTrainerContract",
    "RewardFnContract",
    "SandboxContract",
    "ScriptedAgent",
    "TaskFamilyContract",
    "TinyRunner",
    "TrackerContract",
    "Unlisted",
    "outcomes",
    "run_context",
]


def __getattr__(name: str) -> Any:
    """Load on first use: a sandboxed child imports its targets from here, and has no need of pytest."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ai_trains_ai.testing' has no attribute {name!r}")
    home = f"ai_trains_ai.testing.{_HOMES[name]}"
    if name.endswith("Contract"):
        import pytest

        pytest.register_assert_rewrite(home)  # so that a failing contract shows the values
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
