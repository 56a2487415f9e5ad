"""Plugins in a real embedded run with a scripted outer agent."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import ScriptedTrainer
from test_experiment import small

import ai_trains_ai as ata
from ai_trains_ai import events
from ai_trains_ai.errors import BudgetExceeded, ConfigurationError, PluginError, PluginSetChanged
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.providers.local import LocalProvider
from ai_trains_ai.records import Episode, EpisodeOutcome, Finding, JobResult, Submission, TrainingJob


class Journal(ata.EventHandler):
    """Counts what it sees."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.order: list[str] = []

    @ata.hookimpl
    def on_event(self, event: events.Event) -> None:
        self.kinds[type(event).__name__] += 1
        self.order.append(type(event).__name__)


async def test_a_run_tells_everything_that_happens(tmp_path: Path, sandbox: Sandbox) -> None:
    journal = Journal()
    run = await small(sandbox=sandbox, plugins=[journal]).run(2, out=tmp_path / "run")
    jobs = len(run.jobs)
    assert journal.kinds == {
        "RunStarted": 1,
        "BaselineMeasured": len(run.baselines),
        "StepStarted": 2,
        "EpisodeStarted": 16,
        "SubmissionValidated": len(run.submissions),
        "JobStarted": jobs,
        "JobProgress": 3 * jobs,
        "JobFinished": jobs,
        "Evaluated": jobs,
        "Charged": jobs,
        "EpisodeFinished": 16,
        "StepFinished": 2,
        "CheckpointSaved": 2,
        "RunFinished": 1,
    }
    assert (journal.order[0], journal.order[-1]) == ("RunStarted", "RunFinished")
    assert run.plugin_failures == {}
    assert run.checkpoint is not None
    assert (run.checkpoint[0].name, run.checkpoint[1]) == ("step-0001", "newest")


async def test_decisions_reviews_and_checks_take_part(tmp_path: Path, sandbox: Sandbox) -> None:
    class Strict:
        """Rejects the first attempt of every second episode, and finds one episode tampered with."""

        def __init__(self) -> None:
            self.seen: list[str] = []

        @ata.hookimpl
        def review_submission(self, submission: Submission) -> list[Finding]:
            self.seen.append(submission.episode_id)
            if submission.attempt == 1 and submission.episode_id.endswith("e1"):
                return [Finding("strict/first", "", "Not at the first attempt.", "Submit again.")]
            return []

        @ata.hookimpl
        def review_episode(self, episode: Episode) -> list[Finding]:
            assert episode.reward is None
            return [Finding("strict/odd", "", "too good", severity="error")] if episode.id.endswith("e2") else []

        @ata.hookimpl
        def select_checkpoint(self, run: ata.Run, candidates: Any) -> Any:
            assert len(run.steps) == 2
            return candidates[0]

    class Looks(ata.IntegrityCheck):
        def __call__(self, submission: Submission, outcome: EpisodeOutcome) -> list[Finding]:
            assert "environment.py" in submission.files
            assert outcome.evaluation is not None
            return [Finding("looks/seen", "", "looked", severity="warning")]

    found: list[events.IntegrityFound] = []

    def keep(event: events.Event) -> None:
        if isinstance(event, events.IntegrityFound):
            found.append(event)

    strict = Strict()
    run = await small(sandbox=sandbox, plugins=[strict], integrity_checks=[Looks]).run(
        2, out=tmp_path / "run", on_event=keep
    )
    rejected = [s for s in run.submissions if not s["valid"]]
    assert {s["report"].errors[0].code for s in rejected} == {"strict/first"}
    assert {s["report"].stage for s in rejected} == {"review"}
    assert all(s["episode_id"].endswith("e1") for s in rejected)
    tampered = [e for e in run.episodes if e.id.endswith("e2")]
    assert tampered
    assert all(e.reward is not None and e.reward.total == 0.0 for e in tampered)
    assert all("strict/odd" in e.reward.zeros["validation"] for e in tampered if e.reward)
    trained = [e for e in run.episodes if e.job_id]
    assert all("looks/seen" in [f.code for f in e.findings] for e in trained)
    assert len(found) == sum(len(e.findings) for e in run.episodes)
    assert run.steps[0]["outer/tampered"] == pytest.approx(0.25)
    assert run.checkpoint is not None
    assert (run.checkpoint[0].name, run.checkpoint[1]) == ("step-0000", "Strict")
    assert not run.plugin_failures


