"""The public rule that reserves items for hidden evaluation.

An item belongs to the hidden class when the SHA-256 of its key falls into one residue class in eight. Everybody may
know the rule: it says which items training must not see, not which of them a run's secret seed picks.
"""

from __future__ import annotations

import hashlib

CLASSES = 8


def reserved(key: str) -> bool:
    """Whether the item with this canonical key is reserved for evaluation."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % CLASSES == 0
