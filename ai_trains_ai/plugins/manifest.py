"""The plugin set of a run, kept beside it in ``plugins.json`` and compared when it is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ai_trains_ai.plugins.manager import PluginRecord


def manifest(records: Iterable[PluginRecord]) -> list[dict[str, str]]:
    """The loaded plugins as plain values."""
    return [
        {"name": r.name, "source": r.source, "distribution": r.distribution, "version": r.version, "value": r.value}
        for r in records
        if r.status == "loaded"
    ]


def differences(then: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]]) -> list[str]:
    """How the plugins of now differ from those of then, one sentence each; the library itself is left out."""
    before, after = _others(then), _others(now)
    changes = [f"{_label(before[name])} is missing" for name in before if name not in after]
    changes += [f"{_label(after[name])} is new" for name in after if name not in before]
    changes += [
        f"{_label(before[name])} is now {after[name].get('version') or 'of no version'}"
        for name in before
        if name in after and before[name].get("version") != after[name].get("version")
    ]
    return changes


def _others(plugins: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {
        (plugin["name"], plugin.get("distribution", "")): plugin for plugin in plugins if plugin["source"] != "built-in"
    }


def _label(plugin: Mapping[str, Any]) -> str:
    package = f"{plugin.get('distribution', '')} {plugin.get('version', '')}".strip()
    return f"{plugin['name']} ({package or 'passed by hand'})"
