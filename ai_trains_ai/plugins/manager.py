"""The isolating loader: finds plugins, checks them one by one, and keeps a record of each.

A plugin that is installed and broken is left out with its reason; the others load. A plugin that was passed by hand and
is broken is an error at once: whoever passed it is there to mend it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from importlib import metadata
from types import ModuleType
from typing import Any, Literal, overload

import pluggy
from attrs import asdict, evolve, frozen

import ai_trains_ai
from ai_trains_ai.errors import PluginError, UnknownName
from ai_trains_ai.plugins import builtin
from ai_trains_ai.plugins.checks import Fault, fault_of, implementations, told
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
    faults: tuple[Fault, ...] = ()

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
        fault = self._add(own, builtin)
        if fault is not None:
            raise PluginError(f"The built-in parts can't be registered: {fault}")
        self._load_installed(environment)
        for plugin in plugins:
            self._pass(plugin)

    # ------------------------------------------------------------------------------------------ loading

    def _load_installed(self, environment: Mapping[str, str]) -> None:
        allowed = None if ALLOW not in environment else _names(environment[ALLOW])
        disabled = _names(environment.get(DISABLE, ""))
        for record, point in installed():
            names = {_normal(record.name), _normal(record.distribution)}
            record = evolve(record, name=self._free_name(record))
            if names & disabled:
                self._leave_out(record, "disabled", Fault(f"listed in {DISABLE}", "Take it out of there to use it"))
            elif allowed is not None and not names & allowed:
                self._leave_out(record, "disabled", Fault(f"not listed in {ALLOW}", "Add it there to use it"))
            elif record.faults:
                self._leave_out(record, "failed", record.faults[0])
            else:
                self._load(record, point)
        for variable, names in ((ALLOW, allowed or set()), (DISABLE, disabled)):
            for name in sorted(names):
                if not any(r.called(name) for r in self.records.values() if r.source == "installed"):
                    logger.warning(
                        "%s names %r, which is no installed plugin. Installed: %s. Separate names by commas.",
                        variable, name, self._listed(),
                    )  # fmt: skip

    def _free_name(self, record: PluginRecord) -> str:
        """The plugin's name, told apart from one of the same name that is there already."""
        name, number = record.name, 2
        if name in self.records and record.distribution:
            name = f"{record.distribution}.{record.name}"
        stem = name
        while name in self.records:
            name, number = f"{stem}#{number}", number + 1
        return name

    def _load(self, record: PluginRecord, point: metadata.EntryPoint) -> None:
        remedy = f"Repair or update {record.distribution or record.name}, or set {DISABLE}={record.name}"
        try:
            plugin = point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a stranger's module does at import
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            fault = Fault(f"importing {point.value} raised {told(error)}", f"Install {missing}" if missing else remedy)
            self._leave_out(record, "failed", fault)
            return
        fault_found = self._add(record, plugin, remedy)
        if fault_found is not None:
            self._leave_out(record, "failed", fault_found)

    def _pass(self, plugin: object) -> None:
        if any(plugin is known for known in self._objects.values()):
            return  # installed and passed, or passed twice: it is there
        name = plugin.__name__ if isinstance(plugin, ModuleType | type) else type(plugin).__name__
        record = PluginRecord(name, "passed", value=f"{type(plugin).__module__}:{type(plugin).__qualname__}")
        record = evolve(record, name=self._free_name(record))
        fault = self._add(record, plugin)
        if fault is not None:
            raise PluginError(f"Plugin {record.name}: {fault}")

    def _add(self, record: PluginRecord, plugin: object, remedy: str = "") -> Fault | None:
        """Check and register a plugin."""
        same = next((name for name, known in self._objects.items() if known is plugin), None)
        if same is not None:
            return Fault(f"it is the same object as plugin {same!r}", "Leave one of the two entry points out")
        try:
            fault = fault_of(plugin)
            if fault is None:
                hooks = _Hooks()
                # pluggy compares plugins and looks at every attribute of theirs; it gets the bare hooks instead
                for name, function in implementations(plugin).items():
                    setattr(hooks, name, function)
                self._pluggy.register(hooks, record.name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return Fault(f"looking at it raised {told(error)}", remedy)
        if fault is None:
            callers = self._pluggy.get_hookcallers(hooks) or ()
            self._objects[record.name] = plugin
            self.records[record.name] = evolve(record, hooks=tuple(sorted(caller.name for caller in callers)))
        return fault

    def _leave_out(self, record: PluginRecord, status: Literal["disabled", "failed"], fault: Fault) -> None:
        self.records[record.name] = evolve(record, status=status, faults=(fault,))
        if status == "failed":
            logger.warning("Plugin %s is left out: %s", record.label, fault)

    def _listed(self) -> str:
        return ", ".join(r.name for r in self.records.values() if r.source == "installed") or "none"

    # ------------------------------------------------------------------------------------------ calling

    def implementations(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """Plugin name and function of each implementation, in the order in which plugins were added (``tryfirst`` and
        ``trylast`` apart).

        The functions take all arguments of the hook by name and pass on those that the plugin asked for.
        """
        return [(found.plugin_name, _asking(found)) for found in getattr(self._pluggy.hook, hook).get_hookimpls()]

    def note(self, name: str, registered: str) -> None:
        """Add to what a plugin registers, as listings show it."""
        record = self.records[name]
        self.records[name] = evolve(record, registered=(*record.registered, registered))

    def blame(self, name: str, fault: Fault) -> None:
        """Note what is wrong with one thing that a loaded plugin does. Of a plugin passed by hand it is an error."""
        record = self.records[name]
        if record.source == "passed":
            raise PluginError(f"Plugin {name}: {fault}")
        if fault not in record.faults:
            self.records[name] = evolve(record, faults=(*record.faults, fault))
            logger.warning("Plugin %s: %s", record.label, fault)

    def require(self, names: Iterable[str], *, strict: bool) -> None:
        """Raise `PluginError` unless every plugin of ``names`` is loaded without a fault; when ``strict``, for any."""
        for name in names:
            records = [record for record in self.records.values() if record.called(name)]
            if not records:
                error = UnknownName.of("plugin", name, [r.name for r in self.records.values()])
                raise PluginError(f"Plugin {name!r} is required. {error}")
            for record in records:
                if record.status != "loaded":
                    raise PluginError(f"Plugin {record.label} is required, but {record.status}: {record.faults[0]}")
                if record.faults:
                    raise PluginError(f"Plugin {record.label} is required, but has a fault: {record.faults[0]}")
        faulty = [r for r in self.records.values() if r.faults and r.status != "disabled"]
        if strict and faulty:
            found = "\n".join(f"  {record.label}: {fault}" for record in faulty for fault in record.faults)
            raise PluginError(f"Plugins have faults, and strict=True allows none:\n{found}")


class _Hooks:
    """What pluggy holds of a plugin: its hook functions, equal to nothing else."""


def installed() -> list[tuple[PluginRecord, metadata.EntryPoint]]:
    """The plugins that are installed, by name, each with its entry point; nothing is imported.

    A distribution whose metadata can't be read is a plugin with a fault.
    """
    found: list[tuple[PluginRecord, metadata.EntryPoint]] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        text = _quietly(partial(distribution.read_text, "entry_points.txt")) or ""
        if f"[{GROUP}]" not in text:
            continue
        described = _quietly(partial(getattr, distribution, "metadata"))
        name = str(described["Name"] or "") if described else ""
        if not name:
            path = getattr(distribution, "_path", None)
            name = str(path.name).partition("-")[0] if path is not None else "unknown"
        if _normal(name) in seen:
            continue  # shadowed by one earlier on the path
        seen.add(_normal(name))
        version = str(described["Version"] or "") if described else ""
        points = _quietly(partial(_points, distribution))
        if points is None:
            points = [metadata.EntryPoint(name, "", GROUP)]
        for point in points:
            fault = None if point.pattern.match(point.value) else _no_entry_point(point.value, name)
            faults = () if fault is None else (fault,)
            found.append((PluginRecord(point.name, "installed", name, version, point.value, faults=faults), point))
    return sorted(found, key=lambda pair: (pair[0].name, pair[0].distribution))


def _no_entry_point(value: str, distribution: str) -> Fault:
    what = f"its entry point {value!r} is no 'module' or 'module:attribute'" if value else "its metadata can't be read"
    return Fault(what, f"Install {distribution} again, or repair it")


def _points(distribution: metadata.Distribution) -> list[metadata.EntryPoint]:
    return list(distribution.entry_points.select(group=GROUP))


def _quietly(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:
        return None


def _asking(found: Any) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return found.function(**{name: arguments[name] for name in found.argnames})

    return call


def _names(text: str) -> set[str]:
    return {_normal(name) for name in text.split(",") if name.strip()}


def _normal(name: str) -> str:
    """Names of distributions are equal up to case and runs of ``-_.``."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
