"""The card that is written from a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ai_trains_ai.errors import ConfigurationError, StorageError
from ai_trains_ai.records import Checkpoint, Episode, Exported, Finding, Reward, TrainStep
from ai_trains_ai.report.model_card import model_card, write_card
from ai_trains_ai.report.run import Run
from ai_trains_ai.store import RunFolder, Store

OUTER = {"name": "tinker", "arguments": {"model": "some/model", "lora_rank": 8, "base_url": "https://inner.example/x"}}


def episode(name: str, group: str, reward: float, tampered: bool = False) -> Episode:
    findings = (Finding("copied-weights", "integrity", "they are the base model's"),) if tampered else ()
    paid = Reward(reward, {}, {})
    return Episode(name, group, "t", 0, "finished", "submitted", (), (), (0,), 1, 1, reward=paid, findings=findings)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = RunFolder(tmp_path / "run")
    parts = {"outer": OUTER, "inner": {"name": "prime-rl"}, "reward": {"name": "hybrid"},
             "families": [{"name": "multi-hop"}], "held_out": [{"name": "triage"}]}  # fmt: skip
    folder.create({"steps": 1, "settings": {}, "parts": parts})
    folder.write_plugins(
        [{"name": "thrift", "source": "entry point", "distribution": "ata-thrift", "version": "1.2", "value": ""}]
    )
    store = Store.create(folder.database)
    store.save_group("g", "train", 0, 0, "t")
    store.save_group("after", "probe-after", 1, 0, "h")
    for number in range(4):
        store.save_episode(episode(f"e{number}", "g", 0.2, tampered=number == 0), "finished")
        store.save_episode(episode(f"p{number}", "after", 0.4 + 0.1 * (number % 2)), "finished")
    metrics = {"outer/reward/mean": 0.2, "outer/reward/max": 0.2}
    store.save_step(0, TrainStep(1, metrics), Checkpoint("step-0000", "tinker://r/weights/1", 1), 1.0, metrics)
    store.close()
    return Run(folder.path)


def chosen(run: Run) -> Run:
    store = Store.open(run.folder.database)
    store.set_meta(checkpoint={"name": "step-0000", "rule": "best on the probes in between"})
    store.close()
    return run


def test_a_card_has_what_a_reader_asks_for(run: Run, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    card = model_card(chosen(run), exported=Exported(str(adapter), "adapter"), license="apache-2.0")
    for line in (
        "base_model: some/model",
        "license: apache-2.0",
        "library_name: peft",
        "chosen by the rule: best on the probes in between",
        "| held-out tasks, untrained agent | not measured | – | 0 |",
        "| held-out tasks, trained agent | 0.450 |",
        "1 of 4 training episodes were caught tampering",
        "* thrift 1.2 (ata-thrift)",
    ):
        assert line in card


def test_addresses_are_left_out(run: Run) -> None:
    card = model_card(chosen(run))
    assert "lora_rank=8" in card
    assert "inner.example" not in card


def test_a_run_that_goes_on_has_no_card(run: Run) -> None:
    with pytest.raises(ConfigurationError, match="ended"):
        model_card(run)


def test_a_card_of_another_checkpoint_says_so(run: Run) -> None:
    card = model_card(run, checkpoint=Checkpoint("step-0007", "tinker://r/weights/8", 8))
    assert "Checkpoint step-0007 (version 8), chosen by the rule: picked by hand." in card
    assert "measured at version 0, not at that of this checkpoint" in card


def test_a_card_that_can_not_be_written(run: Run, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="another folder"):
        write_card(tmp_path / "nowhere", "a card")
    (tmp_path / "export").mkdir()
    assert write_card(tmp_path / "export", "a card").read_text() == "a card"
