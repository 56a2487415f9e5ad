"""The isolating loader: finds plugins, checks them one by one, and keeps a record of each.

A plugin that is installed and broken is left out with its reason; the others load. A plugin that was passed by hand and
is broken is an error at once: whoever passed it is there to mend it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import metadata
from types import ModuleType
from typing import Any, Literal, overload

import pluggy
from attrs import asdict, evolve, field, frozen

import ai_trains_ai
from ai_trains_ai.errors import PluginError, UnknownName
from ai_trains_ai.plugins import builtin
from ai_trains_ai.plugins.checks import Fault, fault_of
from ai_trains_ai.plugins.hookspecs import GROUP, SPECS

logger = logging.getLogger(__name__)

ALLOW, DISABLE = "AI_TRAINS_AI_PLUGINS", "AI_TRAINS_AI_DISABLE_PLUGINS"
BUILT_IN, DISTRIBUTION = "builtin", "ai-trains-ai"


@frozen
class PluginRecord:
    """One plugin: where it came from, whether it is in use, and what is wrong with it.

    ``distribution`` and ``version`` are of the package that it was installed with; ``value`` is what its entry point
    names. ``registered`` are names of parts as "kind name". ``faults`` of a loaded plugin concern single names.
    """

    name: str
    source: Literal["built-in", "installed", "passed"]
    distribution: str = ""
    version: str = ""
    value: str = ""
    status: Literal["loaded", "disabled", "failed"] = "loaded"
    hooks: tuple[str, ...] = ()
    registered: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = field(default=())

    @property
    def label(self) -> str:
        """Name, distribution and version, as messages have it."""
        return f"{self.name} ({self.distribution} {self.version})" if self.distribution else self.name

    def data(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    def text(self) -> str:
        """Everything about the plugin, a line each."""
        lines = [f"plugin {self.label}: {self.status}", f"  source: {self.source} {self.value}".rstrip()]
        if self.hooks:
            lines.append(f"  hooks: {', '.join(self.hooks)}")
        if self.registered:
            lines.append(f"  registers: {', '.join(self.registered)}")
        for fault in self.faults:
            lines.append(f"  {'reason' if self.status != 'loaded' else 'fault'}: {fault.reason}")
            lines += [f"  remedy: {fault.remedy}"] if fault.remedy else []
        return "\n".join(lines)

    def called(self, name: str) -> bool:
        """Whether a user means this plugin by ``name``: its own name, or its distribution's."""
        return _normal(name) in {_normal(self.name), _normal(self.distribution)} - {""}


