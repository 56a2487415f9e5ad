from __future__ import annotations

import pytest

from ai_trains_ai.families import load
from ai_trains_ai.interfaces import TaskFamily
from ai_trains_ai.records import Task
from ai_trains_ai.testing import TaskFamilyContract


class TestChainedArithmetic(TaskFamilyContract):
    @pytest.fixture
    def family(self) -> TaskFamily:
        return load("chained-arithmetic")

    @pytest.fixture
    def dry(self, family: TaskFamily) -> tuple[Task, int]:
        return Task("one step", family.name, "", "", {"low": 1, "high": 1}), 100


class TestMultiHop(TaskFamilyContract):
    @pytest.fixture
    def family(self) -> TaskFamily:
        return load("multi-hop")


class TestTriage(TaskFamilyContract):
    @pytest.fixture
    def family(self) -> TaskFamily:
        return load("triage")

    @pytest.fixture
    def dry(self, family: TaskFamily) -> tuple[Task, int]:
        return family.tasks()[0], 20_000
