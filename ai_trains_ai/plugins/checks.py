"""What may be wrong with a plugin object, found before pluggy sees it: pluggy says little of it, or says it late."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from attrs import frozen

from ai_trains_ai.plugins.hookspecs import GROUP, SPECS, ReviewSpecs


@frozen
class Fault:
    """What is wrong with a plugin, and what to do about it."""

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        parts = (self.reason, self.remedy)
        return " ".join(part if part.endswith((".", "?", ")")) else f"{part}." for part in parts if part)


def _hooks() -> Iterator[tuple[str, type, tuple[str, ...]]]:
    for specs in SPECS:
        for name, function in vars(specs).items():
            if not name.startswith("_"):
                yield name, specs, tuple(inspect.signature(function).parameters)[1:]


HOOKS: Mapping[str, tuple[str, ...]] = {name: arguments for name, _, arguments in _hooks()}
"""Name of each hook -> names of its arguments."""

_REVIEWS = {name for name, specs, _ in _hooks() if specs is ReviewSpecs}


def implementations(plugin: object) -> dict[str, Callable[..., Any]]:
    """The functions of a plugin that are marked with ``hookimpl``, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for name in dir(plugin):
        function = _get(plugin, name)
        if inspect.isroutine(function) and isinstance(getattr(function, f"{GROUP}_impl", None), dict):
            found[name] = function
    return found


def _get(plugin: object, name: str) -> Any:
    try:
        return getattr(plugin, name, None)
    except Exception:  # a property that raises is no hook
        return None


def fault_of(plugin: object) -> Fault | None:
    """The first fault of a plugin object; ``None`` when it can be registered."""
    if inspect.isclass(plugin):
        return Fault(f"it is the class {plugin.__name__}, not an instance", f"Give an instance: {plugin.__name__}()")
    marked = implementations(plugin)
    for name in HOOKS:
        if name not in marked and inspect.isroutine(_get(plugin, name)):
            return Fault(
                f"its {name} is not marked, so it would never be called", "Put @ai_trains_ai.hookimpl above it"
            )
    for name, function in marked.items():
        fault = _function_fault(name, function)
        if fault is not None:
            return fault
    if not marked:
        what = "module" if isinstance(plugin, ModuleType) else type(plugin).__name__
        return Fault(
            f"this {what} implements no hook", f"Mark a function with @ai_trains_ai.hookimpl; hooks: {', '.join(HOOKS)}"
        )
    return None


def _function_fault(name: str, function: Callable[..., Any]) -> Fault | None:
    options = getattr(function, f"{GROUP}_impl")
    hook = options.get("specname") or name
    if hook not in HOOKS:
        close = difflib.get_close_matches(hook, HOOKS, 1)
        remedy = f"Did you mean {close[0]!r}?" if close else f"Hooks: {', '.join(HOOKS)}"
        return Fault(f"it implements the unknown hook {hook!r}", remedy)
    if options.get("wrapper") or options.get("hookwrapper"):
        return Fault(f"its {name} is a wrapper; hooks are called one by one here", "Implement the hook itself")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return Fault(f"its {name} is asynchronous, and nobody awaits a hook", "Make it a plain function")
    if inspect.isgeneratorfunction(function) and hook not in _REVIEWS:
        return Fault(f"its {name} is a generator, which would never run", "Make it a plain function, without yield")
    return _argument_fault(name, function, HOOKS[hook])


def _argument_fault(name: str, function: Callable[..., Any], known: tuple[str, ...]) -> Fault | None:
    takes = f"{name} may take: {', '.join(known)}"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return Fault(f"its {name} takes *{parameter.name}, which never gets anything", takes)
        if parameter.name not in known:
            close = difflib.get_close_matches(parameter.name, known, 1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            return Fault(f"its {name} takes an argument {parameter.name!r} that the hook doesn't have", hint + takes)
        if parameter.default is not parameter.empty:
            return Fault(
                f"the argument {parameter.name!r} of its {name} has a default, and then never gets a value",
                "Remove the default",
            )
        if parameter.kind is parameter.KEYWORD_ONLY:
            return Fault(f"the argument {parameter.name!r} of its {name} is keyword-only", "Make it an ordinary one")
    return None
