from __future__ import annotations

import pytest

from ai_trains_ai.interfaces import RewardFn
from ai_trains_ai.rewards.hybrid import HybridReward
from ai_trains_ai.testing import RewardFnContract


class TestHybridReward(RewardFnContract):
    @pytest.fixture(params=[True, False], ids=["hardened", "published"])
    def reward(self, request: pytest.FixtureRequest) -> RewardFn:
        return HybridReward(hardened=request.param)
