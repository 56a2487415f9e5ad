"""Environments as agents write them, as source text."""

import pytest

verifiers = pytest.importorskip("verifiers", reason="needs verifiers")

HEAD = """
import verifiers.v1 as vf
__all__ = ["Rows"]
class Row(vf.TaskData):
    answer: str
"""
ROWS = """
class Rows(vf.Taskset[Check, vf.TasksetConfig]):
    def load(self):
        for n in range(8):
            yield Check(Row(prompt=f"{n} plus 1", answer=str(n + 1)), self.config.task)
"""
REWARD = """
class Check(vf.Task[Row]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)
"""


@pytest.fixture
def load(tmp_path):
    """Load an environment from its source."""
    from ai_trains_ai.environments.loader import load_environment

    def load_source(source, config=None, **files):
        (tmp_path / "environment.py").write_text(source)
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return load_environment(tmp_path, config)

    return load_source
