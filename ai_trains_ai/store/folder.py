"""Paths inside a run folder, its writer lock and its secret seed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from ai_trains_ai.errors import RunFolderError, StorageError


def attempt_write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write ``path`` whole or not at all; a full or read-only disk is a `StorageError` that names the path."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise StorageError(f"Can't write {path}: {error.strerror}. Free space or choose another folder.") from error


@frozen
class RunFolder:
    """A run on disk. Creating the object touches nothing."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / "run.db"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def plugins(self) -> Path:
        return self.path / "plugins.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def artifacts(self) -> Path:
        return self.path / "artifacts"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def require(self) -> RunFolder:
        """Raise `RunFolderError` unless a run lives here."""
        if not self.path.exists():
            raise RunFolderError(f"There is no folder {self.path}. `ai-trains-ai demo --out {self.path}` starts a run.")
        if not self.database.is_file():
            raise RunFolderError(
                f"{self.path} is not a run folder: it has no run.db. Give the folder that a run printed."
            )
        return self

    def require_new(self) -> None:
        """Raise `RunFolderError` when a run lives here already, or a file stands where the folder should be."""
        if self.database.exists():
            raise RunFolderError(f"{self.path} already holds a run. Resume it, or choose another folder.")
        standing = next((path for path in (self.path, *self.path.parents) if path.exists()), None)
        if standing is not None and not standing.is_dir():
            raise RunFolderError(f"{standing} is a file. Choose another folder than {self.path}.")

    def create(self, config: Mapping[str, Any]) -> None:
        """Make the folder with its configuration and secret seed. Refuses a folder that already holds a run."""
        import tomli_w

        self.require_new()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"Can't create {self.path}: {error.strerror}. Choose another folder.") from error
        attempt_write(self.config, tomli_w.dumps(dict(config)).encode())
        # Chooses the hidden items. Never in the database, a log, a report or a card.
        attempt_write(self.path / "secret", secrets.token_bytes(32), mode=0o600)

    def read_config(self) -> dict[str, Any]:
        """The configuration that the run was started with."""
        try:
            return tomllib.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise RunFolderError(
                f"{self.config} can't be read: {error}. The run can't be resumed without it."
            ) from error

    def write_plugins(self, plugins: Sequence[Mapping[str, str]]) -> None:
        """Keep the plugins that the run goes on with."""
        attempt_write(self.plugins, json.dumps(list(plugins), indent=2).encode() + b"\n")

    def read_plugins(self) -> list[dict[str, str]]:
        """The plugins that the run last went on with; none for a run of before they were kept."""
        if not self.plugins.exists():
            return []
        try:
            plugins = json.loads(self.plugins.read_text(encoding="utf-8"))
            names = ("name", "source", "distribution", "version", "value")
            return [{name: str(plugin[name]) for name in names} for plugin in plugins]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunFolderError(
                f"{self.plugins}, which names the run's plugins, can't be read: {error!r}. Restore it."
            ) from error

    def secret(self) -> bytes:
        """The secret seed of the hidden sets."""
        try:
            return (self.path / "secret").read_bytes()
        except OSError as error:
            raise RunFolderError(f"{self.path / 'secret'} can't be read: {error.strerror}.") from error

    @contextlib.contextmanager
    def writer(self) -> Iterator[None]:
        """Hold the folder as its only writing process."""
        import fcntl

        try:
            lock = (self.path / "lock").open("w")
        except OSError as error:
            raise StorageError(f"Can't write to {self.path}: {error.strerror}. Choose another folder.") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunFolderError(f"Another process is running {self.path}. Stop it first, or watch it.") from None
            yield
        finally:
            lock.close()
