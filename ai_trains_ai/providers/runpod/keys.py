"""The SSH key that opens the pods: the user's choice, or one of the library's own that is made once."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ai_trains_ai.errors import ConfigurationError, MissingDependency


def key_pair(private: str = "") -> tuple[Path, str]:
    """A private key file and the public key's line. Without ``private`` it is a key of this library's own, per user.

    Raises:
        ConfigurationError: the file can't be read, or can't be made.
    """
    ssh = _asyncssh()
    path = Path(private).expanduser() if private else _own()
    if not private and not path.exists():
        _make(path, ssh)
    try:
        line = ssh.read_private_key(path).export_public_key("openssh").decode().strip()
    except (OSError, ssh.KeyImportError, ssh.KeyEncryptionError) as error:
        raise ConfigurationError(f"The private key {str(path)!r} can't be used: {error}.") from None
    return path, line


def _own() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "ai-trains-ai" / "id_ed25519"


def _make(path: Path, ssh: Any) -> None:
    """Written beside its place and linked there: of two processes that make it at once, one wins and both use it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(ssh.generate_private_key("ssh-ed25519", comment="ai-trains-ai").export_private_key())
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    except OSError as error:
        raise ConfigurationError(f"A key for the pods can't be written to {path}: {error}. Pass ssh_key=.") from error
    finally:
        partial.unlink(missing_ok=True)


def _asyncssh() -> Any:
    try:
        import asyncssh
    except ImportError as error:
        raise MissingDependency.of("asyncssh", "runpod") from error
    return asyncssh
