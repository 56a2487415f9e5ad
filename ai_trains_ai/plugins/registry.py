"""From what a user writes (an instance, a class, a name, "module:attr", a `Spec`) to an implementation."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from ai_trains_ai.errors import ConfigurationError, MissingDependency, PluginError, UnknownName
from ai_trains_ai.interfaces import (
    GPUProvider,
    InnerJobRunner,
    IntegrityCheck,
    OuterPolicy,
    RewardFn,
    Sandbox,
    TaskFamily,
    Tracker,
)
from ai_trains_ai.plugins.checks import Fault
from ai_trains_ai.plugins.manager import BUILT_IN, DISABLE, PluginManager, PluginRecord, Plugins


@frozen
class Kind:
    """A kind of part: the hook that registers it, what users call it, and its interface."""

    hook: str
    word: str
    interface: type


KINDS: Mapping[str, Kind] = {
    "outer_trainer": Kind("register_outer_trainers", "outer trainer", OuterPolicy),
    "job_runner": Kind("register_job_runners", "job runner", InnerJobRunner),
    "gpu_provider": Kind("register_gpu_providers", "GPU provider", GPUProvider),
    "reward": Kind("register_rewards", "reward", RewardFn),
    "task_family": Kind("register_task_families", "task family", TaskFamily),
    "sandbox": Kind("register_sandboxes", "sandbox", Sandbox),
    "tracker": Kind("register_trackers", "tracker", Tracker),
    "integrity_check": Kind("register_integrity_checks", "integrity check", IntegrityCheck),
}

# arguments of parts that are parts themselves -> their kind
NESTED: Mapping[str, str] = {"provider": "gpu_provider"}


@frozen
class Spec:
    """A part by name, with its arguments: lazy and serialisable. `ata.job_runner("embedded")` makes one."""

    kind: str
    name: str
    arguments: Mapping[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigurationError(
                f"{self.kind}() takes a registered name or 'module:attr', not {self.name!r}. "
                "Pass an instance or a class to the experiment itself."
            )


@frozen
class Entry:
    """One registered name. ``distribution`` is empty for a plugin that was passed by hand."""

    name: str
    factory: str | Callable[..., Any]
    summary: str
    plugin: str
    distribution: str
    extra: str | None = None

    def load(self) -> Callable[..., Any]:
        """Import the factory. A missing optional package names the extra to install."""
        if callable(self.factory):
            return self.factory
        return _import(self.factory)

    @property
    def owner(self) -> str:
        """What qualifies the name: the distribution, or the plugin that was passed by hand."""
        return self.distribution or self.plugin

    def explained(self, error: ImportError) -> MissingDependency:
        """The error that tells what to install."""
        if isinstance(error, MissingDependency):
            return error
        missing = error.name or str(error)
        if self.extra is not None and self.plugin == BUILT_IN:
            return MissingDependency.of(missing, self.extra)
        wanted = f"'{self.distribution}[{self.extra}]'" if self.extra and self.distribution else missing
        return MissingDependency(
            f"{self.name!r} of plugin {self.plugin!r} can't be made: {error}. Install what it needs: "
            f"pip install {wanted}"
        )


class Registry:
    """The names of one experiment, from its plugins.

    A bare name means the built-in part of that name, else the one plugin that registers it. A name that several
    plugins register, or that is built in, is written as "distribution:name".

    Args:
        plugins: plugin objects that were passed by hand.
        strict: raise `PluginError` for any fault of any plugin.
        required: plugins (by their name or distribution) that must be loaded.
    """

    def __init__(self, plugins: Iterable[object] = (), *, strict: bool = False, required: Iterable[str] = ()) -> None:
        if isinstance(required, str):
            raise ConfigurationError(f"required takes a list of plugin names: required=[{required!r}].")
        self.manager = PluginManager(plugins)
        self._entries: dict[str, dict[str, Entry]] = {}
        self._clashes: dict[tuple[str, str], list[Entry]] = {}
        if strict:
            self._ask_all()
        self.manager.require(required, strict=strict)

    # ------------------------------------------------------------------------------------------ listing

    @property
    def plugins(self) -> Plugins:
        """A record of every plugin, with the names that it registers."""
        self._ask_all()
        names: dict[str, list[str]] = {}
        for kind, entries in self._entries.items():
            for name, entry in entries.items():
                names.setdefault(entry.plugin, []).append(f"{KINDS[kind].word} {name}")
        records = self.manager.records.values()
        return Plugins(evolve(record, registered=tuple(names.get(record.name, ()))) for record in records)

    def entries(self, kind: str) -> Mapping[str, Entry]:
        """All names of a kind, asked of the plugins on first use. Names that clash are qualified."""
        if kind not in self._entries:
            self._entries[kind] = self._ask(kind)
        return self._entries[kind]

    def _ask_all(self) -> None:
        for kind in KINDS:
            self.entries(kind)

    def _ask(self, kind: str) -> dict[str, Entry]:
        found: list[Entry] = []
        for plugin, function in self.manager.implementations(KINDS[kind].hook):
            record = self.manager.records[plugin]

            def register(
                name: str,
                factory: str | Callable[..., Any],
                *,
                summary: str,
                extra: str | None = None,
                record: PluginRecord = record,
            ) -> None:
                fault = _entry_fault(KINDS[kind], name, factory)
                if fault is None and any(e.name == name and e.plugin == record.name for e in found):
                    fault = Fault(f"it registers the {KINDS[kind].word} {name!r} twice", "Leave one out")
                if fault is not None:
                    self.manager.blame(record.name, fault)
                    return
                found.append(Entry(name, factory, summary, record.name, record.distribution, extra))

            try:
                function(register=register)
            except PluginError:
                raise
            except Exception as error:
                reason = f"its {KINDS[kind].hook} raised {type(error).__name__}: {error}"
                self.manager.blame(plugin, Fault(reason, f"Repair or update {record.distribution or plugin}"))
        return self._named(kind, found)

    def _named(self, kind: str, found: Sequence[Entry]) -> dict[str, Entry]:
        """Entries by the name that means them alone."""
        named: dict[str, Entry] = {}
        for entry in found:
            others = [other for other in found if other.name == entry.name and other is not entry]
            if not others or entry.plugin == BUILT_IN:
                named[entry.name] = entry
                continue
            qualifier = entry.plugin if entry.owner in [other.owner for other in others] else entry.owner
            qualified = f"{qualifier}:{entry.name}"
            named[qualified] = entry
            if all(other.plugin != BUILT_IN for other in others):
                self._clashes.setdefault((kind, entry.name), []).append(entry)
            reason = (
                f"the {KINDS[kind].word} {entry.name!r} is registered by both {others[0].plugin!r} and {entry.plugin!r}"
            )
            passed = self.manager.records[entry.plugin].source == "passed"
            remedy = "Choose another name" if passed else f"Write {qualified!r}, or set {DISABLE}={entry.owner}"
            self.manager.blame(entry.plugin, Fault(reason, remedy))
        return named

    def why(self, name: str) -> str:
        """What is known of a plugin, a distribution or a registered name, as text. Raises `UnknownName`."""
        plugins = [record for record in self.plugins if record.called(name)]
        parts = [
            (KINDS[kind].word, label, entry)
            for kind in KINDS
            for label, entry in self.entries(kind).items()
            if name in (label, entry.name)
        ]
        if not plugins and not parts:
            labels = {label for kind in KINDS for label in self.entries(kind)}
            raise UnknownName.of("plugin or part", name, labels | set(self.manager.records), self._absent())
        texts = [record.text() for record in plugins]
        for word, label, entry in parts:
            factory = entry.factory if isinstance(entry.factory, str) else repr(entry.factory)
            extra = f"\n  needs: the extra {entry.extra!r} of {entry.owner}" if entry.extra else ""
            texts.append(
                f"{word} {label!r}: {entry.summary}\n  from plugin: {entry.plugin}\n  made by: {factory}{extra}"
            )
        return "\n".join(texts)

    # ------------------------------------------------------------------------------------------ resolving

    def resolve(self, kind: str, what: Any) -> Any:
        """An instance of the kind's interface.

        Accepts an instance, a class, a `Spec`, a registered name, "distribution:name" or "module:attr".

        Raises:
            UnknownName: with a did-you-mean and the installed names.
            MissingDependency: a known part needs a package that isn't there; names the extra.
            ConfigurationError: something that isn't of the interface, or wrong arguments.
        """
        part = KINDS[kind]
        if isinstance(what, Spec):
            if what.kind != kind:
                raise ConfigurationError(
                    f"{_article(part.word)} is wanted here, but {what.name!r} is {_article(KINDS[what.kind].word)}."
                )
            arguments = {k: self._argument(k, v) for k, v in what.arguments.items()}
            made = self._make_named(kind, what.name, arguments)
        elif isinstance(what, str):
            made = self._make_named(kind, what, {})
        elif inspect.isclass(what):
            made = _make(part, what.__name__, what, {})
        else:
            made = what
        if inspect.iscoroutine(made):
            made.close()
            raise ConfigurationError(f"The factory of {what!r} is asynchronous. Make it a plain function.")
        if not isinstance(made, part.interface):
            raise ConfigurationError(
                f"{what!r} is no {part.word}: it is {_article(type(made).__name__)}, not {_interface(part)}. "
                f"Pass an instance, a class, 'module:attr', or one of: {', '.join(self.entries(kind)) or 'none'}."
            )
        return made

    def _argument(self, name: str, value: Any) -> Any:
        """A part of a part: a spec, or whatever is given where a part is expected."""
        kind = value.kind if isinstance(value, Spec) else NESTED.get(name)
        return value if kind is None or value is None else self.resolve(kind, value)

    def _make_named(self, kind: str, name: str, arguments: Mapping[str, Any]) -> Any:
        entry = self._entry(kind, name)
        if entry is None:
            return _make(KINDS[kind], name, self._imported(kind, name), arguments)
        try:
            return _make(KINDS[kind], name, entry.load(), arguments)
        except ImportError as error:
            raise entry.explained(error) from error

    def _imported(self, kind: str, reference: str) -> Any:
        """What a user's "module:attr" names; a module that isn't there may be a misspelt distribution."""
        try:
            return _import(reference)
        except ModuleNotFoundError as error:
            module = reference.partition(":")[0]
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            known = ", ".join(self.entries(kind)) or "none"
            raise ConfigurationError(
                f"{reference!r}: there is no module {error.name!r}, and no plugin of that name. "
                f"Registered as {KINDS[kind].word}: {known}."
            ) from error

    def _entry(self, kind: str, name: str) -> Entry | None:
        """The entry that a name means; ``None`` for a "module:attr"."""
        entries, word = self.entries(kind), KINDS[kind].word
        if name in entries:
            return entries[name]
        if (kind, name) in self._clashes:
            both = self._clashes[kind, name]
            qualified = [other for other, entry in entries.items() if entry in both]
            raise PluginError(
                f"The {word} {name!r} is registered by {' and '.join(repr(entry.plugin) for entry in both)}. "
                f"Write {' or '.join(map(repr, qualified))}."
            )
        owner, colon, bare = name.partition(":")
        if not colon:
            raise UnknownName.of(word, name, entries, self._absent())
        for entry in entries.values():
            record = self.manager.records[entry.plugin]
            if entry.name == bare and (record.called(owner) or owner == entry.owner):
                return entry
        if any(record.called(owner) for record in self.manager.records.values()) and not _is_module(owner):
            raise UnknownName.of(word, name, entries, self._absent())
        return None

    def _absent(self) -> str:
        """What may explain that a name isn't there."""
        absent = [record.name for record in self.manager.records.values() if record.status != "loaded"]
        if not absent:
            return ""
        return f"Not loaded: {', '.join(absent)} (`ai-trains-ai plugins --why {absent[0]}` says why)."


