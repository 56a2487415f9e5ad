"""Notebook cells: there is a running event loop."""

from __future__ import annotations

from pathlib import Path

import pytest

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
