"""The providers, and the fake one, keep the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from ai_trains_ai.interfaces import GPUProvider
from ai_trains_ai.providers.local import LocalProvider
from ai_trains_ai.testing import FakeGPUProvider, GPUProviderContract


class TestLocalProvider(GPUProviderContract):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> GPUProvider:
        return LocalProvider(slots=2, root=str(tmp_path))


class TestFakeGPUProvider(GPUProviderContract):
    @pytest.fixture
    def provider(self) -> GPUProvider:
        return FakeGPUProvider()
