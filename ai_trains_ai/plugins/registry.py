"""From what a user writes (an instance, a class, a name, "module:attr", a `Spec`) to an implementation."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import pluggy
from attrs import field, frozen

from ai_trains_ai.errors import ConfigurationError, MissingDependency, UnknownName
from ai_trains_ai.interfaces import (
    GPUProvider,
    InnerJobRunner,
    OuterPolicy,
    RewardFn,
    Sandbox,
    TaskFamily,
    Tracker,
)
from ai_trains_ai.plugins import builtin, hookspecs

# kind -> (hook, what users call it, interface)
KINDS: Mapping[str, tuple[str, str, type]] = {
    "outer_trainer": ("register_outer_trainers", "outer trainer", OuterPolicy),
    "job_runner": ("register_job_runners", "job runner", InnerJobRunner),
    "gpu_provider": ("register_gpu_providers", "GPU provider", GPUProvider),
    "reward": ("register_rewards", "reward", RewardFn),
    "task_family": ("register_task_families", "task family", TaskFamily),
    "sandbox": ("register_sandboxes", "sandbox", Sandbox),
    "tracker": ("register_trackers", "tracker", Tracker),
}

# arguments of parts that are parts themselves -> their kind
NESTED: Mapping[str, str] = {"provider": "gpu_provider"}


@frozen
class Spec:
    """A part by name, with its arguments: lazy and serialisable. `ata.job_runner("embedded")` makes one."""

    kind: str
    name: str
    arguments: Mapping[str, Any] = field(factory=dict)


@frozen
class Entry:
    """One registered name."""

    name: str
    factory: str | Callable[..., Any]
    summary: str
    plugin: str
    extra: str | None = None

    def load(self) -> Callable[..., Any]:
        """Import the factory. A missing optional package names the extra to install."""
        if callable(self.factory):
            return self.factory
        try:
            return _import(self.factory)
        except ImportError as error:
            if self.extra is None or isinstance(error, MissingDependency):
                raise
            raise MissingDependency.of(error.name or str(error), self.extra) from error


class Registry:
    """The names of one experiment: built-ins, then the plugins that were passed in."""

    def __init__(self, plugins: Iterable[object] = ()) -> None:
        self._manager = pluggy.PluginManager(hookspecs.GROUP)
        self._manager.add_hookspecs(hookspecs.RegistrySpecs)
        self._manager.add_hookspecs(hookspecs.ObserverSpecs)
        self._manager.register(builtin, "builtin")
        for plugin in plugins:
            if inspect.isclass(plugin):
                raise ConfigurationError(f"Plugin {plugin.__name__} is a class. Pass an instance: {plugin.__name__}().")
            self._manager.register(plugin)
        self._entries: dict[str, dict[str, Entry]] = {}

    def entries(self, kind: str) -> Mapping[str, Entry]:
        """All names of a kind, asked of the plugins on first use."""
        if kind not in self._entries:
            self._entries[kind] = self._ask(kind)
        return self._entries[kind]

    def _ask(self, kind: str) -> dict[str, Entry]:
        hook, word, _ = KINDS[kind]
        found: dict[str, Entry] = {}
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            plugin = implementation.plugin_name

            def register(
                name: str,
                factory: str | Callable[..., Any],
                *,
                summary: str,
                extra: str | None = None,
                plugin: str = plugin,
            ) -> None:
                if name in found:
                    raise ConfigurationError(
                        f"{word} {name!r} is registered by both {found[name].plugin!r} and {plugin!r}. Leave one out."
                    )
                found[name] = Entry(name, factory, summary, plugin, extra)

            implementation.function(register)
        return found

    def resolve(self, kind: str, what: Any) -> Any:
        """An instance of the kind's interface.

        Accepts an instance, a class, a `Spec`, a registered name or "module:attr". Raises `UnknownName` with a
        did-you-mean, or `ConfigurationError` for something that isn't of the interface.
        """
        _, word, interface = KINDS[kind]
        if isinstance(what, Spec):
            if what.kind != kind:
                raise ConfigurationError(f"A {word} is wanted here, but {what.name!r} is a {KINDS[what.kind][1]}.")
            factory = self._factory(kind, what.name)
            arguments = {k: self._argument(k, v) for k, v in what.arguments.items()}
            made = self._make(word, what.name, factory, arguments)
        elif isinstance(what, str):
            made = self._make(word, what, self._factory(kind, what), {})
        elif inspect.isclass(what):
            made = self._make(word, what.__name__, what, {})
        else:
            made = what
        if not isinstance(made, interface):
            raise ConfigurationError(
                f"{what!r} is no {word}: it is a {type(made).__name__}, not an {interface.__name__}."
            )
        return made

    def _argument(self, name: str, value: Any) -> Any:
        """A part of a part: a spec, or whatever is given where a part is expected."""
        kind = value.kind if isinstance(value, Spec) else NESTED.get(name)
        return value if kind is None or value is None else self.resolve(kind, value)

    def _factory(self, kind: str, name: str) -> Callable[..., Any]:
        entries = self.entries(kind)
        if name in entries:
            return entries[name].load()
        if ":" in name:
            return _import(name)
        raise UnknownName.of(KINDS[kind][1], name, entries)

    @staticmethod
    def _make(word: str, name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        try:
            inspect.signature(factory).bind(**arguments)
        except TypeError as error:
            raise ConfigurationError(
                f"{word} {name!r}: {error}. Its signature is {inspect.signature(factory)}."
            ) from None
        return factory(**arguments)

    def observers(self) -> list[tuple[str, Callable[[Any], None]]]:
        """Plugin name and callback of everything that watches events."""
        implementations = self._manager.hook.on_event.get_hookimpls()
        return [(found.plugin_name, cast(Callable[[Any], None], found.function)) for found in implementations]


def _import(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise ConfigurationError(f"{reference!r}: there is no module {module!r}.") from error
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{reference!r}: {module!r} has no {attribute!r}.")
        found = getattr(found, part)
    return found