async def test_a_failure_that_a_plugin_calls_infrastructure_is_masked(tmp_path: Path, sandbox: Sandbox) -> None:
    from ai_trains_ai.inner.embedded import EmbeddedJobRunner

    class Fragile(EmbeddedJobRunner):
        async def wait(self, handle: Any, on_event: Any = None) -> JobResult:
            from attrs import evolve

            from ai_trains_ai.records import JobFailure

            result = await super().wait(handle, on_event)
            if not handle.job_id.startswith("s0000g0e0"):
                return result
            return evolve(result, status="failed", failure=JobFailure("agent", "killed", "killed", "exit 137"))

    class Knows:
        @ata.hookimpl
        def classify_failure(self, job: TrainingJob, evidence: JobResult) -> str | None:
            return "infrastructure" if evidence.failure and evidence.failure.code == "killed" else None

    run = await small(sandbox=sandbox, inner=Fragile, plugins=[Knows()]).run(1, out=tmp_path / "run")
    masked = [e for e in run.episodes if e.status == "infrastructure"]
    assert [e.id for e in masked] == ["s0000g0e0"]
    failed = next(job for job in run.jobs if job.failure)
    assert failed.failure is not None
    assert failed.failure.evidence == "exit 137; infrastructure by plugin Knows"


async def test_before_spend_stops_a_run_that_can_be_resumed(tmp_path: Path, sandbox: Sandbox) -> None:
    class Guard(ata.EventHandler):
        def __init__(self, jobs: int) -> None:
            self.left = jobs
            self.stopped: list[str] = []

        @ata.hookimpl
        def before_spend(self, charge: Any, ledger: Any) -> None:
            assert charge.kind == "busy"
            assert ledger.spent >= 0.0
            self.left -= 1
            if self.left < 0:
                raise BudgetExceeded("Two jobs are enough.")

        def on_run_stopped(self, event: events.RunStopped) -> None:
            self.stopped.append(event.reason)

    guard = Guard(2)
    with pytest.raises(BudgetExceeded, match="Two jobs are enough"):
        await small(sandbox=sandbox, plugins=[guard]).run(1, out=tmp_path / "run")
    assert guard.stopped == ["BudgetExceeded: Two jobs are enough."]
    assert len(ata.open_run(tmp_path / "run").jobs) <= 2
    with pytest.raises(PluginSetChanged, match=r"Guard \(passed by hand\) is missing.*accept_plugins=True"):
        ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox)
    again = ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox, plugins=[Guard(99)])
    run = await again.run()
    assert len(run.steps) == 1
    assert [plugin["name"] for plugin in run.plugins] == ["builtin", "Guard"]


async def test_another_plugin_set_is_accepted_by_word_and_kept(tmp_path: Path, sandbox: Sandbox) -> None:
    await small(sandbox=sandbox).run(1, out=tmp_path / "run")
    manifest = tmp_path / "run/plugins.json"
    assert [plugin["name"] for plugin in json.loads(manifest.read_text())] == ["builtin"]
    parts: dict[str, Any] = {"outer": ScriptedTrainer, "sandbox": sandbox}
    with pytest.raises(PluginSetChanged, match=r"Journal \(passed by hand\) is new"):
        ata.resume(tmp_path / "run", plugins=[Journal()], **parts)
    await ata.resume(tmp_path / "run", plugins=[Journal()], accept_plugins=True, **parts).run(2)
    assert [plugin["name"] for plugin in json.loads(manifest.read_text())] == ["builtin", "Journal"]
    store = ata.open_run(tmp_path / "run")._store()
    started = [data for _, kind, data in store.events() if kind == "RunStarted"]
    store.close()
    assert [data.get("plugins", []) for data in started] == [[], ["Journal"]]


