"""What a task's rewards, metrics and hooks need, and which of it works without a runtime, tools or judges."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import verifiers.v1 as vf

from ai_trains_ai.errors import InvalidEnvironment

_ARGUMENTS = ("task", "trace")
_RUNTIME_HOOKS = ("setup", "finalize", "stage_verifier")


def check_task(task: vf.Task, env: vf.Env | None) -> None:
    """Refuse with an `InvalidEnvironment` what can't be honoured in process; called once per environment."""
    kind = type(task)
    _check_names(kind)
    if task.NEEDS_CONTAINER or task.data.image:
        raise InvalidEnvironment("container", "The task needs a container.", "Remove image and NEEDS_CONTAINER.")
    if kind.toolsets(task.config) or _marked(kind, "tool"):
        raise InvalidEnvironment("toolset", "Tools are not supported.", "Let Env.run answer in text.")
    if _marked(kind, "intercept"):
        raise InvalidEnvironment("intercept", "@vf.intercept is not supported.", "Remove it.")
    if task.config.judges:
        raise InvalidEnvironment("judge", "Judges are not supported.", "Write a @vf.reward.")
    for name in _RUNTIME_HOOKS:
        if getattr(kind, name) is not getattr(vf.Task, name):
            raise InvalidEnvironment(
                "runtime-hook", f"{name}() needs a runtime.", "Do it in load().", _place(kind, name)
            )
    if env is not None and (type(env).start is not vf.Env.start or type(env).stop is not vf.Env.stop):
        raise InvalidEnvironment("runtime-hook", "Env.start() and Env.stop() are not supported.", "Remove them.")
    rewards = task.hooks("reward")
    if not rewards and kind.score is vf.Task.score:
        raise InvalidEnvironment("no-reward", "The task has no reward.", "Add a method with @vf.reward.")
    for hook in (*rewards, *task.hooks("metric")):
        _check_hook(hook)


def _check_names(kind: type[vf.Task]) -> None:
    """A reward that has the name of a `vf.Task` method silently replaces that method."""
    for name in ("reward", "metric", "stop"):
        for method in _marked(kind, name):
            if hasattr(vf.Task, method):
                raise InvalidEnvironment(
                    "reserved-name", f"A @vf.{name} may not be named {method}.", "Rename it.", _place(kind, method)
                )


def _check_hook(hook: Callable[..., Any]) -> None:
    name = hook.__name__
    function = inspect.unwrap(hook)
    code = getattr(function, "__code__", None)
    place = f"environment.py:{code.co_firstlineno}" if code else "environment.py"
    if not inspect.iscoroutinefunction(function):
        raise InvalidEnvironment("reward-not-async", f"{name} is not async.", f"Write async def {name}.", place)
    for parameter in inspect.signature(hook).parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and parameter.name == "runtime":
            raise InvalidEnvironment(
                "needs-runtime", f"{name} needs a runtime.", "Use trace and self.data only.", place
            )
        if needed and parameter.name not in _ARGUMENTS:
            hint = "A reward takes self, trace and task only."
            raise InvalidEnvironment("reward-argument", f"{name} takes {parameter.name}.", hint, place)


def _marked(kind: type, mark: str) -> list[str]:
    return sorted({name for base in kind.__mro__ for name, value in vars(base).items() if hasattr(value, mark)})


def _place(kind: type, name: str) -> str:
    code = getattr(getattr(kind, name, None), "__code__", None)
    return f"environment.py:{code.co_firstlineno}" if code else "environment.py"