class Plugins(Sequence[PluginRecord]):
    """The plugins of an experiment. A table in a notebook and in a terminal."""

    def __init__(self, records: Iterable[PluginRecord]) -> None:
        self._records = tuple(records)

    @overload
    def __getitem__(self, index: int) -> PluginRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PluginRecord]: ...
    def __getitem__(self, index: int | slice) -> PluginRecord | Sequence[PluginRecord]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def find(self, name: str) -> PluginRecord:
        """The plugin of this name or distribution. Raises `UnknownName`."""
        for record in self._records:
            if record.called(name):
                return record
        raise UnknownName.of("plugin", name, [record.name for record in self._records])

    def rows(self) -> list[tuple[str, ...]]:
        """One row of texts a plugin: name, distribution, status, what it does or what is wrong with it."""
        return [
            (
                record.name,
                f"{record.distribution} {record.version}".strip() or "(passed by hand)",
                record.status,
                ", ".join(record.registered or record.hooks),
                " ".join(map(str, record.faults)),
            )
            for record in self._records
        ]

    def __repr__(self) -> str:
        return "\n".join(" | ".join(filter(None, row)) for row in self.rows())

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("plugin", "distribution", "status", "registers", "faults"))
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.rows())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class PluginManager:
    """The plugins of one experiment: built-ins, then the installed ones by name, then those passed by hand.

    Args:
        plugins: plugin objects (instances or modules). A fault in one is a `PluginError`.
        environment: where the allow-list ``AI_TRAINS_AI_PLUGINS`` (empty: none) and ``AI_TRAINS_AI_DISABLE_PLUGINS``
            are read: names of plugins or distributions, separated by commas. They concern installed plugins.
    """

    def __init__(self, plugins: Iterable[object] = (), *, environment: Mapping[str, str] = os.environ) -> None:
        self._pluggy = pluggy.PluginManager(GROUP)
        for specs in SPECS:
            self._pluggy.add_hookspecs(specs)
        self._objects: dict[str, object] = {}
        self.records: dict[str, PluginRecord] = {}
        own = PluginRecord(BUILT_IN, "built-in", DISTRIBUTION, ai_trains_ai.__version__)
        self._add(own, builtin)
        self._load_installed(environment)
        for plugin in plugins:
            self._pass(plugin)

    # ------------------------------------------------------------------------------------------ loading

    def _load_installed(self, environment: Mapping[str, str]) -> None:
        allowed = None if ALLOW not in environment else _names(environment[ALLOW])
        disabled = _names(environment.get(DISABLE, ""))
        for point in installed():
            distribution = point.dist.name if point.dist else ""
            version = point.dist.version if point.dist else ""
            name = point.name if point.name not in self.records else f"{distribution}.{point.name}"
            record = PluginRecord(name, "installed", distribution, version, point.value)
            names = {_normal(point.name), _normal(name), _normal(distribution)}
            if names & disabled:
                self._leave_out(record, "disabled", Fault(f"listed in {DISABLE}", "Take it out of there to use it"))
            elif allowed is not None and not names & allowed:
                self._leave_out(record, "disabled", Fault(f"not listed in {ALLOW}", "Add it there to use it"))
            else:
                self._load(record, point)
        unknown = [name for name in sorted((allowed or set()) | disabled) if not self._known(name)]
        for name in unknown:
            logger.warning(
                "%s or %s names %r, which is no installed plugin. Installed: %s.", ALLOW, DISABLE, name, self._listed()
            )

    def _load(self, record: PluginRecord, point: metadata.EntryPoint) -> None:
        try:
            plugin = point.load()
        except (Exception, SystemExit) as error:  # whatever a stranger's module does at import
            reason = f"importing {point.value} raised {type(error).__name__}: {_line(error)}"
            remedy = f"Repair or update {record.distribution or record.name}, or set {DISABLE}={record.name}"
            missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
            self._leave_out(record, "failed", Fault(reason, f"Install {missing}" if missing else remedy))
            return
        fault = fault_of(plugin) or self._add(record, plugin)
        if fault is not None:
            self._leave_out(record, "failed", fault)

    def _pass(self, plugin: object) -> None:
        if any(plugin is known for known in self._objects.values()):
            return  # installed and passed, or passed twice: it is there
        name = plugin.__name__ if isinstance(plugin, ModuleType | type) else type(plugin).__name__
        while name in self.records:
            stem, _, number = name.rpartition("#")
            name = f"{stem}#{int(number) + 1}" if stem else f"{name}#2"
        record = PluginRecord(name, "passed", value=f"{type(plugin).__module__}:{type(plugin).__qualname__}")
        fault = fault_of(plugin) or self._add(record, plugin)
        if fault is not None:
            raise PluginError(f"Plugin {name}: {fault}")

    def _add(self, record: PluginRecord, plugin: object) -> Fault | None:
        try:
            self._pluggy.register(plugin, record.name)
        except Exception as error:
            # pluggy keeps a plugin that it refused half-way
            self._pluggy.unregister(name=record.name) if self._pluggy.has_plugin(record.name) else None
            return Fault(f"pluggy refuses it: {_line(error)}")
        hooks = tuple(caller.name for caller in self._pluggy.get_hookcallers(plugin) or ())
        self._objects[record.name] = plugin
        self.records[record.name] = evolve(record, hooks=tuple(sorted(hooks)))
        return None

    def _leave_out(self, record: PluginRecord, status: Literal["disabled", "failed"], fault: Fault) -> None:
        self.records[record.name] = evolve(record, status=status, faults=(fault,))
        if status == "failed":
            logger.warning("Plugin %s is left out: %s", record.label, fault)

    def _known(self, name: str) -> bool:
        return any(record.called(name) for record in self.records.values() if record.source == "installed")

    def _listed(self) -> str:
        return ", ".join(r.name for r in self.records.values() if r.source == "installed") or "none"

    # ------------------------------------------------------------------------------------------ calling

    def implementations(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """Plugin name and function of each implementation, in the order of registration.

        The functions take all arguments of the hook by name and pass on those that the plugin asked for.
        """
        found = []
        for implementation in getattr(self._pluggy.hook, hook).get_hookimpls():
            found.append((implementation.plugin_name, _asking(implementation.function, implementation.argnames)))
        return found

    def blame(self, name: str, fault: Fault) -> None:
        """Note what is wrong with one thing that a loaded plugin does. Of a plugin passed by hand it is an error."""
        record = self.records[name]
        if record.source == "passed":
            raise PluginError(f"Plugin {name}: {fault}")
        if fault not in record.faults:
            self.records[name] = evolve(record, faults=(*record.faults, fault))
            logger.warning("Plugin %s: %s", record.label, fault)

    def require(self, names: Iterable[str], *, strict: bool) -> None:
        """Raise `PluginError` unless every plugin of ``names`` is loaded; when ``strict``, for any fault at all."""
        for name in names:
            records = [record for record in self.records.values() if record.called(name)]
            if any(record.status == "loaded" for record in records):
                continue
            if not records:
                error = UnknownName.of("plugin", name, [r.name for r in self.records.values()])
                raise PluginError(f"Plugin {name!r} is required. {error}")
            raise PluginError(f"Plugin {records[0].label} is required, but {records[0].status}: {records[0].faults[0]}")
        faulty = [r for r in self.records.values() if r.faults and r.status != "disabled"]
        if strict and faulty:
            found = "\n".join(f"  {record.label}: {fault}" for record in faulty for fault in record.faults)
            raise PluginError(f"Plugins have faults, and strict=True allows none:\n{found}")


def installed() -> list[metadata.EntryPoint]:
    """The entry points of all installed plugins, by name; nothing is imported."""
    points = metadata.entry_points(group=GROUP)
    return sorted(points, key=lambda point: (point.name, point.dist.name if point.dist else ""))


def _asking(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return function(**{name: arguments[name] for name in names})

    return call


def _names(text: str) -> set[str]:
    return {_normal(name) for name in text.split(",") if name.strip()}


def _normal(name: str) -> str:
    """Names of distributions are equal up to case and runs of ``-_.``."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or repr(error)
