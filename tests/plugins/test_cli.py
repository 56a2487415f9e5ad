"""`ai-trains-ai plugins`, `new-plugin`, and verbs that plugins add."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import HEAD, Install, rewarding

VERB = HEAD + "@hookimpl\ndef register_commands(cli):\n    @cli.command()\n    def {name}():\n        print('hello')\n"


def cli(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line with the plugins of ``site`` on its path."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "ai_trains_ai.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    )


def test_the_list_for_people_and_for_programs(install: Install, tmp_path: Path) -> None:
    install("ata-one", rewarding("one"))
    install("ata-bad", "1 / 0\n")
    shown = cli(tmp_path, "plugins")
    assert shown.returncode == 0
    assert "reward one" in shown.stdout
    assert "ata-bad (ata-bad 1.0): importing" in shown.stdout
    records = json.loads(cli(tmp_path, "plugins", "--json").stdout)
    assert [(r["name"], r["status"]) for r in records] == [
        ("builtin", "loaded"),
        ("ata-bad", "failed"),
        ("ata-one", "loaded"),
    ]
    assert records[1]["faults"][0]["remedy"].startswith("Repair or update ata-bad")
    strict = cli(tmp_path, "plugins", "--strict")
    assert strict.returncode == 1
    assert "strict=True allows none" in strict.stderr
    assert "Traceback" not in strict.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ata-bad", "plugin ata-bad (ata-bad 1.0): failed"),
        ("ata-one", "registers: reward one"),
        ("one", "reward 'one': always 0.5"),
        ("hybrid", "made by: ai_trains_ai.rewards.hybrid:HybridReward"),
        ("builtin", "GPU provider local"),
    ],
)
def test_why(install: Install, tmp_path: Path, name: str, said: str) -> None:
    install("ata-one", rewarding("one"))
    install("ata-bad", "1 / 0\n")
    done = cli(tmp_path, "plugins", "--why", name)
    assert done.returncode == 0
    assert said in done.stdout
    assert said in json.loads(cli(tmp_path, "plugins", "--json", "--why", name).stdout)["text"]


def test_why_nobody(install: Install, tmp_path: Path) -> None:
    done = cli(tmp_path, "plugins", "--why", "hybrd")
    assert done.returncode == 1
    assert "Did you mean 'hybrid'?" in done.stderr


def test_a_verb_of_a_plugin_and_those_that_can_not_be(install: Install, tmp_path: Path) -> None:
    install("ata-greet", VERB.format(name="greet"))
    install("ata-grab", VERB.format(name="demo"))
    install("ata-trip", HEAD + "@hookimpl\ndef register_commands(cli): raise RuntimeError('no')\n")
    install("ata-idle", HEAD + "@hookimpl\ndef register_commands(cli): ...\n")
    assert cli(tmp_path, "greet").stdout == "hello\n"
    shown = cli(tmp_path, "--help")
    assert "greet" in shown.stdout
    assert "the command 'demo' is registered by both 'builtin' and 'ata-grab'" in shown.stderr
    assert "its register_commands raised RuntimeError: no" in shown.stderr
    assert "Run both loops" in cli(tmp_path, "demo", "--help").stdout
    assert "registers: command greet" in cli(tmp_path, "plugins", "--why", "greet").stdout
    strict = cli(tmp_path, "plugins", "--strict")
    assert strict.returncode == 1
    assert "ata-grab" in strict.stderr
    assert "ata-trip" in strict.stderr


def test_what_a_plugin_prints_is_not_in_the_json(install: Install, tmp_path: Path) -> None:
    install("ata-loud", "print('loaded')\n" + rewarding("loud"))
    done = cli(tmp_path, "plugins", "--json")
    assert "loaded" in done.stderr
    (part,) = json.loads(done.stdout)[1]["parts"]
    assert (part["kind"], part["name"], part["summary"]) == ("reward", "loud", "always 0.5")


def test_ordinary_verbs_load_no_plugin(install: Install, tmp_path: Path) -> None:
    install("ata-loud", "print('loaded')\n" + VERB.format(name="greet"))
    assert "loaded" not in cli(tmp_path, "demo", "--help").stdout
    assert "loaded" in cli(tmp_path, "greet").stdout


def test_new_plugin_says_what_is_next(tmp_path: Path) -> None:
    done = cli(tmp_path, "new-plugin", "ata-x", "--folder", str(tmp_path / "made"))
    assert done.returncode == 0
    assert f"pytest {tmp_path / 'made'}" in done.stdout
    assert cli(tmp_path, "new-plugin", "ata-x", "--folder", str(tmp_path / "made")).returncode == 1
