"""Ten of the kills of benchmarks/fleet_chaos.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks/fleet_chaos.py"


@pytest.mark.slow
@pytest.mark.parametrize("faults", [[], ["--faults"]], ids=["kills", "kills-and-faults"])
def test_nothing_is_leaked_lost_or_counted_twice(tmp_path: Path, faults: list[str]) -> None:
    kills = "4" if faults else "10"
    command = [sys.executable, str(CHAOS), "--kills", kills, "--seed", "3", "--folder", str(tmp_path), *faults]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    logs = [log.read_text()[-2000:] for log in tmp_path.glob("round-*/controller.log")] if done.returncode else []
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr[-2000:], *logs])
    figures = dict(line.split() for line in done.stdout.splitlines())
    assert int(figures["kills"]) == int(kills)
    assert int(figures["jobs"]) >= 40
