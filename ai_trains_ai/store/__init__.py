"""The run folder: one SQLite database that is the truth, and files beside it. One process writes."""

from __future__ import annotations

from ai_trains_ai.store.folder import RunFolder, attempt_write
from ai_trains_ai.store.store import Store

__all__ = ["RunFolder", "Store", "attempt_write"]
