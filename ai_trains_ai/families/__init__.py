"""Task families: generators of tasks and items, one file each.

`practice` makes public rows for environments that agents write; `hidden` holds the public rule that reserves one item
in eight for evaluation. Importing this package imports no family; `load` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from ai_trains_ai.errors import UnknownName

if TYPE_CHECKING:
    from ai_trains_ai.families.worked import WorkedFamily

__all__ = ["BUILT_IN", "load"]

BUILT_IN: Mapping[str, str] = {
    "chained-arithmetic": "ai_trains_ai.families.chained_arithmetic:ChainedArithmetic",
    "multi-hop": "ai_trains_ai.families.multi_hop:MultiHop",
    "triage": "ai_trains_ai.families.triage:Triage",
}
"""Name of each built-in family and where its class lives."""


def load(name: str) -> WorkedFamily:
    """A built-in family by name.

    Raises:
        UnknownName: no such family is built in.
    """
    if name not in BUILT_IN:
        raise UnknownName.of("task family", name, BUILT_IN)
    module, _, attribute = BUILT_IN[name].partition(":")
    family: WorkedFamily = getattr(import_module(module), attribute)()
    return family
