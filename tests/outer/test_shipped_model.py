"""The shipped outer model starts out as unreliable as the author that it imitates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from ai_trains_ai.agent import open_workspace, opening, play
from ai_trains_ai.families import load
from ai_trains_ai.families.hidden import reserved
from ai_trains_ai.inner.embedded import EmbeddedJobRunner
from ai_trains_ai.interfaces import Policy, Sandbox
from ai_trains_ai.outer.embedded import EmbeddedOuterTrainer
from ai_trains_ai.records import SamplingParams
from ai_trains_ai.validation import Validator


async def play_many(policies: list[Policy], sandbox: Sandbox) -> dict[str, float]:
    """Play one episode per policy over all tasks; shares of what came out."""
    runner = EmbeddedJobRunner()
    surface, models = runner.config_surface(), runner.base_models()
    validator = Validator(sandbox, surface, models, reserved=reserved)
    families = [load(name) for name in ("chained-arithmetic", "multi-hop", "triage")]
    tasks = [(family, task) for family in families for task in family.tasks()]
    gate = asyncio.Semaphore(3)

    async def one(index: int):  # type: ignore[no-untyped-def]
        family, task = tasks[index % len(tasks)]

        async def validate(submission):  # type: ignore[no-untyped-def]
            async with gate:
                return await validator.validate(submission, task, family)

        workspace = open_workspace(task, models, None, surface)
        params = SamplingParams(seed=1_000 * index)
        return await play(
            f"e{index}", opening(task, models, None), workspace, policies[index], validate, sandbox, params
        )

    played = await asyncio.gather(*(one(index) for index in range(len(policies))))
    valid = [rollout.report for rollout in played if rollout.report]
    return {
        "first": sum(bool(r.reports) and r.reports[0].valid for r in played) / len(played),
        "valid": len(valid) / len(played),
        "weak": sum(report.base_model == "pico-s" for report in valid) / len(valid),
        "keys": sum(len(report.configured) for report in valid) / len(valid),
        "findings": float(len({f.code for r in played for report in r.reports for f in report.errors})),
    }


async def test_it_starts_unreliable(tmp_path: Path, sandbox: Sandbox) -> None:
    trainer = EmbeddedOuterTrainer()
    await trainer.start(SimpleNamespace(folder=tmp_path))  # type: ignore[arg-type]
    shares = await play_many([await trainer.snapshot()] * 80, sandbox)
    assert 0.25 <= shares["first"] <= 0.60
    assert 0.45 <= shares["valid"] <= 0.88
    assert 0.55 <= shares["weak"] <= 0.92
    assert shares["keys"] <= 4
    assert shares["findings"] >= 5  # the validator is answered in many ways, not in one


@pytest.mark.slow
async def test_the_author_of_the_recipe_is_as_stated(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "recipes"))
    from job_grammar import Author

    families = [load(name) for name in ("chained-arithmetic", "multi-hop", "triage")]
    tasks = [task for family in families for task in family.tasks()]
    authors: list[Policy] = [Author(random.Random(f"author {i}"), tasks[i % len(tasks)]) for i in range(120)]
    shares = await play_many(authors, sandbox)
    assert 0.36 <= shares["first"] <= 0.60
    assert 0.60 <= shares["weak"] <= 0.88
