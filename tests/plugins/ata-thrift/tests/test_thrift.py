"""The contracts, on this plugin's parts; what it registers; what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from ata_thrift.journal import read
from ata_thrift.provider import MeteredProvider
from ata_thrift.reward import ThriftReward

from ai_trains_ai import GPUProvider, RewardFn, events
from ai_trains_ai.plugins import Hooks, Registry
from ai_trains_ai.records import Charge, TrainStep
from ai_trains_ai.testing import GPUProviderContract, RewardFnContract, outcomes


class TestReward(RewardFnContract):
    @pytest.fixture
    def reward(self) -> RewardFn:
        return ThriftReward()


class TestProvider(GPUProviderContract):
    @pytest.fixture
    def provider(self) -> GPUProvider:
        return MeteredProvider(slots=2)


def test_it_is_found_by_its_entry_point_and_has_no_fault() -> None:
    registry = Registry(strict=True, required=["ata-thrift"])
    assert registry.plugins.find("thrift").version == "0.2.0"
    assert isinstance(registry.resolve("reward", "thrift"), ThriftReward)
    assert isinstance(registry.resolve("gpu_provider", "ata-thrift:metered"), MeteredProvider)


def test_a_shorter_training_is_paid_better() -> None:
    slow = [reward.total for name, outcome in outcomes() if (reward := ThriftReward(1.0)(outcome))]
    free = [reward.total for name, outcome in outcomes() if (reward := ThriftReward(0.0)(outcome))]
    assert all(a <= b for a, b in zip(slow, free, strict=True))
    assert slow != free


def test_the_journal(tmp_path: Path) -> None:
    hooks = Hooks(Registry().manager)
    hooks.on_event(events.RunStarted("run", "sandbox", folder=str(tmp_path)))
    for step, usd in enumerate((0.25, 0.5)):
        hooks.on_event(events.Charged(Charge("busy", "job", 1.0, "seconds", usd)))
        hooks.on_event(events.StepFinished(step, TrainStep(step, {}), {"outer/reward/mean": 0.1}))
    assert [line["usd"] for line in read(tmp_path)] == [0.25, 0.5]
    assert not hooks.failures