def test_a_version_that_changed() -> None:
    from ai_trains_ai.plugins import differences

    def plugin(version: str) -> dict[str, str]:
        return {"name": "x", "source": "installed", "distribution": "ata-x", "version": version, "value": "x"}

    own = {"name": "builtin", "source": "built-in", "distribution": "ai-trains-ai", "version": "0.1.0", "value": ""}
    assert differences([own, plugin("1.0")], [own | {"version": "0.2.0"}, plugin("1.1")]) == [
        "x (ata-x 1.0) is now 1.1"
    ]
    assert differences([own], [own]) == []


def test_experiment_plugins_strict_and_required() -> None:
    experiment = small(plugins=[Journal()], strict=True, required=["Journal"])
    assert [record.name for record in experiment.plugins] == ["builtin", "Journal"]
    assert "<td>Journal</td>" in experiment.plugins._repr_html_()
    with pytest.raises(PluginError, match="'ata-lambda' is required"):
        small(required=["ata-lambda"])


async def test_a_provider_with_a_price_is_charged(tmp_path: Path, sandbox: Sandbox) -> None:
    class Priced(LocalProvider):
        async def offers(self, request: Any) -> Any:
            from attrs import evolve

            return [evolve(offer, usd_per_hour=3.6) for offer in await super().offers(request)]

    inner = ata.job_runner("embedded", provider=Priced)
    run = await small(sandbox=sandbox, inner=inner, budget=ata.Budget(usd=50.0)).run(1, out=tmp_path / "run")
    assert 0 < sum(charge.usd for _, charge in run.charges) < 1.0


async def test_what_was_required_of_plugins_holds_on_resume(tmp_path: Path, sandbox: Sandbox) -> None:
    await small(sandbox=sandbox, plugins=[Journal()], required=["Journal"]).run(1, out=tmp_path / "run")
    parts: dict[str, Any] = {"outer": ScriptedTrainer, "sandbox": sandbox}
    with pytest.raises(PluginSetChanged):
        ata.resume(tmp_path / "run", required=[], **parts)
    with pytest.raises(PluginError, match="'Journal' is required"):
        ata.resume(tmp_path / "run", accept_plugins=True, **parts)
    assert ata.resume(tmp_path / "run", accept_plugins=True, required=[], **parts).plugins
    ata.resume(tmp_path / "run", plugins=[Journal()], strict=True, **parts)
    with pytest.raises(ConfigurationError, match="plugins takes a list"):
        ata.resume(tmp_path / "run", plugins=Journal(), **parts)  # type: ignore[arg-type]


async def test_an_error_of_a_part_on_resume_is_not_the_files(tmp_path: Path, sandbox: Sandbox) -> None:
    from ai_trains_ai.families.multi_hop import MultiHop

    class Forgetful(MultiHop):
        name = "forgetful"
        told = False

        def tasks(self) -> Any:
            if Forgetful.told:
                raise KeyError("oops")
            return super().tasks()

    await small(sandbox=sandbox).run(1, out=tmp_path / "run")
    Forgetful.told = True
    with pytest.raises(KeyError, match="oops"):
        ata.resume(tmp_path / "run", outer=ScriptedTrainer, sandbox=sandbox, families=[Forgetful])


async def test_a_part_may_emit_an_event_of_its_own(tmp_path: Path) -> None:
    from attrs import frozen

    from ai_trains_ai.plugins import Hooks, Registry

    @frozen
    class Extra(events.Event):
        pass

    hooks = Hooks(Registry([ata.EventHandler()]).manager)
    hooks.on_event(Extra())
    assert not hooks.failures
