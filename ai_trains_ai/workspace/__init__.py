"""The files that the outer agent edits: a value, never a folder of the host."""

from ai_trains_ai.workspace.names import check_path
from ai_trains_ai.workspace.workspace import MAX_FILE_BYTES, MAX_FILES, MAX_TOTAL_BYTES, SUBMITTED, Workspace

__all__ = ["MAX_FILES", "MAX_FILE_BYTES", "MAX_TOTAL_BYTES", "SUBMITTED", "Workspace", "check_path"]
