"""Signatures of the interfaces, the hooks and the public constructors are pinned, so that a change is deliberate.

Plugins and research code outside of this repository are written against them. When a change is meant:
``python tests/test_signatures.py > tests/signatures.txt``, and say why in ``docs/architecture.md``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import ai_trains_ai as ata
from ai_trains_ai import interfaces
from ai_trains_ai.plugins import hookspecs
from ai_trains_ai.plugins.checks import HOOKS
from ai_trains_ai.plugins.hookspecs import SPECS

PINNED = Path(__file__).parent / "signatures.txt"
PARTS = (
    interfaces.Policy,
    interfaces.OuterPolicy,
    interfaces.OuterTrainer,
    interfaces.ServedModel,
    interfaces.InnerJobRunner,
    interfaces.Transport,
    interfaces.GPUProvider,
    interfaces.RewardFn,
    interfaces.IntegrityCheck,
    interfaces.TaskFamily,
    interfaces.Sandbox,
    interfaces.Tracker,
)


def methods(kind: type) -> Iterator[tuple[str, object]]:
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and (not name.startswith("_") or name == "__call__"):
            yield name, value


def shown(function: object) -> str:
    """A signature with its annotations as written."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))  # type: ignore[arg-type]


def signatures() -> Iterator[str]:
    for part in PARTS:
        for name, method in methods(part):
            keyword = "async def" if inspect.iscoroutinefunction(method) else "def"
            abstract = "" if name in part.__abstractmethods__ else "  # has a default"
            yield f"{part.__name__}: {keyword} {name}{shown(method)}{abstract}"
    for specs in SPECS:
        for name, hook in methods(specs):
            first = "  # the first result counts" if hook.ai_trains_ai_spec["firstresult"] else ""
            yield f"hook: {name}{shown(hook)}{first}"
    yield f"register{shown(hookspecs.Register.__call__)}"
    for name in (
        "outer_trainer",
        "job_runner",
        "gpu_provider",
        "reward",
        "task_family",
        "tracker",
        "integrity_check",
        "resume",
        "open_run",
    ):
        yield f"ata.{name}{shown(getattr(ata, name))}"
    for name in ("Experiment", "validate", "run_job", "evaluate"):
        yield f"ata.{name}({', '.join(inspect.signature(getattr(ata, name)).parameters)})"


def test_signatures_are_pinned() -> None:
    assert list(signatures()) == PINNED.read_text(encoding="utf-8").splitlines(), __doc__


def test_every_method_says_what_it_promises() -> None:
    for part in PARTS:
        assert inspect.getdoc(part), part
        for name, method in methods(part):
            assert method.__doc__, f"{part.__name__}.{name}"


def test_every_hook_is_documented() -> None:
    for specs in SPECS:
        assert specs.__doc__
        assert all(getattr(specs, name).__doc__ for name in vars(specs) if name in HOOKS)


if __name__ == "__main__":
    print("\n".join(signatures()))
