"""From what a user writes (an instance, a class, a name, "module:attr", a `Spec`) to an implementation."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from ai_trains_ai.errors import AiTrainsAiError, ConfigurationError, MissingDependency, PluginError, UnknownName
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
from ai_trains_ai.plugins.checks import Fault, told
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

# kind and argument of parts that are parts themselves -> their kind
NESTED: Mapping[tuple[str, str], str] = {("job_runner", "provider"): "gpu_provider"}
_IMPORT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@frozen
class Spec:
    """A part by name, with its arguments: lazy and serialisable. `ata.job_runner("embedded")` makes one."""

    kind: str
    name: str
    arguments: Mapping[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName.of("kind of part", str(self.kind), KINDS)
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

    @property
    def owner(self) -> str:
        """What qualifies the name: the distribution, or the plugin that was passed by hand."""
        return self.distribution or self.plugin

    @property
    def origin(self) -> str:
        """Where it comes from, as messages have it; empty for a built-in."""
        if self.plugin == BUILT_IN:
            return ""
        return f" of plugin {self.plugin}" + (f" ({self.distribution})" if self.distribution else "")

    def load(self) -> Callable[..., Any]:
        """Import the factory."""
        return _import(self.factory) if isinstance(self.factory, str) else self.factory

    def explained(self, error: Exception, word: str) -> Exception:
        """The error that says whose part can't be made, and what to do; a built-in's own bug comes out as itself."""
        if self.plugin == BUILT_IN and not isinstance(error, ImportError):
            return error
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and self.plugin == BUILT_IN and self.extra:
            return MissingDependency.of(missing, self.extra)
        said = f"The {word} {self.name!r}{self.origin} can't be made: {told(error)}."
        if missing and self.extra and self.distribution:
            return MissingDependency(f"{said} Install what it needs: pip install '{self.distribution}[{self.extra}]'")
        return PluginError(f"{said} It is made by {self.factory!r}; its authors can mend it.")


class Registry:
    """The names of one experiment, from its plugins.

    A bare name means the built-in part of that name, else the one plugin that registers it. A name that several
    plugins register, or that is built in, is written as "distribution:name".

    Args:
        plugins: plugin objects that were passed by hand.
        strict: raise `PluginError` for any fault of any plugin.
        required: plugins (by their name or distribution) that must be loaded.
    """

    def __init__(
        self, plugins: Iterable[object] = (), *, strict: bool = False, required: Iterable[str] | None = ()
    ) -> None:
        if isinstance(plugins, str) or not isinstance(plugins, Iterable):
            raise ConfigurationError(f"plugins takes a list, not {plugins!r}. Write plugins=[…].")
        plugins = list(plugins)
        self.manager = PluginManager(plugins)
        self._entries: dict[str, dict[str, Entry]] = {}
        self._clashes: dict[tuple[str, str], list[Entry]] = {}
        if plugins:
            self._ask_all()  # what is wrong with them shows now, not when a part is wanted
        self.require(required, strict=strict)

    def require(self, required: Iterable[str] | None, *, strict: bool) -> None:
        """Raise `PluginError` unless these plugins loaded without a fault; when ``strict``, for any fault at all."""
        names = () if required is None else required
        if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
            raise ConfigurationError(f"required takes a list of plugin names, not {required!r}.")
        names = list(names)
        if names or strict:
            self._ask_all()
            self.manager.require(names, strict=strict)

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
        return Plugins(
            evolve(record, registered=(*names.get(record.name, ()), *record.registered)) for record in records
        )

    def parts(self, plugin: str) -> list[dict[str, Any]]:
        """What a plugin registers, as plain values: kind, name, summary, factory, extra."""
        return [
            {
                "kind": kind,
                "name": label,
                "summary": entry.summary,
                "factory": entry.factory if isinstance(entry.factory, str) else repr(entry.factory),
                "extra": entry.extra,
            }
            for kind in KINDS
            for label, entry in self.entries(kind).items()
            if entry.plugin == plugin
        ]

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
                fault = _entry_fault(KINDS[kind], name, factory, summary, extra)
                if fault is None and any(e.name == name and e.plugin == record.name for e in found):
                    fault = Fault(f"it registers the {KINDS[kind].word} {name!r} twice", "Leave one out")
                if fault is not None:
                    self.manager.blame(record.name, fault)
                    return
                found.append(Entry(name, factory, summary, record.name, record.distribution, extra))

            register.__qualname__ = "register"  # as a wrong call of it reads
            try:
                function(register=register)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if isinstance(error, PluginError) and record.source == "passed":
                    raise  # what `blame` says of a plugin that was passed by hand
                reason = f"its {KINDS[kind].hook} raised {told(error)}"
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
            qualified = f"{entry.owner}:{entry.name}"
            if qualified in named or entry.owner in [other.owner for other in others]:
                qualified = f"{entry.plugin}:{entry.name}"
            named[qualified] = entry
            if all(other.plugin != BUILT_IN for other in others):
                self._clashes.setdefault((kind, entry.name), []).append(entry)
            reason = (
                f"the {KINDS[kind].word} {entry.name!r} is registered by both {others[0].plugin!r} and {entry.plugin!r}"
            )
            passed = self.manager.records[entry.plugin].source == "passed"
            remedy = "Choose another name" if passed else f"Write {qualified!r}, or set {DISABLE}={entry.plugin}"
            self.manager.blame(entry.plugin, Fault(reason, remedy))
        return named

    def why(self, name: str) -> str:
        """What is known of a plugin, a distribution or a registered name, as text. Raises `UnknownName`."""
        plugins = [record for record in self.plugins if record.called(name) or f"command {name}" in record.registered]
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
            arguments = {k: self._argument(kind, k, v) for k, v in what.arguments.items()}
            return self._make_named(kind, what.name, arguments)
        if isinstance(what, str):
            return self._make_named(kind, what, {})
        if inspect.isclass(what):
            return _make(part, f"{part.word} {what.__name__}", what, {})
        if not isinstance(what, part.interface):
            raise ConfigurationError(
                f"{what!r} is no {part.word}: it is {_article(type(what).__name__)}, not {_interface(part)}. "
                f"Pass an instance, a class, 'module:attr', or one of: {', '.join(self.entries(kind)) or 'none'}."
            )
        return what

    def _argument(self, kind: str, name: str, value: Any) -> Any:
        """A part of a part: a spec, or whatever is given where a part is expected."""
        wanted = value.kind if isinstance(value, Spec) else NESTED.get((kind, name))
        return self._resolved(value) if wanted is None or value is None else self.resolve(wanted, value)

    def _resolved(self, value: Any) -> Any:
        """A value with the specs in its lists and mappings made."""
        if isinstance(value, Spec):
            return self.resolve(value.kind, value)
        if isinstance(value, list | tuple):
            return type(value)(map(self._resolved, value)) if type(value) in (list, tuple) else value
        if type(value) is dict:
            return {key: self._resolved(item) for key, item in value.items()}
        return value

    def _make_named(self, kind: str, name: str, arguments: Mapping[str, Any]) -> Any:
        part, entry = KINDS[kind], self._entry(kind, name)
        if entry is None:
            return _make(part, f"{part.word} {name!r}", self._imported(kind, name), arguments)
        what = f"{part.word} {name!r}{entry.origin}"
        try:
            factory = entry.load()
            return _make(part, what, factory, arguments)
        except AiTrainsAiError:
            raise
        except Exception as error:
            explained = entry.explained(error, part.word)
            if explained is error:
                raise
            raise explained from error

    def _imported(self, kind: str, reference: str) -> Any:
        """What a user's "module:attr" names; a module that isn't there may be a misspelt distribution."""
        known = ", ".join(self.entries(kind)) or "none"
        remedy = f"Registered as {KINDS[kind].word}: {known}."
        if not _IMPORT.fullmatch(reference):
            raise ConfigurationError(f"{reference!r} is no registered name, and no 'module:attribute'. {remedy}")
        try:
            return _import(reference)
        except Exception as error:
            module = reference.partition(":")[0]
            absent = isinstance(error, ModuleNotFoundError) and error.name is not None
            if absent and f"{module}.".startswith(f"{error.name}."):  # type: ignore[attr-defined]
                raise ConfigurationError(
                    f"{reference!r}: there is no module {module!r}, and no plugin of that name. {remedy}"
                ) from error
            raise ConfigurationError(f"{reference!r} can't be imported: {told(error)}.") from error

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
        theirs = {
            label: entry
            for label, entry in entries.items()
            if self.manager.records[entry.plugin].called(owner) or owner == entry.owner
        }
        meant = [label for label, entry in theirs.items() if entry.name == bare]
        if len(meant) > 1:
            raise PluginError(f"The {word} {name!r} may be {' or '.join(map(repr, meant))}. Write one of them.")
        if meant:
            return theirs[meant[0]]
        if any(record.called(owner) for record in self.manager.records.values()) and not _is_module(owner):
            known = [entry.name for entry in theirs.values()]
            raise UnknownName.of(f"{word} of {owner}", bare, known, self._absent())
        return None

    def _absent(self) -> str:
        """What may explain that a name isn't there."""
        absent = [record.name for record in self.manager.records.values() if record.status != "loaded"]
        if not absent:
            return ""
        return f"Not loaded: {', '.join(absent)} (`ai-trains-ai plugins --why {absent[0]}` says why)."