def _entry_fault(part: Kind, name: Any, factory: Any) -> Fault | None:
    """What is wrong with a registration, as far as it shows without importing anything."""
    where = f"it registers the {part.word} {name!r}"
    if not isinstance(name, str) or not name or ":" in name or any(c.isspace() for c in name):
        return Fault(f"{where}, which is no name", "A name is a text without colons and blanks")
    if isinstance(factory, str):
        module, colon, attribute = factory.partition(":")
        if colon and module and attribute:
            return None
        return Fault(f"{where} with the import string {factory!r}", "Write 'package.module:attribute'")
    if isinstance(factory, part.interface):
        return Fault(f"{where} with an instance", "Give the class, or a function that makes one")
    if not callable(factory):
        return Fault(f"{where} with {factory!r}, which can't be called", "Give a class, a function or 'module:attr'")
    if inspect.iscoroutinefunction(factory):
        return Fault(f"{where} with an asynchronous factory", "Make it a plain function; parts have an async start()")
    if inspect.isclass(factory) and not issubclass(factory, part.interface):
        return Fault(f"{where} with {factory.__name__}, which is no {part.interface.__name__}", "Subclass it")
    if lacking := _lacking(factory):
        return Fault(f"{where} with {factory.__name__}, which lacks {lacking}", "Define it")
    return None


