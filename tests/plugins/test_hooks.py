"""What plugins decide, review and watch, without a run around them."""

from __future__ import annotations

import inspect
import re
from typing import Any

import attrs
import pytest

import ai_trains_ai as ata
from ai_trains_ai import events
from ai_trains_ai.errors import BudgetExceeded, ConfigurationError
from ai_trains_ai.plugins import Hooks, Registry
from ai_trains_ai.records import (
    Charge,
    Checkpoint,
    Finding,
    JobFailure,
    JobResult,
    Submission,
    TaskLimits,
    TrainingJob,
    TrainStep,
)

JOB = TrainingJob("job", "e", "t", "m", {}, {}, {}, (), 0, TaskLimits(), "")
FAILED = JobResult("job", "failed", JobFailure("agent", "job-crashed", "boom", "exit 1"))
SUBMISSION = Submission.of("e", 1, {"environment.py": b""})


def hooks(*plugins: object) -> Hooks:
    return Hooks(Registry(plugins).manager)


def deciding(name: str, answer: Any) -> object:
    """A plugin of one hook that answers, or raises, ``answer``."""

    def respond(*arguments: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    arguments = ", ".join(("self", *ata_arguments(name)))
    scope: dict[str, Any] = {"respond": respond, "hookimpl": ata.hookimpl}
    exec(f"class Plugin:\n  @hookimpl\n  def {name}({arguments}): return respond()", scope)
    return scope["Plugin"]()


def ata_arguments(hook: str) -> tuple[str, ...]:
    from ai_trains_ai.plugins.checks import HOOKS

    return HOOKS[hook]


# ------------------------------------------------------------------------------------------ decisions


def test_the_first_opinion_on_a_failure_counts_and_is_named_in_the_evidence() -> None:
    asked = hooks(deciding("classify_failure", "agent"), deciding("classify_failure", "infrastructure"))
    result = asked.classify_failure(JOB, FAILED)
    assert result.failure == JobFailure(
        "infrastructure", "job-crashed", "boom", "exit 1; infrastructure by plugin Plugin#2"
    )
    assert hooks(deciding("classify_failure", None)).classify_failure(JOB, FAILED) == FAILED
    done = JobResult("job", "succeeded")
    assert asked.classify_failure(JOB, done) is done


@pytest.mark.parametrize("answer", ["nobody", 3, RuntimeError("lost")])
def test_a_decision_that_is_none_is_no_opinion_and_counted(answer: Any) -> None:
    asked = hooks(deciding("classify_failure", "infrastructure"), deciding("classify_failure", answer))
    result = asked.classify_failure(JOB, FAILED)
    assert result.failure is not None
    assert result.failure.side == "infrastructure"
    assert asked.failures["Plugin#2"].count == 1
    assert "classify_failure: " in asked.failures["Plugin#2"].first


def test_the_newest_checkpoint_stands_for_a_run_unless_a_plugin_has_another() -> None:
    saved = [Checkpoint(f"step-{n}", f"checkpoints/{n}", n) for n in range(3)]
    run: Any = None
    assert hooks().select_checkpoint(run, saved) == (saved[2], "newest")
    assert hooks(deciding("select_checkpoint", saved[1])).select_checkpoint(run, saved) == (saved[1], "Plugin")
    made_up = hooks(deciding("select_checkpoint", Checkpoint("other", "x", 9)))
    assert made_up.select_checkpoint(run, saved) == (saved[2], "newest")
    assert "none of the candidates" in made_up.failures["Plugin"].first


# ------------------------------------------------------------------------------------------ reviews


def test_all_findings_count_and_a_review_that_raises_is_a_warning() -> None:
    one, two = Finding("a/b", "", "no"), Finding("c/d", "", "hm", severity="warning")
    asked = hooks(
        deciding("review_submission", [one]),
        deciding("review_submission", None),
        deciding("review_submission", ZeroDivisionError("mine")),
        deciding("review_submission", ["text"]),
        deciding("review_submission", (two,)),
    )
    found = asked.review_submission(SUBMISSION)
    assert [f.code for f in found] == ["c/d", "review-failed", "review-failed", "a/b"]
    assert [f.severity for f in found] == ["warning", "warning", "warning", "error"]
    assert "ZeroDivisionError: mine" in found[2].message
    assert sum(failure.count for failure in asked.failures.values()) == 2


def test_what_a_reviewer_writes_into_a_submission_is_lost() -> None:
    class Writer:
        @ata.hookimpl
        def review_submission(self, submission: Any) -> None:
            submission.files["environment.py"] = b"changed"

    submission = Submission.of("e", 1, {"environment.py": b"as it was"})
    assert hooks(Writer()).review_submission(submission) == ()
    assert submission.files == {"environment.py": b"as it was"}


# ------------------------------------------------------------------------------------------ observers


def test_observers_are_isolated_counted_and_get_copies_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[float] = []

    class Writer:
        @ata.hookimpl
        def on_event(self, event: Any) -> None:
            event.metrics["outer/reward/mean"] = 99.0
            seen.append(1.0)

    class Reader:
        @ata.hookimpl
        def on_event(self, event: Any) -> None:
            seen.append(event.metrics["outer/reward/mean"])

    class Frozen:
        @ata.hookimpl
        def on_event(self, event: Any) -> None:
            event.step = 3

    event = events.StepFinished(0, TrainStep(1, {}), {"outer/reward/mean": 0.5})
    asked = hooks(Reader(), Frozen(), Writer())
    asked.on_event(event)
    asked.on_event(event)
    assert seen == [1.0, 0.5, 1.0, 0.5]
    assert event.metrics == {"outer/reward/mean": 0.5}
    assert {name: failure.count for name, failure in asked.failures.items()} == {"Frozen": 2}
    assert "FrozenInstanceError" in asked.failures["Frozen"].first
    assert len([r for r in caplog.records if "Plugin Frozen failed" in r.getMessage()]) == 1


def test_a_budget_stop_passes_through() -> None:
    charge = Charge("busy", "job", 60.0, "seconds", 1.0)
    with pytest.raises(BudgetExceeded, match="enough"):
        hooks(deciding("on_event", BudgetExceeded("enough"))).on_event(events.StepStarted(0))
    with pytest.raises(BudgetExceeded, match="enough"):
        hooks(deciding("before_spend", BudgetExceeded("enough"))).before_spend(charge, None)  # type: ignore[arg-type]
    other = hooks(deciding("before_spend", ValueError("mine")))
    other.before_spend(charge, None)  # type: ignore[arg-type]
    assert other.failures["Plugin"].count == 1


def test_a_hook_may_leave_out_arguments() -> None:
    calls: list[str] = []

    class Short:
        @ata.hookimpl
        def before_spend(self, charge: Charge) -> None:
            calls.append(charge.subject)

        @ata.hookimpl(specname="on_event")
        def any_event(self) -> None:
            calls.append("event")

    asked = hooks(Short())
    asked.before_spend(Charge("busy", "job", 1.0, "seconds", 0.0), None)  # type: ignore[arg-type]
    asked.on_event(events.StepStarted(0))
    assert calls == ["job", "event"]


# ------------------------------------------------------------------------------------------ events and their handler

EVENTS = [kind for _, kind in inspect.getmembers(events, inspect.isclass) if issubclass(kind, events.Event)]
KINDS = [kind for kind in EVENTS if kind is not events.Event and kind.__module__ == events.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_is_frozen_and_has_a_method(kind: type) -> None:
    name = "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
    called: list[str] = []
    handler = type("Handler", (ata.EventHandler,), {name: lambda self, event: called.append(type(event).__name__)})
    event = kind(**{field.name: None for field in attrs.fields(kind) if field.default is attrs.NOTHING})
    asked = hooks(handler())
    asked.on_event(event)
    assert called == [kind.__name__]
    assert not asked.failures
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        event.time = 1.0  # type: ignore[attr-defined]


def test_a_handler_without_methods_sees_everything_quietly() -> None:
    asked = hooks(ata.EventHandler())
    for kind in KINDS:
        asked.on_event(kind(**{f.name: None for f in attrs.fields(kind) if f.default is attrs.NOTHING}))
    assert not asked.failures


def test_a_misspelt_method_of_a_handler_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"Watch\.on_step_finnished: .*Did you mean 'on_step_finished'\?"):

        class Watch(ata.EventHandler):
            def on_step_finnished(self, event: events.Event) -> None: ...
