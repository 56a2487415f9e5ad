"""Writes the pages under docs/reference that are made from the code: ``python docs/make_reference.py``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from ai_trains_ai import events
from ai_trains_ai.plugins import hookspecs
from ai_trains_ai.plugins.handler import EventHandler
from ai_trains_ai.plugins.registry import KINDS

REFERENCE = Path(__file__).parent / "reference"
TITLES = {
    hookspecs.RegistrySpecs: "Registries",
    hookspecs.DecisionSpecs: "Decisions",
    hookspecs.ReviewSpecs: "Reviews",
    hookspecs.ObserverSpecs: "Observers",
}


def hooks_page() -> str:
    """The reference of hooks, from the specs."""
    return "\n\n".join(_hooks()) + "\n"


def _hooks() -> Iterator[str]:
    yield "<!-- Made by docs/make_reference.py from ai_trains_ai/plugins/hookspecs.py. Don't edit. -->"
    yield "# Hooks"
    yield _text(hookspecs)
    yield f"Namespace and entry-point group: `{hookspecs.GROUP}`. Mark a hook with `@ai_trains_ai.hookimpl`."
    yield f"`{_shown('register', hookspecs.Register.__call__)}`"
    yield _text(hookspecs.Register)
    for specs in hookspecs.SPECS:
        yield f"## {TITLES[specs]}"
        yield _text(specs)
        for name, hook in vars(specs).items():
            if not name.startswith("_"):
                yield f"### `{_shown(name, hook)}`"
                yield _text(hook)
    yield "## Kinds of parts"
    rows = [f"| `{kind}` | `{part.hook}` | `{part.interface.__name__}` |" for kind, part in KINDS.items()]
    yield "\n".join(["| kind | hook | interface |", "| --- | --- | --- |", *rows])
    yield "## Events"
    yield _text(events)
    yield "\n".join(_events())


def _events() -> Iterator[str]:
    yield "| event | fields besides `time` | when | method of `EventHandler` |"
    yield "| --- | --- | --- | --- |"
    for name, method in vars(EventHandler).items():
        if name.startswith("on_") and name != "on_event":
            kind = getattr(events, inspect.signature(method).parameters["event"].annotation.removeprefix("events."))
            fields = ", ".join(f"`{f}`" for f in inspect.signature(kind).parameters if f != "time")
            yield f"| `{kind.__name__}` | {fields} | {inspect.getdoc(method)} | `{name}` |"


def _shown(name: str, function: object) -> str:
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))  # type: ignore[arg-type]
    return name + signature.replace("self, ", "").replace("(self)", "()")


def _text(documented: object) -> str:
    """A docstring as Markdown."""
    text = inspect.getdoc(documented) or ""
    return re.sub(r"``([^`]+)``", r"`\1`", text)


if __name__ == "__main__":
    REFERENCE.mkdir(exist_ok=True)
    (REFERENCE / "hooks.md").write_text(hooks_page(), encoding="utf-8")
