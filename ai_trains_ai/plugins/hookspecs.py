"""What a plugin may implement, in four kinds: registries, decisions, reviews, observers.

A hook takes the arguments that it needs, by name, without defaults, and is no coroutine; asynchronous work lives in the
interfaces. The docstrings here are the reference (``docs/reference/hooks.md`` is made from them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import pluggy

if TYPE_CHECKING:
    import typer

    from ai_trains_ai.events import Event
    from ai_trains_ai.fleet import Ledger
    from ai_trains_ai.records import (
        Charge,
        Checkpoint,
        Episode,
        FailureSide,
        Finding,
        JobResult,
        Submission,
        TrainingJob,
    )
    from ai_trains_ai.report.run import Run

GROUP: Final = "ai_trains_ai"
"""Namespace of the hooks, and the entry-point group under which installed plugins are found."""

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class Register(Protocol):
    """``register(name, factory, summary=…)``. ``factory`` is a callable or an import string "module:attr".

    An import string keeps what it names unimported until somebody asks for it. ``summary`` is one line for listings;
    ``extra`` names the extra of the plugin's distribution with the packages that the factory needs.
    """

    def __call__(
        self, name: str, factory: str | Callable[..., Any], *, summary: str, extra: str | None = None
    ) -> None: ...


class RegistrySpecs:
    """Names to implementations. Asked once, when the first of a kind is wanted; a plugin may register several."""

    @hookspec
    def register_outer_trainers(self, register: Register) -> None:
        """Register factories of `OuterPolicy` (agents that act) and `OuterTrainer` (agents that learn)."""

    @hookspec
    def register_job_runners(self, register: Register) -> None:
        """Register factories of `InnerJobRunner`."""

    @hookspec
    def register_gpu_providers(self, register: Register) -> None:
        """Register factories of `GPUProvider`."""

    @hookspec
    def register_rewards(self, register: Register) -> None:
        """Register factories of `RewardFn`."""

    @hookspec
    def register_task_families(self, register: Register) -> None:
        """Register factories of `TaskFamily`, each under the family's own name."""

    @hookspec
    def register_sandboxes(self, register: Register) -> None:
        """Register factories of `Sandbox`: where agents' code is validated and run."""

    @hookspec
    def register_trackers(self, register: Register) -> None:
        """Register factories of `Tracker`."""

    @hookspec
    def register_integrity_checks(self, register: Register) -> None:
        """Register factories of `IntegrityCheck`, for experiments that name them in ``integrity_checks=[…]``."""

    @hookspec
    def register_commands(self, cli: typer.Typer) -> None:
        """Add verbs to the command line: ``@cli.command()``. Asked by the ``ai-trains-ai`` command alone."""


class DecisionSpecs:
    """The first opinion counts: plugins passed to the experiment are asked first, then the installed ones.

    ``None`` means no opinion. A decision that raises, or returns something else than it should, is counted as a failure
    of the plugin and taken as no opinion.
    """

    @hookspec(firstresult=True)
    def classify_failure(self, job: TrainingJob, evidence: JobResult) -> FailureSide | None:
        """Whose failure was it: "agent" (it scores) or "infrastructure" (the episode is masked from training)?

        Asked for each job that failed, before its result is stored; ``evidence.failure`` has the runner's own verdict.
        What the job printed or reported was written by agent code and is no evidence.
        """
        return None

    @hookspec(firstresult=True)
    def select_checkpoint(self, run: Run, candidates: Sequence[Checkpoint]) -> Checkpoint | None:
        """Which of ``candidates`` (oldest first) stands for the run? Asked at its end; by default the newest.

        The choice is in ``run.checkpoint``, with the name of the plugin that made it.
        """
        return None


class ReviewSpecs:
    """All plugins are asked, and all findings count.

    A review that raises is counted as a failure of the plugin, and a warning among the findings says so.
    """

    @hookspec
    def review_submission(self, submission: Submission) -> Sequence[Finding]:
        """Findings on a submission that passed every stage of the validation. One of severity "error" rejects it.

        The agent reads message and hint, and may repair it.
        """
        return ()

    @hookspec
    def review_episode(self, episode: Episode) -> Sequence[Finding]:
        """Findings on an episode before it is paid. One of severity "error" is tampering: `HybridReward` pays nothing.

        ``episode.reward`` is not there yet.
        """
        return ()


class ObserverSpecs:
    """Onlookers, called one by one. What they raise is counted and shown, and never ends a run."""

    @hookspec
    def on_event(self, event: Event) -> None:
        """One frozen event of `ai_trains_ai.events`, a copy of the plugin's own where it can be copied.

        Must return fast: the run waits.

        `EventHandler` has one method for each kind. Only `BudgetExceeded` passes through, and stops the run.
        """

    @hookspec
    def before_spend(self, charge: Charge, ledger: Ledger) -> None:
        """Called before something that costs money is started. Raise `BudgetExceeded` to forbid it and stop the run.

        ``charge`` is the least that it will come to. ``ledger`` is the run's own, to read: ``ledger.spent`` is what the
        run has spent so far, ``ledger.budget`` its limits.
        """


SPECS = (RegistrySpecs, DecisionSpecs, ReviewSpecs, ObserverSpecs)
