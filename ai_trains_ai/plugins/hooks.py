"""Calls of a run to its plugins: one by one, each in its own try, failures counted and kept.

Plugins get copies, where there can be one: records are frozen, but hold mappings, and what one plugin writes into them
is nobody's business. The ledger of ``before_spend`` is the run's own, to read.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from attrs import evolve, frozen

from ai_trains_ai.errors import BudgetExceeded
from ai_trains_ai.events import Event
from ai_trains_ai.interfaces import IntegrityCheck
from ai_trains_ai.plugins.checks import told
from ai_trains_ai.plugins.manager import PluginManager
from ai_trains_ai.records import (
    Charge,
    Checkpoint,
    Episode,
    EpisodeOutcome,
    FailureSide,
    Finding,
    JobResult,
    Submission,
    TrainingJob,
)

if TYPE_CHECKING:
    from ai_trains_ai.fleet import Ledger
    from ai_trains_ai.report.run import Run

logger = logging.getLogger(__name__)

Observer = Callable[[Event], None]


@frozen
class HookFailures:
    """What one plugin raised in one run: how often, and the first of it."""

    count: int = 0
    first: str = ""


class Hooks:
    """The plugins of one run, as the run sees them. Use it from the run's thread.

    Args:
        manager: whose plugins are called.
        watching: further observers, by name.
    """

    def __init__(self, manager: PluginManager | None = None, watching: Iterable[tuple[str, Observer]] = ()) -> None:
        self._calls: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
        self._manager = manager
        self._watching = list(watching)
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._logged: set[tuple[str, str]] = set()
        self._last = ""  # what the last failure was

    @property
    def labels(self) -> list[str]:
        """Name and version of every plugin in use beyond the built-ins."""
        records = [] if self._manager is None else self._manager.records.values()
        return [record.label for record in records if record.status == "loaded" and record.source != "built-in"]

    @property
    def failures(self) -> dict[str, HookFailures]:
        """What plugins raised so far, by name."""
        return {name: HookFailures(count, self._first[name]) for name, count in self._counts.items()}

    # ------------------------------------------------------------------------------------------ observers

    def on_event(self, event: Event) -> None:
        """Hand an event to everybody who watches. Only `BudgetExceeded` comes out."""
        for name, watch in self._watching:
            self._try(name, "on_event", watch, _copied(event))
        for name, function in self._implementations("on_event"):
            self._try(name, "on_event", function, event=_copied(event))

    def before_spend(self, charge: Charge, ledger: Ledger) -> None:
        """Ask whether a spend may go on. Raises `BudgetExceeded` when a plugin forbids it."""
        for name, function in self._implementations("before_spend"):
            self._try(name, "before_spend", function, charge=_copied(charge), ledger=ledger)

    # ------------------------------------------------------------------------------------------ decisions

    def classify_failure(self, job: TrainingJob, evidence: JobResult) -> JobResult:
        """The result of a failed job, with the side that the first plugin with an opinion gives it."""
        if evidence.failure is None:
            return evidence

        def check(side: Any) -> FailureSide:
            if side not in ("agent", "infrastructure"):
                raise TypeError(f"it returned {side!r}, not 'agent', 'infrastructure' or None")
            return cast("FailureSide", side)

        decided = self._first_opinion("classify_failure", check, job=job, evidence=evidence)
        if decided is None:
            return evidence
        name, side = decided
        basis = f"{evidence.failure.evidence}; {side} by plugin {name}".removeprefix("; ")
        return evolve(evidence, failure=evolve(evidence.failure, side=side, evidence=basis))

    def select_checkpoint(self, run: Run, candidates: Sequence[Checkpoint]) -> tuple[Checkpoint, str]:
        """The checkpoint that stands for the run, and who chose it ("newest" when nobody did)."""

        def check(chosen: Any) -> Checkpoint:
            if chosen not in candidates:
                raise TypeError(f"it returned {chosen!r}, which is none of the candidates")
            return cast(Checkpoint, chosen)

        decided = self._first_opinion("select_checkpoint", check, run=run, candidates=tuple(candidates))
        return (candidates[-1], "newest") if decided is None else (decided[1], decided[0])

    # ------------------------------------------------------------------------------------------ reviews

    def review_submission(self, submission: Submission) -> tuple[Finding, ...]:
        """What all plugins have against a submission."""
        reviews = self._implementations("review_submission")
        return tuple(self._findings("review_submission", reviews, submission=submission))

    def review_episode(self, episode: Episode) -> tuple[Finding, ...]:
        """What all plugins have against an episode."""
        return tuple(self._findings("review_episode", self._implementations("review_episode"), episode=episode))

    def check_integrity(
        self, checks: Iterable[IntegrityCheck], submission: Submission, outcome: EpisodeOutcome
    ) -> tuple[Finding, ...]:
        """What the experiment's integrity checks have against an episode; isolated like plugins."""
        named: list[tuple[str, Callable[..., Any]]] = [(type(check).__name__, check) for check in checks]
        return tuple(self._findings("integrity check", named, submission=submission, outcome=outcome))

    def _findings(
        self, hook: str, reviews: Iterable[tuple[str, Callable[..., Any]]], **arguments: Any
    ) -> Iterator[Finding]:
        for name, function in reviews:

            def review(function: Callable[..., Any] = function) -> list[Finding]:
                found = list(function(**_copied(arguments)) or ())
                for finding in found:
                    if not _is_finding(finding):
                        raise TypeError(f"it gave {finding!r}, which is no Finding with texts and a known severity")
                return found

            found = self._try(name, hook, review)
            if found is None:
                yield Finding("review-failed", "review", f"{name} raised: {self._last}", severity="warning")
            else:
                yield from found

    # ------------------------------------------------------------------------------------------ calling

    def _implementations(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        if hook not in self._calls:
            found = [] if self._manager is None else self._manager.implementations(hook)
            self._calls[hook] = found[::-1]  # as pluggy calls them: the last that was added first
        return self._calls[hook]

    def _first_opinion(self, hook: str, check: Callable[[Any], Any], **arguments: Any) -> tuple[str, Any] | None:
        for name, function in self._implementations(hook):

            def decide(function: Callable[..., Any] = function) -> Any:
                opinion = function(**_copied(arguments))
                return None if opinion is None else check(opinion)

            opinion = self._try(name, hook, decide)
            if opinion is not None:
                return name, opinion
        return None

    def _try(self, name: str, hook: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The call's result; ``None`` when it raised, which is counted, and logged once a plugin and hook."""
        try:
            result = call(*arguments, **named)
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise TypeError("it returned an awaitable, and nobody awaits a hook")
            return result
        except (BudgetExceeded, KeyboardInterrupt):
            raise
        except BaseException as error:  # a plugin's exit or cancellation is its failure, not the run's
            self._last = told(error)
            self._counts[name] += 1
            self._first.setdefault(name, f"{hook}: {self._last}")
            if (name, hook) not in self._logged:
                self._logged.add((name, hook))
                logger.warning("Plugin %s failed in %s: %s", name, hook, self._last, exc_info=True)
        return None


def _copied(value: Any) -> Any:
    """A copy, where there can be one: what holds a lock or a read-only view is handed out as it is."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _is_finding(finding: Any) -> bool:
    if not isinstance(finding, Finding) or finding.severity not in ("error", "warning"):
        return False
    return all(isinstance(getattr(finding, name), str) for name in ("code", "stage", "message", "hint", "place"))
