"""What a plugin may implement. All registries are asked lazily, with a ``register`` callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import pluggy

GROUP: Final = "ai_trains_ai"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class Register(Protocol):
    """``register(name, factory, summary=…)``. ``factory`` is a callable or an import string "module:attr"."""

    def __call__(
        self, name: str, factory: str | Callable[..., Any], *, summary: str, extra: str | None = None
    ) -> None: ...


class RegistrySpecs:
    """Names to implementations. A plugin may register several."""

    @hookspec
    def register_outer_trainers(self, register: Register) -> None:
        """Outer policies and trainers."""

    @hookspec
    def register_job_runners(self, register: Register) -> None:
        """Runners of inner training jobs."""

    @hookspec
    def register_gpu_providers(self, register: Register) -> None:
        """Providers of machines."""

    @hookspec
    def register_rewards(self, register: Register) -> None:
        """Reward functions."""

    @hookspec
    def register_task_families(self, register: Register) -> None:
        """Task families."""

    @hookspec
    def register_sandboxes(self, register: Register) -> None:
        """Sandbox backends."""

    @hookspec
    def register_trackers(self, register: Register) -> None:
        """Metric trackers."""


class ObserverSpecs:
    """Onlookers. What they raise is counted and shown, and never ends a run."""

    @hookspec
    def on_event(self, event: Any) -> None:
        """One frozen event of `ai_trains_ai.events`."""
