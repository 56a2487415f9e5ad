"""The Tinker trainer with the real SDK against a local server with real gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.tinker import MODEL, TinkerServer, tinker_server

from ai_trains_ai.interfaces import OuterTrainer
from ai_trains_ai.outer.tinker import TinkerOuterTrainer
from ai_trains_ai.testing import OuterTrainerContract

QUICK = {"open": 60.0, "sample": 60.0, "train": 60.0, "save": 60.0, "close": 5.0}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with tinker_server(tmp_path_factory.mktemp("tinker")) as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local-key")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def trainer(server: TinkerServer, **options: Any) -> TinkerOuterTrainer:
    defaults: dict[str, Any] = {"model": MODEL, "renderer": "embedded", "lr": 1e-3, "deadlines": QUICK}
    return TinkerOuterTrainer(base_url=server.url, **{**defaults, **options})


class TestTinkerOuterTrainer(OuterTrainerContract):
    @pytest.fixture
    def trainer(self, shared: TinkerServer) -> OuterTrainer:
        return trainer(shared)

    @pytest.fixture
    def another(self, shared: TinkerServer) -> OuterTrainer:
        return trainer(shared)