def _make(part: Kind, name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    if inspect.isclass(factory) and not issubclass(factory, part.interface):
        raise ConfigurationError(f"{name!r} is no {part.word}: the class {factory.__name__} is not {_interface(part)}.")
    if lacking := _lacking(factory):
        raise ConfigurationError(f"{part.word} {name!r}: the class lacks {lacking}. See {_interface(part)}.")
    if not callable(factory):
        if not arguments:
            return factory  # "module:attr" may name an instance
        raise ConfigurationError(f"{part.word} {name!r} is made already: it takes no {', '.join(arguments)}.")
    if isinstance(factory, part.interface):  # an instance that can be called, as rewards can
        return factory
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{part.word} {name!r}: {error}. Its signature is {inspect.signature(factory)}."
        ) from None
    except ValueError:
        pass  # made in C: it has no signature
    return factory(**arguments)


def _lacking(factory: Any) -> str:
    """The methods that a class has yet to define."""
    return ", ".join(sorted(factory.__abstractmethods__)) if inspect.isabstract(factory) else ""


def _interface(part: Kind) -> str:
    return _article(f"ai_trains_ai.{part.interface.__name__}")


def _article(word: str) -> str:
    return f"{'an' if word[0].lower() in 'aeio' else 'a'} {word}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _import(reference: str) -> Any:
    """What "module:attr" names. A module that isn't there is its `ModuleNotFoundError`."""
    module, _, attribute = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{reference!r}: {module!r} has no {attribute!r}.")
        found = getattr(found, part)
    return found
