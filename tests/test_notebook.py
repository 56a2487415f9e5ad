"""Notebook cells: there is a running event loop."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ai_trains_ai as ata
from ai_trains_ai.errors import RunFolderError

CELLS = (
    "import sys; sys.path.insert(0, {tests!r})\n"
    "import ai_trains_ai as ata\n"
    "from conftest import ScriptedTrainer\n"
    "class Half(ata.RewardFn):\n"
    "    def __call__(self, outcome):\n"
    "        return ata.Reward(0.5, {{}}, {{}})\n"
    "def small(**changes):\n"
    "    return ata.Experiment.embedded(outer=ScriptedTrainer, held_out=[], groups_per_step=1, group_size=2,\n"
    "                                   eval_items=16, probe_episodes=0, **changes)",
    "run = await small(reward=Half).run(1, out={out!r} + '/awaited')\nassert run.episodes[0].reward.total == 0.5\nrun",
    "run = small().run_sync(1, out={out!r} + '/blocking')\nassert len(run.steps) == 1\nrun.plot.reward()",
)


@pytest.mark.slow
def test_a_run_in_a_notebook(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    places = {"tests": str(Path(__file__).parent), "out": str(tmp_path)}
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell.format(**places)) for cell in CELLS]
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [output.data for output in notebook.cells[1].outputs if output.output_type == "execute_result"]
    assert "<table>" in shown[0]["text/html"]
    assert "image/png" in notebook.cells[2].outputs[-1].data


@pytest.mark.slow
@pytest.mark.parametrize("call", ["await small().run(50, out={out!r})", "small().run_sync(50, out={out!r})"])
def test_interrupting_a_cell_drains(tmp_path: Path, call: str) -> None:
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(kernel_name="python3")
    out = tmp_path / "run"
    said: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        if message["msg_type"] == "error":
            said.append(message["content"]["evalue"])

    try:
        client.execute_interactive(CELLS[0].format(tests=str(Path(__file__).parent), out=""), timeout=60)
        threading.Thread(target=_interrupt_after_two_episodes, args=(kernel, out), daemon=True).start()
        client.execute_interactive(call.format(out=str(out)), timeout=120, output_hook=keep)
        assert "Stopped after" in said[0]
        assert "ai-trains-ai resume" in said[0]
        assert not ata.open_run(out)._read("episodes", stage="submitted")
        client.execute_interactive("print('alive')", timeout=20, output_hook=lambda m: said.append(str(m["content"])))
        assert any("alive" in text for text in said[1:])
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def _interrupt_after_two_episodes(kernel: Any, out: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        time.sleep(0.1)
        try:
            if len(ata.open_run(out).episodes) >= 2:
                kernel.interrupt_kernel()
                return
        except RunFolderError:
            continue  # not written yet
