"""From a run's checkpoint to a published adapter, and back as an agent that is evaluated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.chat import chat_server
from fakes.hub import hub_server
from fakes.serving import served
from fakes.tinker import MODEL, tinker_server

import ai_trains_ai as ata
from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.report import leaderboard

pytest.importorskip("huggingface_hub", reason="needs the extra hub")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local-key")


def cli(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ai_trains_ai.cli", *map(str, arguments)]
    env = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env)


def trained(folder: Path, url: str, **settings: Any) -> ata.Run:
    outer = ata.outer_trainer("tinker", model=MODEL, renderer="embedded", base_url=url, lr=2e-3)
    options: dict[str, Any] = {"groups_per_step": 1, "group_size": 4, "eval_items": 32, "probe_episodes": 0}
    return ata.Experiment.embedded(outer=outer, **(options | settings)).run_sync(1, out=folder)


@pytest.mark.slow
def test_an_adapter_is_published_and_evaluated(tmp_path: Path) -> None:
    with tinker_server(tmp_path / "tinker") as tinker, hub_server() as hub:
        run = trained(tmp_path / "run", tinker.url)
        done = cli(
            tmp_path, "export", run.path, "mine", "--license", "apache-2.0", "--push-to", "me/mine",
            HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret", HF_HUB_DISABLE_XET="1",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "hf_secret" not in done.stdout + done.stderr
        assert not tinker.live
    [published] = hub.repositories["me/mine"].commits
    adapter = tmp_path / "downloaded"
    adapter.mkdir()
    for name, data in published.items():
        (adapter / name).write_bytes(data)
    card = (adapter / "README.md").read_text()
    assert f"base_model: {MODEL}\nlicense: apache-2.0\nlibrary_name: peft" in card
    assert tinker.url not in card

    with chat_server(served(adapter), context=1 << 20) as server:
        asked = ("--model", "mine", "--base-url", server.url, "--family", "multi-hop", "--max-tokens", 128)
        done = cli(tmp_path, "evaluate", *asked, "--episodes", 3, "--out", "evaluated", "--json")
        assert done.returncode == 0, done.stderr
        row = json.loads(done.stdout)
        assert (row["agent"], row["masked"], row["episodes"]) == ("mine", 0, 3 * len(row["tasks"]))
        assert row["valid"] > 0, "the adapter plays as it was trained to"
        assert row["usd"] == 0.0

        again = cli(tmp_path, "resume", "evaluated")  # everything is there: the row is added once more
        assert again.returncode == 0, again.stderr
        assert "Outer agents" in again.stdout
        known = leaderboard.read(tmp_path / "leaderboard.jsonl")
        assert [found.reward for found in known] == [row["reward"]] * 2
        assert len({body["model"] for body in server.asked}) == 1


def test_the_embedded_outer_model_is_exported_as_weights(tmp_path: Path) -> None:
    options: dict[str, Any] = {"groups_per_step": 1, "group_size": 4, "eval_items": 32, "probe_episodes": 0}
    run = ata.Experiment.embedded(**options).run_sync(1, out=tmp_path / "run")
    exported = ata.resume(run.path).export_sync(tmp_path / "mine")
    assert exported.kind == "weights"
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert names >= {"README.md", "model.safetensors", "config.json", "tokenizer.json"}
    by_hand = ata.resume(run.path).export_sync(tmp_path / "other", checkpoint="step-0000")
    assert "picked by hand" in (Path(by_hand.path) / "README.md").read_text()
    with pytest.raises(ConfigurationError, match="It has: step-0000"):
        ata.resume(run.path).export_sync(tmp_path / "third", checkpoint="step-0007")
    with pytest.raises(ConfigurationError, match="trains nothing"):
        ata.resume(run.path, outer=ata.outer_trainer("frozen", model="m", base_url="http://x")).export_sync(tmp_path)


def test_only_a_run_can_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="resume"):
        ata.Experiment.embedded().export_sync(tmp_path)
