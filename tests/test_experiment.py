"""The nested loop with a scripted outer agent: everything but its learning is real."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ScriptedPolicy, ScriptedTrainer, Shared

import ai_trains_ai as ata
from ai_trains_ai import events
from ai_trains_ai.convert import to_json
from ai_trains_ai.errors import (
    ConfigurationError,
    PolicyError,
    RunFolderError,
    RunInterrupted,
    SandboxError,
    SubmissionRejected,
    UnknownName,
)
from ai_trains_ai.inner.embedded import EmbeddedJobRunner
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.providers.local import LocalProvider
from ai_trains_ai.records import (
    EpisodeOutcome,
    JobFailure,
    JobHandle,
    JobResult,
    PodSpec,
    Reward,
    SandboxResult,
    TrainingJob,
)
from ai_trains_ai.testing.fakes import TinyRunner
from ai_trains_ai.validation import PRELOAD

SMALL: dict[str, Any] = {"groups_per_step": 2, "group_size": 4, "eval_items": 32, "probe_episodes": 0}


def small(**changes: Any) -> ata.Experiment:
    return ata.Experiment.embedded(**({"outer": ScriptedTrainer, "held_out": []} | SMALL | changes))


async def test_a_run_end_to_end(tmp_path: Path, sandbox: Sandbox) -> None:
    seen: list[events.Event] = []
    trainer = ScriptedTrainer()
    run = await small(sandbox=sandbox, outer=trainer, held_out=["triage"], probe_episodes=2).run(
        2, out=tmp_path / "run", on_event=seen.append
    )
    assert [step["step"] for step in run.steps] == [0, 1]
    assert len(run.episodes) == 2 * 2 * 4
    assert len(run.probes("probe-before")) == len(run.probes("probe-after")) == 2
    paid = [e for e in run.episodes if e.valid_attempt is not None]
    assert len(paid) == 12  # every fourth gives up
    assert len(run.jobs) == 12 + len([e for p in ("probe-before", "probe-after") for e in run.probes(p) if e.job_id])
    assert len({job.job_id for job in run.jobs}) == len(run.jobs)
    assert all(job.status == "succeeded" and job.steps == 3 and job.train_seconds > 0 for job in run.jobs)
    assert all(0.35 <= e.reward.total < 1.0 for e in paid if e.reward)
    assert all(evaluation.n == 32 for evaluation in run.evaluations)
    assert all(len(groups) == 2 for groups in trainer.trained)
    for groups in trainer.trained:
        for group in groups:
            known = [a for a in group.advantages if a is not None]
            assert abs(sum(known)) < 1e-9
    kinds = [type(event) for event in seen]
    assert kinds.count(events.EpisodeFinished) == 16 + 4
    assert kinds.count(events.StepFinished) == 2
    assert kinds[-1] is events.RunFinished
    summary = run.summary()
    assert summary["totals"]["jobs"] == len(run.jobs)
    assert summary["totals"]["held_out_after"]["n"] == 2
    assert json.loads(json.dumps(summary)) == summary
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [0, 1]
    assert "<table>" in run._repr_html_()
    assert len(run.plot.save_all()) == 5


async def test_hidden_answers_and_the_secret_stay_out_of_what_agents_and_jobs_see(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    run = await small(sandbox=sandbox).run(1, out=tmp_path / "run")
    from ai_trains_ai.families import load
    from ai_trains_ai.families.hidden import reserved

    hidden = 0
    for submission in run.submissions:
        assert submission["valid"]
    store = run._store()
    for episode in run.episodes:
        if episode.job_id:
            job, _, _ = store.job(episode.job_id)
            family = load(job.task_id.rsplit("-", 2)[0])
            keys = [item.key for row in job.rows if (item := family.item(json.loads(row)["prompt"]))]
            assert len(keys) == len(job.rows) > 100
            hidden += sum(map(reserved, keys))
    store.close()
    assert hidden == 0
    secret = (tmp_path / "run/secret").read_bytes()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.name != "secret":
            assert secret not in path.read_bytes(), path


async def test_staleness_is_bounded_and_recorded(tmp_path: Path, sandbox: Sandbox) -> None:
    run = await small(sandbox=sandbox, max_staleness=0).run(2, out=tmp_path / "sync")
    assert all(step["outer/staleness/max"] == 0 for step in run.steps)
    run = await small(sandbox=sandbox, max_staleness=1).run(3, out=tmp_path / "async")
    assert all(step["outer/staleness/max"] <= 1 for step in run.steps)
    for step in range(3):
        for episode in run._read("episodes", phase="train", step=step):
            assert episode.policy_versions[0] >= step - 1


class Constant(ata.RewardFn):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        return Reward(0.5, {"attempts": float(outcome.attempts)}, {"attempts": 0.0})


class OneSlot(LocalProvider):
    created: list[str] = []

    def __init__(self) -> None:
        super().__init__(slots=1)

    async def create(self, offer: Any, spec: PodSpec) -> Any:
        OneSlot.created.append(spec.marker)
        return await super().create(offer, spec)


class Counting(EmbeddedJobRunner):
    submitted = 0

    async def submit(self, job: TrainingJob) -> JobHandle:
        Counting.submitted += 1
        return await super().submit(job)


async def test_all_four_parts_are_swapped_with_a_class(tmp_path: Path, sandbox: Sandbox) -> None:
    run = await small(sandbox=sandbox, inner=Counting(provider=OneSlot()), reward=Constant).run(1, out=tmp_path / "run")
    assert Counting.submitted == 6
    assert len(OneSlot.created) == 1
    assert all(e.reward and e.reward.total == 0.5 for e in run.episodes)
    assert run.steps[0]["outer/groups_degenerate"] == 2.0  # equal rewards teach nothing


async def test_a_pod_that_is_not_this_machine_is_refused(tmp_path: Path, sandbox: Sandbox) -> None:
    class Elsewhere(LocalProvider):
        async def create(self, offer: Any, spec: PodSpec) -> Any:
            from attrs import evolve

            return evolve(await super().create(offer, spec), address="203.0.113.1")

    with pytest.raises(ConfigurationError, match=r"203\.0\.113\.1.*prime-rl"):
        await small(sandbox=sandbox, inner=EmbeddedJobRunner(provider=Elsewhere())).run(1, out=tmp_path / "run")


async def test_an_observer_that_raises_ends_nothing(tmp_path: Path, sandbox: Sandbox) -> None:
    class Grumpy:
        @ata.hookimpl
        def on_event(self, event: events.Event) -> None:
            raise RuntimeError("no")

    run = await small(sandbox=sandbox, plugins=[Grumpy()]).run(1, out=tmp_path / "run")
    assert len(run.steps) == 1
    assert run.plugin_failures["Grumpy"]["count"] > 20
    assert run.plugin_failures["Grumpy"]["first"] == "on_event: RuntimeError: no"


def test_run_sync_in_a_script_and_under_a_running_loop(tmp_path: Path) -> None:
    assert len(small().run_sync(1, out=tmp_path / "script").steps) == 1

    async def cell() -> int:
        return len(small().run_sync(1, out=tmp_path / "cell").steps)

    assert asyncio.run(cell()) == 1


async def test_what_a_policy_must_return(tmp_path: Path, sandbox: Sandbox) -> None:
    class Mute(ScriptedPolicy):
        async def act(self, *arguments: Any) -> Any:
            return "hello"

    class Speaks(ScriptedTrainer):
        async def snapshot(self) -> Any:
            return Mute(0)

    class Gives(ScriptedTrainer):
        async def snapshot(self) -> Any:
            return None

    with pytest.raises(ConfigurationError, match=r"Mute\.act returned 'hello'.*records\.Turn"):
        await small(sandbox=sandbox, outer=Speaks).run(1, out=tmp_path / "turn")
    with pytest.raises(ConfigurationError, match=r"Gives\.snapshot\(\) gave None"):
        await small(sandbox=sandbox, outer=Gives).run(1, out=tmp_path / "policy")


# ------------------------------------------------------------------------------------------ stop and go on

UNDER_A_LOOP = """
import asyncio, sys
sys.path.insert(0, {tests!r})
import ai_trains_ai as ata
from conftest import ScriptedTrainer
async def cell():
    ata.Experiment.embedded(outer=ScriptedTrainer, held_out=[], **{small!r}).run_sync(50, out={out!r})
