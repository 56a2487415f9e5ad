"""Ctrl-C in a run that rents: the first drains, the second stops, and the machines are ended in both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ai_trains_ai.store import Store

SCRIPT = """
import sys
from attrs import evolve
import ai_trains_ai as ata
from ai_trains_ai.providers.local import LocalProvider

class Priced(LocalProvider):
    async def offers(self, request):
        return [evolve(offer, usd_per_hour=36.0) for offer in await super().offers(request)]

inner = ata.job_runner("embedded", provider=Priced(slots=2, root=sys.argv[2]))
ata.Experiment.embedded(inner=inner).run_sync(steps=50, out=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_the_machines_are_ended(tmp_path: Path, presses: int) -> None:
    folder, machine = tmp_path / "run", tmp_path / "machine"
    command = [sys.executable, "-c", SCRIPT, str(folder), str(machine)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "AI_TRAINS_AI_PLUGINS": ""})
    try:
        deadline = time.monotonic() + 120
        while not (folder / "run.db").exists() or not Store.open(folder / "run.db", write=False).results():
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "no job ended"
            time.sleep(0.3)
        assert list(machine.glob("pods/*"))
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        process.wait(120)
    finally:
        process.kill()
        process.wait()
    assert list(machine.glob("pods/*")) == []
    rentals = Store.open(folder / "run.db", write=False).rentals()
    assert [rental.state for rental in rentals] == ["ended"]
    charged = sum(charge.usd for _, charge in Store.open(folder / "run.db", write=False).charges())
    assert charged == pytest.approx((rentals[0].seen - rentals[0].created) * 0.01, rel=0.05, abs=0.005)
