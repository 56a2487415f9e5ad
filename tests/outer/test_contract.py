"""The embedded trainer, with the shipped model, and the fake one keep the contract."""

from __future__ import annotations

import pytest

from ai_trains_ai.interfaces import OuterTrainer
from ai_trains_ai.outer.embedded import EmbeddedOuterTrainer
from ai_trains_ai.testing import OuterTrainerContract, ScriptedAgent


class TestEmbeddedOuterTrainer(OuterTrainerContract):
    @pytest.fixture
    def trainer(self) -> OuterTrainer:
        return EmbeddedOuterTrainer()


class TestScriptedAgent(OuterTrainerContract):
    @pytest.fixture
    def trainer(self) -> OuterTrainer:
        return ScriptedAgent()