asyncio.run(cell())
"""


def test_ctrl_c_under_a_running_loop_before_there_is_anything_to_drain(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code = UNDER_A_LOOP.format(tests=str(Path(__file__).parent), small=SMALL, out=str(out))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (children := _children(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.02)  # its sandbox starts
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert children
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert not out.exists()


def _children(pid: int) -> list[str]:
    """Children of all threads of a process."""
    return [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def test_ctrl_c_drains_also_under_a_running_loop(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code = UNDER_A_LOOP.format(tests=str(Path(__file__).parent), small=SMALL, out=str(out))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 90
        while not (out / "run.db").exists() or _count(out) < 4:
            assert time.monotonic() < deadline, "the run made no progress in 90 s"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert "RunInterrupted: Stopped after" in said.splitlines()[-1]
    assert not ata.open_run(out)._read("episodes", stage="submitted")


async def test_validation_is_warm_whatever_the_runner_needs(tmp_path: Path, sandbox: Sandbox) -> None:
    """A cold validation imports verifiers for seconds, in each child, out of the submission's own limits."""
    asked: list[str] = []

    class Asked(Shared):
        def preload(self, *targets: str) -> None:
            asked.extend(targets)

    await small(sandbox=Asked(sandbox, sandbox), inner=TinyRunner).run(1, out=tmp_path / "run")
    assert set(PRELOAD) <= set(asked)


