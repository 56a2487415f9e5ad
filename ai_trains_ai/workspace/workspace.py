"""`Workspace`: the immutable mapping from path to bytes that the agent's file tools work on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import evolve, field, frozen

from ai_trains_ai.errors import WorkspaceError
from ai_trains_ai.workspace.names import check_path

MAX_FILES = 100
MAX_FILE_BYTES = 256 << 10
MAX_TOTAL_BYTES = 2 << 20
SUBMITTED = ("environment.py", "job.toml", "probes.jsonl")


def _frozen_mapping(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    return MappingProxyType(dict(files))


@frozen
class Workspace:
    """The agent's files. Every change gives a new workspace; nothing here touches the host's file system.

    Attributes:
        files: Content by path (`/` between parts).
        read_only: Paths that `write` and `edit` refuse.

    Raises:
        WorkspaceError: From every method, for a name, size or edit that isn't accepted. The message is for the agent.
    """

    files: Mapping[str, bytes] = field(factory=dict, converter=_frozen_mapping, repr=lambda files: str(sorted(files)))
    read_only: frozenset[str] = frozenset()

    def __attrs_post_init__(self) -> None:
        if len(self.files) > MAX_FILES:
            raise WorkspaceError(f"More than {MAX_FILES} files. Write into an existing file.")
        if sum(map(len, self.files.values())) > MAX_TOTAL_BYTES:
            raise WorkspaceError(f"The files are larger than {MAX_TOTAL_BYTES >> 20} MiB together.")
        folded: dict[str, str] = {}
        for path, data in self.files.items():
            check_path(path)
            if len(data) > MAX_FILE_BYTES:
                raise WorkspaceError(f"{path}: larger than {MAX_FILE_BYTES >> 10} KiB.")
            # Two names that differ in case are one file on macOS and Windows.
            if (other := folded.setdefault(path.lower(), path)) != path:
                raise WorkspaceError(f"{path}: differs from {other} only in case. Use one name.")
        for path in folded:
            parents = path.split("/")[:-1]
            if any("/".join(parents[:depth]) in folded for depth in range(1, len(parents) + 1)):
                raise WorkspaceError(f"{folded[path]}: a folder on the way has the name of a file.")

    def list_files(self) -> list[str]:
        """All paths, sorted."""
        return sorted(self.files)

    def read(self, path: str) -> str:
        """The text of a file; bytes that aren't UTF-8 come escaped."""
        return self._bytes(path).decode("utf-8", "backslashreplace")

    def write(self, path: str, text: str) -> Workspace:
        """Create or replace a file."""
        if check_path(path) in self.read_only:
            raise WorkspaceError(f"{path}: read-only.")
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise WorkspaceError(f"{path}: the text is not valid Unicode.") from None
        return evolve(self, files={**self.files, path: data})

    def edit(self, path: str, old: str, new: str) -> Workspace:
        """Replace the one place where ``old`` occurs."""
        text = self.read(path)
        count = text.count(old) if old else 0
        if count != 1:
            remedy = "Give more of the text around it." if count else "Copy the old text exactly."
            raise WorkspaceError(f"{path}: the old text occurs {count} times, not once. {remedy}")
        return self.write(path, text.replace(old, new))

    def merge(self, files: Mapping[str, bytes]) -> tuple[Workspace, tuple[str, ...]]:
        """Take over files that a sandboxed run changed; also the reasons for those that were refused."""
        merged, refused = self, []
        for path, data in files.items():
            try:
                if check_path(path) in self.read_only:
                    raise WorkspaceError(f"{path}: read-only.")
                merged = evolve(merged, files={**merged.files, path: data})
            except WorkspaceError as error:
                refused.append(str(error))
        return merged, tuple(refused)

    def submission(self) -> dict[str, bytes]:
        """The files that a submission is made of, those that exist."""
        return {path: self.files[path] for path in SUBMITTED if path in self.files}

    def _bytes(self, path: str) -> bytes:
        try:
            return self.files[check_path(path)]
        except KeyError:
            raise WorkspaceError(
                f"{path}: no such file. Files: {', '.join(self.list_files()[:20]) or 'none'}."
            ) from None
