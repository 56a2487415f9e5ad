"""What may be wrong with a plugin object, found before pluggy sees it: pluggy says little of it, or says it late.

Attributes are looked up statically: no property and no lazy module runs anything to show whether it is a hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from attrs import frozen

from ai_trains_ai.errors import did_you_mean
from ai_trains_ai.plugins.hookspecs import GROUP, SPECS, ReviewSpecs

MARK = f"{GROUP}_impl"


@frozen
class Fault:
    """What is wrong with a plugin, and what to do about it."""

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        parts = (self.reason, self.remedy)
        return " ".join(part if part.endswith((".", "?", ")")) else f"{part}." for part in parts if part)


def told(error: BaseException) -> str:
    """An error's kind and message on one line, whatever its ``__str__`` does."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "its message can't be shown"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _hooks() -> Iterator[tuple[str, type, tuple[str, ...]]]:
    for specs in SPECS:
        for name, function in vars(specs).items():
            if not name.startswith("_"):
                yield name, specs, tuple(inspect.signature(function).parameters)[1:]


HOOKS: Mapping[str, tuple[str, ...]] = {name: arguments for name, _, arguments in _hooks()}
"""Name of each hook -> names of its arguments."""

_REVIEWS = {name for name, specs, _ in _hooks() if specs is ReviewSpecs}


def implementations(plugin: object) -> dict[str, Callable[..., Any]]:
    """The functions of a plugin that are marked with ``hookimpl``, by name; of hooks that this version has."""
    return {
        name: getattr(plugin, name)
        for name, attribute in _attributes(plugin)
        if (options := _options(attribute)) is not None and _hook(name, options) in HOOKS
    }


def _attributes(plugin: object) -> Iterator[tuple[str, Any]]:
    """Name and static value of everything that may be a hook."""
    places: list[Mapping[str, Any]] = [vars(plugin)] if hasattr(plugin, "__dict__") else []
    if not isinstance(plugin, ModuleType):
        places += [vars(kind) for kind in type(plugin).__mro__]
    seen: set[str] = set()
    for place in places:
        for name, attribute in list(place.items()):
            if name not in seen:
                seen.add(name)
                yield name, attribute


def _options(attribute: Any) -> dict[str, Any] | None:
    """What ``hookimpl`` noted on a function, also below ``staticmethod`` and ``classmethod``."""
    inner = attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute
    try:
        options = inspect.getattr_static(inner, MARK, None)
    except Exception:
        return None
    return options if isinstance(options, dict) else None


def _hook(name: str, options: Mapping[str, Any]) -> str:
    return options.get("specname") or name


def fault_of(plugin: object) -> Fault | None:
    """The first fault of a plugin object; ``None`` when it can be registered."""
    if inspect.isclass(plugin):
        return Fault(f"it is the class {plugin.__name__}, not an instance", f"Give an instance: {plugin.__name__}()")
    if isinstance(plugin, str):
        return Fault(f"{plugin!r} is a text", "Installed plugins load by themselves; required=[…] insists on one")
    found = False
    for name, attribute in _attributes(plugin):
        options = _options(attribute)
        if options is None:
            if name in HOOKS and callable(getattr(attribute, "__func__", attribute)):
                return _unmarked(name, attribute)
            continue
        found = True
        fault = _function_fault(name, getattr(plugin, name), options)
        if fault is not None:
            return fault
    if not found:
        what = "module" if isinstance(plugin, ModuleType) else type(plugin).__name__
        return Fault(
            f"this {what} implements no hook", f"Mark a function with @ai_trains_ai.hookimpl; hooks: {', '.join(HOOKS)}"
        )
    return None


def _unmarked(name: str, attribute: Any) -> Fault:
    if isinstance(attribute, staticmethod | classmethod) and isinstance(vars(attribute).get(MARK), dict):
        kind = type(attribute).__name__
        return Fault(f"its {name} is marked above @{kind}, where the mark is lost", f"Put @hookimpl below @{kind}")
    return Fault(f"its {name} is not marked, so it would never be called", "Put @ai_trains_ai.hookimpl above it")


def _function_fault(name: str, function: Any, options: Mapping[str, Any]) -> Fault | None:
    hook = _hook(name, options)
    if hook not in HOOKS:
        if options.get("optionalhook"):
            return None  # of another version of ours
        remedy = did_you_mean(hook, HOOKS) or f"Hooks: {', '.join(HOOKS)}"
        return Fault(f"it implements the unknown hook {hook!r}", remedy)
    if not inspect.isroutine(function):
        return Fault(f"its {name} is a {type(function).__name__}, which pluggy passes over", "Make it a function")
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
            remedy = f"{did_you_mean(parameter.name, known)} {takes}".strip()
            return Fault(f"its {name} takes an argument {parameter.name!r} that the hook doesn't have", remedy)
        if parameter.default is not parameter.empty:
            return Fault(
                f"the argument {parameter.name!r} of its {name} has a default, and then never gets a value",
                "Remove the default",
            )
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            kind = parameter.kind.description
            return Fault(f"the argument {parameter.name!r} of its {name} is {kind}", "Make it an ordinary one")
    return None