def _entry_fault(part: Kind, name: Any, factory: Any, summary: Any, extra: Any) -> Fault | None:
    """What is wrong with a registration, as far as it shows without importing anything."""
    where = f"it registers the {part.word} {name!r}"
    if not isinstance(name, str) or not name.isprintable() or not name or {":", " "} & set(name):
        return Fault(f"{where}, which is no name", "A name is a text without colons and blanks")
    if not isinstance(summary, str) or not isinstance(extra, str | None):
        return Fault(f"{where} with summary={summary!r}, extra={extra!r}", "Both are texts; extra may be left out")
    if isinstance(factory, str):
        if _IMPORT.fullmatch(factory):
            return None
        return Fault(f"{where} with the import string {factory!r}", "Write 'package.module:attribute'")
    if isinstance(factory, part.interface):
        return Fault(f"{where} with an instance", "Give the class, or a function that makes one")
    if not callable(factory):
        return Fault(f"{where} with {factory!r}, which can't be called", "Give a class, a function or 'module:attr'")
    if inspect.iscoroutinefunction(factory) or inspect.iscoroutinefunction(getattr(factory, "__call__", None)):  # noqa: B004
        return Fault(f"{where} with an asynchronous factory", "Make it a plain function; parts have an async start()")
    if inspect.isclass(factory) and not issubclass(factory, part.interface):
        return Fault(f"{where} with {factory.__name__}, which is no {part.interface.__name__}", "Subclass it")
    if lacking := _lacking(factory):
        return Fault(f"{where} with {factory.__name__}, which lacks {lacking}", "Define it")
    return None


