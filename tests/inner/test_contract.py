"""The embedded runner, with real jobs in the real sandbox, and the fake one keep the contract."""

from __future__ import annotations

import pytest

from ai_trains_ai.inner.embedded import EmbeddedJobRunner
from ai_trains_ai.interfaces import InnerJobRunner, Sandbox
from ai_trains_ai.testing import InnerJobRunnerContract, TinyRunner


class TestEmbeddedJobRunner(InnerJobRunnerContract):
    @pytest.fixture
    def runner(self) -> InnerJobRunner:
        return EmbeddedJobRunner(slots=2)

    @pytest.fixture
    def sandbox(self, sandbox: Sandbox) -> Sandbox:
        return sandbox


class TestTinyRunner(InnerJobRunnerContract):
    @pytest.fixture
    def runner(self) -> InnerJobRunner:
        return TinyRunner()
