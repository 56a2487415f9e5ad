from __future__ import annotations

import pytest

from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.testing import SandboxContract


class TestBubblewrapSandbox(SandboxContract):
    @pytest.fixture
    def sandbox(self, sandbox: Sandbox) -> Sandbox:
        """The one of the session."""
        return sandbox
