"""A real plugin package, installed: found by its entry point, in a fresh environment and in an embedded run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import ai_trains_ai as ata
from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.plugins.scaffold import write_plugin

ROOT = Path(__file__).parents[2]
PACKAGE = Path(__file__).parent / "ata-thrift"


def run(*command: object, code: int = 0, **environment: str) -> str:
    """What a command prints, in an environment where installed plugins are allowed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("AI_TRAINS_AI_PLUGINS", "PYTHONPATH")}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, env=clean | environment
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------------ the template


def test_new_plugin_writes_a_package(tmp_path: Path) -> None:
    written = write_plugin("ata-big-judge", tmp_path / "here")
    assert [str(path.relative_to(tmp_path / "here")) for path in written] == [
        "README.md",
        "pyproject.toml",
        "src/ata_big_judge/__init__.py",
        "src/ata_big_judge/provider.py",
        "src/ata_big_judge/reward.py",
        "tests/test_contracts.py",
    ]
    assert "class BigJudgeReward(RewardFn)" in (tmp_path / "here/src/ata_big_judge/reward.py").read_text()
    for path in written:
        assert "{{" not in path.read_text()
        if path.suffix == ".py":
            compile(path.read_text(), path, "exec")


def test_only_the_beginning_of_a_name_is_left_out(tmp_path: Path) -> None:
    write_plugin("data-reward", tmp_path / "here")
    assert 'data-reward = "data_reward:plugin"' in (tmp_path / "here/pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["", "Ata", "ata_thrift", "-ata", "ata--x", "../x", "1ata", "ata thrift"])
def test_a_name_that_is_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="can't be the name of a plugin"):
        write_plugin(name, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        write_plugin("ata-x", tmp_path)
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        write_plugin("ata-x", tmp_path / "mine.txt")


# ------------------------------------------------------------------------------------------ installed


@pytest.mark.slow
def test_two_plugins_in_a_fresh_environment_with_the_core_alone(tmp_path: Path) -> None:
    """The README of a generated plugin, word for word, beside the package of this repository."""
    venv.create(tmp_path / "env", with_pip=True)
    python, pip = tmp_path / "env/bin/python", (tmp_path / "env/bin/pip", "install", "-q", "--no-input")
    cli = tmp_path / "env/bin/ai-trains-ai"
    run(*pip, "-c", ROOT / "constraints.txt", ROOT, f"{PACKAGE}[test]")
    run(cli, "new-plugin", "ata-fresh", "--folder", tmp_path / "ata-fresh")
    run(*pip, "-c", ROOT / "constraints.txt", "-e", f"{tmp_path / 'ata-fresh'}[test]")
    records = {record["name"]: record for record in json.loads(run(cli, "plugins", "--json"))}
    assert set(records) == {"builtin", "fresh", "thrift"}
    assert all(record["status"] == "loaded" and not record["faults"] for record in records.values())
    assert records["thrift"]["registered"] == ["GPU provider metered", "reward thrift", "command thrift"]
    assert "made by: ata_fresh.reward:FreshReward" in run(cli, "plugins", "--strict", "--why", "fresh")
    for package in (PACKAGE, tmp_path / "ata-fresh"):
        said = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", package)
        assert " passed" in said
        assert "skipped" not in said
    assert "0 steps for 0.0000 USD" in run(cli, "thrift", tmp_path)
    assert "thrift" in run(cli, "--help")


@pytest.mark.slow
def test_the_parts_of_an_installed_plugin_in_an_embedded_run(tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "run"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-input", "--target", site, PACKAGE)
    script = tmp_path / "script.py"
    script.write_text(
        "import ai_trains_ai as ata\n"
        "from ai_trains_ai.testing import ScriptedAgent\n"
        "experiment = ata.Experiment.embedded(\n"
        "    outer=ScriptedAgent, held_out=[], groups_per_step=1, group_size=4, eval_items=16, probe_episodes=0,\n"
        "    reward=ata.reward('thrift', price=0.5), inner=ata.job_runner('embedded', provider='ata-thrift:metered'),\n"
        "    required=['ata-thrift'], strict=True)\n"
        f"experiment.run_sync(2, out={str(out)!r})\n"
    )
    path = os.pathsep.join([str(site), str(ROOT)])
    run(sys.executable, script, PYTHONPATH=path)
    found = ata.open_run(out)
    assert [plugin["name"] for plugin in found.plugins] == ["builtin", "thrift"]
    assert found.plugin_failures == {}
    rewards = [e.reward for e in found.episodes if e.reward is not None]
    assert {tuple(reward.weights.items()) for reward in rewards} == {(("uplift", 1.0), ("share", -0.5))}
    lines = [json.loads(line) for line in (out / "thrift.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert 0 < sum(line["usd"] for line in lines) <= found.summary()["totals"]["usd"] + 1e-9
