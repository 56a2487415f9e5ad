"""`EventHandler`: an observer with one method for each kind of event."""

from __future__ import annotations

import inspect
import re
from typing import Any

from ai_trains_ai import events
from ai_trains_ai.errors import ConfigurationError, did_you_mean
from ai_trains_ai.plugins.hookspecs import hookimpl


class EventHandler:
    """A plugin that watches: override the methods that you need, and pass an instance in ``plugins=[…]``.

    One instance sees all events of a run in order, from the run's thread. What a method raises is counted and shown,
    and never ends the run; `BudgetExceeded` stops it.

    >>> class Dots(EventHandler):
    ...     def on_episode_finished(self, event):
    ...         print(".", end="")

    Raises:
        ConfigurationError: when a subclass defines an ``on_…`` method that no event calls.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        known = [name for name in vars(EventHandler) if name.startswith("on_")]
        for name in dir(cls):  # those of a mixin too
            method = inspect.getattr_static(cls, name)
            if not name.startswith("on_") or not callable(getattr(method, "__func__", method)):
                continue
            if name not in known:
                hint = did_you_mean(name, known) or f"Methods: {', '.join(known)}."
                raise ConfigurationError(f"{cls.__name__}.{name}: there is no such event. {hint}")
            if inspect.iscoroutinefunction(method):
                raise ConfigurationError(f"{cls.__name__}.{name} is asynchronous, and nobody awaits it: use def.")
            if inspect.isfunction(method) and not _takes_an_event(method):
                raise ConfigurationError(f"{cls.__name__}.{name} must take the event: def {name}(self, event).")

    @hookimpl
    def on_event(self, event: events.Event) -> None:
        """Calls the method of the event's kind."""
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
        method = getattr(self, f"on_{name}", None)
        if method is not None:  # a part may emit events of its own
            method(event)

    def on_run_started(self, event: events.RunStarted) -> None:
        """All parts are started."""

    def on_baseline_measured(self, event: events.BaselineMeasured) -> None:
        """An untrained base model was scored on a task."""

    def on_step_started(self, event: events.StepStarted) -> None:
        """An outer step waits for its groups."""

    def on_episode_started(self, event: events.EpisodeStarted) -> None:
        """An episode begins to write."""

    def on_submission_validated(self, event: events.SubmissionValidated) -> None:
        """A submission got its verdict."""

    def on_job_started(self, event: events.JobStarted) -> None:
        """A job was handed to the runner."""

    def on_job_progress(self, event: events.JobProgress) -> None:
        """A job did a training step."""

    def on_job_finished(self, event: events.JobFinished) -> None:
        """A job ended, well or not."""

    def on_evaluated(self, event: events.Evaluated) -> None:
        """Trained weights were scored on the hidden set."""

    def on_integrity_found(self, event: events.IntegrityFound) -> None:
        """A check or a reviewer has something against an episode."""

    def on_charged(self, event: events.Charged) -> None:
        """Money was booked."""

    def on_episode_finished(self, event: events.EpisodeFinished) -> None:
        """An episode is over and stored."""

    def on_step_finished(self, event: events.StepFinished) -> None:
        """The outer policy was updated."""

    def on_checkpoint_saved(self, event: events.CheckpointSaved) -> None:
        """The outer policy was saved."""

    def on_health_warning(self, event: events.HealthWarning) -> None:
        """A metric of a step is beyond its threshold."""

    def on_stalled(self, event: events.Stalled) -> None:
        """Nothing has happened for long."""

    def on_probe_finished(self, event: events.ProbeFinished) -> None:
        """Held-out tasks were played in between, or before or after."""

    def on_run_stopped(self, event: events.RunStopped) -> None:
        """The run ended early, and can be resumed."""

    def on_run_finished(self, event: events.RunFinished) -> None:
        """The run is done."""


def _takes_an_event(method: Any) -> bool:
    try:
        inspect.signature(method).bind(None, None)
    except TypeError:
        return False
    return True