async def test_stop_drains_and_a_resume_goes_on(tmp_path: Path, sandbox: Sandbox) -> None:
    experiment = small(sandbox=sandbox)
    finished: list[str] = []

    def after_three(event: events.Event) -> None:
        if isinstance(event, events.EpisodeFinished):
            finished.append(event.episode.id)
            if len(finished) == 3:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(RunInterrupted, match="ai-trains-ai resume"):
        await experiment.run(6, out=tmp_path / "run", on_event=after_three)
    kept = ata.open_run(tmp_path / "run")
    assert len(kept.steps) < 6
    before = {e.id: e for e in kept._read("episodes")}
    assert set(finished) == set(before)
    assert not kept._read("episodes", stage="submitted")

    again: list[str] = []
    run = await ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox).run(
        3, on_event=lambda e: again.append(e.episode_id) if isinstance(e, events.EpisodeStarted) else None
    )
    assert len(run.steps) == 3
    assert not set(again) & set(finished)
    after = {e.id: e for e in run.episodes}
    assert all(after[name] == episode for name, episode in before.items() if name in after)


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import ai_trains_ai as ata
from conftest import ScriptedPolicy, ScriptedTrainer, Shared
ata.Experiment.embedded(outer=ScriptedTrainer, held_out=[], **{small!r}).run_sync(50, out={out!r})
"""


def test_killed_half_way_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code = KILLED.format(tests=str(Path(__file__).parent), small=SMALL, out=str(out))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if (out / "run.db").exists() and (found := _count(out)) and found >= 10:
                break
        else:
            pytest.fail("the run made no progress in 90 s")
    finally:
        process.kill()
        process.wait()
    run = ata.open_run(out)
    steps = len(run.steps)
    before = {e.id: e for e in run.episodes}
    replayed: list[str] = []
    resumed = ata.resume(out, outer=ScriptedTrainer).run_sync(
        steps + 1, on_event=lambda e: replayed.append(e.episode.id) if isinstance(e, events.EpisodeFinished) else None
    )
    assert len(resumed.steps) == steps + 1
    assert not set(replayed) & set(before)
    after = {e.id: e for e in resumed.episodes}
    assert all(after[name] == episode for name, episode in before.items())


def _count(out: Path) -> int:
    try:
        return len(ata.open_run(out).episodes)
    except RunFolderError:
        return 0  # not written yet


# ------------------------------------------------------------------------------------------ wrong input


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"families": ["chained-arithmetics"]}, UnknownName, "Did you mean 'chained-arithmetic'"),
        ({"families": []}, ConfigurationError, "at least one family"),
        ({"families": ["triage"], "held_out": ["triage"]}, ConfigurationError, "trained on and held out at once"),
        ({"group_size": 1}, ConfigurationError, "group_size must be at least 2"),
        ({"grop_size": 4}, ConfigurationError, "no setting grop_size"),
        ({"seed": "x"}, ConfigurationError, "seed must be a whole number, not 'x'"),
        ({"group_size": 2.5}, ConfigurationError, "group_size must be a whole number"),
        ({"min_share": "all"}, ConfigurationError, "min_share must be a number"),
        (
            {"families": "multi-hop"},
            ConfigurationError,
            r"families takes a list, not 'multi-hop'. Write families=\[…\]",
        ),
        ({"families": ["multi-hop", "multi-hop"]}, ConfigurationError, "multi-hop is given twice"),
        ({"plugins": "ata-x"}, ConfigurationError, "plugins takes a list"),
        ({"required": "ata-x"}, ConfigurationError, "required takes a list"),
        ({"plugins": [Constant]}, ConfigurationError, "Give an instance"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        small(**changes)


async def test_wrong_folders_and_steps(tmp_path: Path, sandbox: Sandbox) -> None:
    with pytest.raises(ConfigurationError, match="how many steps"):
        await small(sandbox=sandbox).run(out=tmp_path / "run")
    with pytest.raises(ConfigurationError, match="at least 1"):
        await small(sandbox=sandbox).run(0, out=tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError):
        await small(sandbox=sandbox).run(1, out=tmp_path / "file" / "run")
    with pytest.raises(RunFolderError, match=r"no run\.db"):
        ata.resume(tmp_path)
    with pytest.raises(RunFolderError, match="There is no folder"):
        ata.open_run(tmp_path / "nothing")


async def test_a_part_that_a_file_can_not_hold_must_be_given_again(tmp_path: Path, sandbox: Sandbox) -> None:
    await small(sandbox=sandbox).run(1, out=tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"ScriptedTrainer as 'outer'.*ata\.resume\(path, outer=…\)"):
        ata.resume(tmp_path / "run")
    with pytest.raises(RunFolderError, match="already holds a run"):
        await small(sandbox=sandbox).run(1, out=tmp_path / "run")


async def test_an_error_in_a_part_comes_out_as_itself(tmp_path: Path, sandbox: Sandbox) -> None:
    class Broken(ata.RewardFn):
        def __call__(self, outcome: EpisodeOutcome) -> Reward:
            raise ZeroDivisionError("my bug")

    with pytest.raises(ZeroDivisionError, match="my bug"):
        await small(sandbox=sandbox, reward=Broken).run(1, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("value", "message"),
    [(Reward(float("nan"), {}, {}), "total that is not finite"), (0.5, r"returned 0\.5, not a Reward.*ata\.Reward")],
    ids=["nan", "float"],
)
async def test_what_is_no_reward_is_refused_at_once(
    tmp_path: Path, sandbox: Sandbox, value: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(ata.RewardFn):
        def __call__(self, outcome: EpisodeOutcome) -> Reward:
            return value  # type: ignore[no-any-return]

    with pytest.raises(ConfigurationError, match=message):
        await small(sandbox=sandbox, reward=Odd).run(1, out=tmp_path / "run")
    gc.collect()
    assert "never retrieved" not in caplog.text  # jobs of the other episodes were cancelled, not forgotten


async def test_by_hand(job_folder: Path, sandbox: Sandbox) -> None:
    steps: list[int] = []
    done = await ata.run_job(
        job_folder, sandbox=sandbox, eval_items=32, on_progress=lambda step, metrics: steps.append(step)
    )
    assert steps == [0, 1, 2]
    assert done.report.valid
    assert done.evaluation is not None
    assert done.reward.total >= 0.35
    assert {baseline.base_model for baseline in done.baselines} == {"pico-s", "pico-m"}
    (job_folder / "job.toml").write_text('base_model = "pico-x"\n')
    with pytest.raises(SubmissionRejected, match="Unknown base model"):
        await ata.run_job(job_folder, sandbox=sandbox)
    with pytest.raises(UnknownName, match="Did you mean 'multi-hop-2-3'"):
        await ata.run_job(job_folder, task="multi-hop-2-33")
    with pytest.raises(UnknownName, match="pico-l"):
        await ata.evaluate("pico-l", sandbox=sandbox)
    assert (await ata.evaluate("pico-m", sandbox=sandbox, eval_items=16)).n == 32


def test_validate_blocks_and_names_findings(job_folder: Path) -> None:
    assert ata.validate(job_folder).valid
    (job_folder / "job.toml").write_text('base_model = "pico-m"\n[prime_rl]\nlr = 1.0\n')
    assert [finding.code for finding in ata.validate(job_folder).errors] == ["unknown-key"]
    with pytest.raises(ConfigurationError, match="is no folder"):
        ata.validate(job_folder / "nothing")
    (job_folder / "environment.py").write_text("#" * (2 << 20))
    assert "file-too-big" in [finding.code for finding in ata.validate(job_folder).errors]


# ------------------------------------------------------------------------------------------ resumed at every stage


async def cut_off(tmp_path: Path, sandbox: Sandbox, stage: str) -> str:
    """A run whose last episode is put back to ``stage``, as a kill at that moment leaves it. Its id."""
    run = await small(sandbox=sandbox).run(1, out=tmp_path / "run")
    episode = next(e for e in run.episodes if e.job_id)
    with sqlite3.connect(tmp_path / "run/run.db") as db:
        db.execute("DELETE FROM steps")
        db.execute("DELETE FROM checkpoints")
        db.execute("UPDATE episodes SET stage='submitted' WHERE id=?", (episode.id,))
        if stage in ("submitted", "result"):
            db.execute("DELETE FROM evaluations WHERE job_id=?", (episode.job_id,))
        if stage == "submitted":
            db.execute("UPDATE jobs SET result=NULL, status='submitted' WHERE id=?", (episode.job_id,))
        if stage == "failed":
            failure = JobResult(episode.job_id, "failed", JobFailure("agent", "job-crashed", "boom"))
            db.execute("UPDATE jobs SET result=?, status='failed' WHERE id=?", (to_json(failure), episode.job_id))
            db.execute("DELETE FROM evaluations WHERE job_id=?", (episode.job_id,))
    return episode.id


@pytest.mark.parametrize(("stage", "jobs"), [("submitted", 1), ("result", 1), ("evaluated", 0), ("failed", 0)])
async def test_an_episode_goes_on_from_the_last_thing_stored(
    tmp_path: Path, sandbox: Sandbox, stage: str, jobs: int
) -> None:
    episode_id = await cut_off(tmp_path, sandbox, stage)
    before = {e.id: e for e in ata.open_run(tmp_path / "run")._read("episodes")}
    seen: list[events.Event] = []
    run = await ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox).run(1, on_event=seen.append)
    assert not [event for event in seen if isinstance(event, events.EpisodeStarted)]
    assert [e.episode_id for e in seen if isinstance(e, events.JobStarted)] == [episode_id] * jobs
    after = {e.id: e for e in run.episodes}
    assert {k: v for k, v in after.items() if k != episode_id} == before
    reward = after[episode_id].reward
    assert reward is not None
    assert (reward.total == 0.0) == (stage == "failed")


async def test_a_step_that_infrastructure_broke_is_not_trained_on_and_is_played_anew(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    class Broken(Shared):
        async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
            raise SandboxError("the server is gone")

    with pytest.raises(SandboxError, match=r"6 episodes of step 0 failed.*the server is gone"):
        await small(sandbox=Broken(sandbox, sandbox)).run(1, out=tmp_path / "run")
    masked = ata.open_run(tmp_path / "run").episodes
    assert sum(episode.status == "infrastructure" and "gone" in episode.note for episode in masked) == 6
    run = await ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox).run(1)
    assert all(episode.status == "finished" for episode in run.episodes)


async def test_a_broken_update_skips_its_step(tmp_path: Path, sandbox: Sandbox) -> None:
    class Stumbling(ScriptedTrainer):
        async def train_step(self, groups: Any) -> Any:
            if self.version == 0 and not self.trained:
                self.trained.append(list(groups))
                raise PolicyError("a gradient that is not finite")
            return await super().train_step(groups)

    run = await small(sandbox=sandbox, outer=Stumbling).run(2, out=tmp_path / "run")
    assert [step.get("outer/skipped", 0.0) for step in run.steps] == [1.0, 0.0]
    assert [step["version"] for step in run.steps] == [0, 1]


def test_a_family_without_tasks_is_refused() -> None:
    from ai_trains_ai.families.multi_hop import MultiHop

    class Empty(MultiHop):
        name = "empty"

        def tasks(self) -> tuple[Any, ...]:
            return ()

    with pytest.raises(ConfigurationError, match=r"empty: tasks\(\) gives no task"):
        small(families=[Empty()])


@pytest.mark.parametrize("steps", [1.5, "2"])
def test_steps_must_be_a_whole_number(steps: Any) -> None:
    with pytest.raises(ConfigurationError, match="whole number"):
        small().total_steps(steps)


async def test_a_wrong_part_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="hybird"):
        await small(reward="hybird").run(1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


async def test_a_frozen_policy_is_evaluated_and_never_stale(tmp_path: Path, sandbox: Sandbox) -> None:
    class Frozen(ata.OuterPolicy):
        policy = ScriptedPolicy(7)

        async def snapshot(self) -> Any:
            return self.policy

    run = await small(sandbox=sandbox, outer=Frozen).run(2, out=tmp_path / "run")
    assert [step["outer/staleness/max"] for step in run.steps] == [0.0, 0.0]
    assert [step["version"] for step in run.steps] == [7, 7]
    await ata.resume(tmp_path / "run", outer=Frozen, sandbox=sandbox).run(3)


async def test_resume_takes_a_budget_and_no_unknown_part(tmp_path: Path, sandbox: Sandbox) -> None:
    await small(sandbox=sandbox).run(1, out=tmp_path / "run")
    with pytest.raises(ConfigurationError, match="takes no inter"):
        ata.resume(tmp_path / "run", inter=1)
    again = ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox, budget=ata.Budget(usd=5.0))
    assert again.budget.usd == 5.0
    await again.run(2)
    assert ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox).total_steps() == 2


async def test_a_provider_by_class_and_by_name(tmp_path: Path, sandbox: Sandbox) -> None:
    for number, provider in enumerate((OneSlot, "local", ata.gpu_provider("local", slots=1))):
        inner = ata.job_runner("embedded", provider=provider, slots=None)
        run = await small(sandbox=sandbox, inner=inner).run(1, out=tmp_path / f"run{number}")
        assert len(run.jobs) == 6
    with pytest.raises(ConfigurationError, match=r"ata\.job_runner"):
        EmbeddedJobRunner(provider=OneSlot)  # type: ignore[arg-type]


def test_a_plugins_family_stands_in_nobodys_way(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ai_trains_ai.byhand import find_task
    from ai_trains_ai.families.multi_hop import MultiHop
    from ai_trains_ai.plugins import Registry

    class Raises(MultiHop):
        name = "raises"

        def tasks(self) -> Any:
            raise RuntimeError("the data set is not downloaded")

    class Takes(MultiHop):
        name = "chained-arithmetic"

        def tasks(self) -> Any:
            return ()

    class Plugin:
        @ata.hookimpl
        def register_task_families(self, register: Any) -> None:
            register("raises", Raises, summary="")
            register("other", Takes, summary="")

    family, task = find_task(Registry([Plugin()]), "chained-arithmetic-2-3")
    assert (type(family).__name__, task.id) == ("ChainedArithmetic", "chained-arithmetic-2-3")


@pytest.mark.parametrize(
    "limits", [{"usd": float("nan")}, {"usd": -1.0}, {"usd": "20"}, {"usd_per_hour": float("nan")}]
)
def test_a_budget_that_is_no_amount(sandbox: Sandbox, limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="give dollars"):
        small(sandbox=sandbox, budget=ata.Budget(**limits))
