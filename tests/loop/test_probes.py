"""Held-out probes between steps, and thresholds that end a run, in real runs with a scripted agent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ScriptedTrainer

import ai_trains_ai as ata
from ai_trains_ai import events
from ai_trains_ai.errors import RunInterrupted, RunUnhealthy
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.records import EpisodeGroup, TrainStep

STEPS = 4


def experiment(sandbox: Sandbox, **changes: Any) -> ata.Experiment:
    settings: dict[str, Any] = {
        "outer": ScriptedTrainer, "families": ["chained-arithmetic"], "held_out": ["triage"], "groups_per_step": 1,
        "group_size": 4, "eval_items": 16, "probe_episodes": 3, "probe_every": 2,
    }  # fmt: skip
    return ata.Experiment.embedded(sandbox=sandbox, **(settings | changes))


def probes(run: ata.Run) -> dict[str, set[int]]:
    """Of each group of held-out episodes, the versions that played it."""
    found: dict[str, set[int]] = {}
    for episode in run._read("episodes"):
        if episode.group_id.startswith("probe"):
            found.setdefault(episode.group_id, set()).update(episode.policy_versions)
    return found


async def test_held_out_tasks_are_probed_on_a_schedule(tmp_path: Path, sandbox: Sandbox) -> None:
    run = await experiment(sandbox).run(STEPS, out=tmp_path / "run")
    assert sorted(versions.pop() for versions in probes(run).values()) == [0, 2, 4]
    told = [step.get("held_out/step") for step in run.steps]
    assert told == [None, None, 2.0, None]


async def test_a_probe_that_was_cut_off_goes_on_with_its_version(tmp_path: Path, sandbox: Sandbox) -> None:
    finished: list[str] = []

    def cut(event: events.Event) -> None:
        if isinstance(event, events.EpisodeFinished) and event.episode.group_id.startswith("probe-0002"):
            finished.append(event.episode.id)
            playing.cancel()

    playing = asyncio.create_task(experiment(sandbox).run(STEPS, out=tmp_path / "run", on_event=cut))
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert finished
    again: list[str] = []
    run = await ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox).run(
        on_event=lambda e: again.append(e.episode_id) if isinstance(e, events.EpisodeStarted) else None
    )
    assert sorted(versions.pop() for versions in probes(run).values()) == [0, 2, 4]
    assert not set(again) & set(finished)
    assert run.steps[2]["held_out/step"] == 2.0


async def test_what_a_probe_found_is_kept_when_its_step_is_cut_off(tmp_path: Path, sandbox: Sandbox) -> None:
    class Cut(ScriptedTrainer):
        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            if self.version == 2:
                raise RuntimeError("cut")
            return await super().train_step(groups)

    with pytest.raises(RuntimeError, match="cut"):
        await experiment(sandbox, outer=Cut).run(STEPS, out=tmp_path / "run")
    seen: list[events.Event] = []
    run = await ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox).run(on_event=seen.append)
    assert [event.step for event in seen if isinstance(event, events.ProbeFinished)] == [STEPS]
    assert run.steps[2]["held_out/step"] == 2.0


async def test_a_stop_does_not_begin_a_probe(tmp_path: Path, sandbox: Sandbox) -> None:
    """Episodes in flight end, as after every stop; a probe that began then would throw them away."""
    plan = experiment(sandbox, probe_every=1)

    def stop(event: events.Event) -> None:
        if isinstance(event, events.CheckpointSaved):
            plan.stop()

    with pytest.raises(RunInterrupted):
        await plan.run(STEPS, out=tmp_path / "run", on_event=stop)
    run = ata.open_run(tmp_path / "run")
    assert not any(name.startswith("probe-0001") for name in probes(run))
    assert len(run.episodes) == 4 * len({episode.group_id for episode in run.episodes})


async def test_a_threshold_ends_the_run_and_keeps_the_step(tmp_path: Path, sandbox: Sandbox) -> None:
    unhealthy = {"outer/masked_share": {"stop": 0.0}}
    with pytest.raises(RunUnhealthy, match=r"Stopped at step 0: outer/masked_share is 0: .*ata\.resume\(path, health="):
        await experiment(sandbox, health=unhealthy).run(STEPS, out=tmp_path / "run")
    assert len(ata.open_run(tmp_path / "run").steps) == 1
    run = await ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox, health={}).run(2)
    assert len(run.steps) == 2