def _check_arguments(what: str, factory: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` when a factory doesn't take these arguments."""
    if not callable(factory):
        if arguments:
            raise ConfigurationError(f"{what} is made already: it takes no {', '.join(arguments)}.")
        return
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return  # made in C: it has no signature
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigurationError(f"{what}: {error}. Its signature is {signature}.") from None


def _make(part: Kind, what: str, factory: Any, arguments: Mapping[str, Any]) -> Any:
    """An instance from a class, a function that makes one, or the instance itself."""
    if isinstance(factory, part.interface) and not arguments:
        return factory
    if inspect.isclass(factory) and not issubclass(factory, part.interface):
        raise ConfigurationError(f"{what}: the class {factory.__name__} is not {_interface(part)}.")
    if lacking := _lacking(factory):
        raise ConfigurationError(f"{what}: the class lacks {lacking}. See {_interface(part)}.")
    _check_arguments(what, factory, arguments)
    made = factory(**arguments) if callable(factory) else factory
    if inspect.iscoroutine(made):
        made.close()
        raise ConfigurationError(f"{what} has an asynchronous factory. Make it a plain function.")
    if not isinstance(made, part.interface):
        raise ConfigurationError(f"{what} gave {made!r}: {_article(type(made).__name__)}, not {_interface(part)}.")
    return made


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
    except Exception:  # a parent package that fails at import
        return False


def _import(reference: str) -> Any:
    """What "module:attr" names. Raises what the import does, or `AttributeError`."""
    module, _, attribute = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise AttributeError(f"{module!r} has no {attribute!r}")
        found = getattr(found, part)
    return found
