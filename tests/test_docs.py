"""Pages that are made from the code are as the code is, and the code on the other pages runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted([*DOCS.glob("tutorial/*.md"), *DOCS.glob("how-to/*.md")])
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_reference_of_hooks_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "reference/hooks.md").read_text() == module.hooks_page(), "run: python docs/make_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_and_its_contract_tests_pass(page: Path, tmp_path: Path) -> None:
    blocks = CODE.findall(page.read_text(encoding="utf-8"))
    assert blocks
    test = tmp_path / "test_page.py"
    test.write_text("\n".join(blocks) + "\n\ndef test_it_imports(): ...\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=strict", str(test)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [*DOCS.rglob("*.md"), DOCS.parent / "README.md"], ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_judgement_of_the_how_to_works() -> None:
    """The hooks of its plugin are called, not only defined."""
    from types import SimpleNamespace
    from typing import Any

    from ai_trains_ai.plugins import Hooks, Registry
    from ai_trains_ai.records import Checkpoint, JobFailure, JobResult, Submission, TaskLimits, TrainingJob

    block = next(b for b in CODE.findall((DOCS / "how-to/embed.md").read_text()) if "class House" in b)
    scope: dict[str, Any] = {}
    exec("import ai_trains_ai as ata\n" + block, scope)
    hooks = Hooks(Registry([scope["House"]()]).manager)
    (finding,) = hooks.review_submission(Submission.of("e", 1, {"environment.py": b"import openai"}))
    assert finding.code == "house/judge"
    assert hooks.review_submission(Submission.of("e", 1, {"environment.py": b""})) == ()
    job = TrainingJob("job", "e", "t", "m", {}, {}, {}, (), 0, TaskLimits(), "")
    failed = JobResult("job", "failed", JobFailure("agent", "crashed", "", "NVLink error"))
    decided = hooks.classify_failure(job, failed).failure
    assert decided is not None
    assert decided.side == "infrastructure"
    run = SimpleNamespace(steps=[{"version": 1, "outer/reward/mean": 0.9}, {"version": 2, "outer/reward/mean": 0.1}])
    saved = [Checkpoint("a", "a", 1), Checkpoint("b", "b", 2)]
    assert hooks.select_checkpoint(run, saved) == (saved[0], "House")  # type: ignore[arg-type]
    assert not hooks.failures
