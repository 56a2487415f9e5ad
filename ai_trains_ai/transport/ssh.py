"""Commands and files on a host over SSH, with asyncssh.

One connection carries every call; a broken one is made anew, with back-off. The user's own SSH set-up is not read.
Commands run in the remote user's shell, so arguments are quoted for it; the host needs sh, tar, find and sha256sum.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import shlex
import signal
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from ai_trains_ai.errors import ConfigurationError, MissingDependency, Transient, TransportError
from ai_trains_ai.interfaces import Transport

if TYPE_CHECKING:
    import asyncssh

logger = logging.getLogger(__name__)

MISSING = 44  # exit status of our own commands for a file that isn't there
DEADLINE = 120.0  # seconds of a call that only reads or writes a few files
SLOWEST = 256 << 10  # bytes a second of a connection that is still waited for


@frozen
class Host:
    """Where to connect, and as whom. ``key`` is a private key file; ``known_host`` the line of the host's public key.

    Without ``known_host`` the first key that the host shows is taken and held on to.
    """

    address: str
    port: int = 22
    user: str = "root"
    key: str = field(default="", repr=False)
    known_host: str = ""


@frozen
class Patience:
    """How long to try. Seconds.

    ``connect`` is one attempt; ``total`` all of them, with pauses that double from ``pause``; a host that is silent for
    ``keepalive`` times three is lost.
    """

    connect: float = 15.0
    total: float = 60.0
    pause: float = 0.5
    keepalive: float = 15.0


class SSHTransport(Transport):
    """One host. Connects on first use.

    Args:
        host: where it is.
        patience: how long to try.
        locate: asked for where it is now, when it isn't where it was; raises `Transient` when it is nowhere.
    """

    def __init__(
        self,
        host: Host,
        patience: Patience = Patience(),
        locate: Callable[[], Awaitable[Host]] | None = None,
    ) -> None:
        self._host, self._patience, self._locate = host, patience, locate
        self._connection: asyncssh.SSHClientConnection | None = None
        self._connecting = asyncio.Lock()
        self._seen_key: bytes = b""
        self._closed = False

    # ------------------------------------------------------------------------------------------ commands

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> tuple[int | None, bytes]:
        # waited for from outside: a cancellation that comes as the channel opens can get lost inside
        work = asyncio.ensure_future(self._perform(shlex.join(argv), stdin))
        work.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left to ask
        try:
            await asyncio.wait({work}, timeout=timeout)
        finally:
            work.cancel()
        return work.result() if work.done() else (None, b"")

    async def _perform(self, command: str, stdin: bytes) -> tuple[int | None, bytes]:
        ssh = _asyncssh()
        process = None
        try:
            process = await self._open(command)
            if not stdin:
                process.stdin.write_eof()  # asyncssh does so only after some input
            output, _ = await process.communicate(stdin or None)
            return _status(process), output
        except asyncio.CancelledError:
            if process is not None:
                process.kill()
            raise
        except (TimeoutError, OSError, ssh.Error):
            return None, b""  # lost; it may have been started
        finally:
            if process is not None:
                process.close()

    async def _open(self, command: str) -> Any:
        """A started command. A connection that turns out to be broken before it could start anything is made anew."""
        ssh = _asyncssh()
        while True:
            connection = await self._connect()
            try:
                # not wait_for: before Python 3.12 it can swallow a cancellation that comes as the channel opens
                async with asyncio.timeout(self._patience.connect):
                    return await connection.create_process(command, encoding=None, stderr=ssh.STDOUT)
            except ssh.ChannelOpenError:
                if not connection.is_closed():
                    raise Transient(f"{self._name} opens no further channel.") from None
            except (TimeoutError, OSError, ssh.Error):
                self._drop(connection)
                raise

    async def put(self, files: Mapping[str, bytes], folder: str) -> None:
        # unpacked beside their places, then moved there one by one: a reader sees the old file or the new one
        script = (
            'set -e; mkdir -p "$1"; t=$(mktemp -d "$1/.put.XXXXXX"); trap \'rm -rf "$t"\' EXIT; '
            'tar -xf - -C "$t"; cd "$t"; '
            'find . -mindepth 1 -type d -exec mkdir -p "$1/{}" \\; ; find . -type f -exec mv -f {} "$1/{}" \\;'
        )
        archive = _tar(files)
        status, output = await self.run(
            ["sh", "-c", script, "put", folder], stdin=archive, timeout=_patience_for(len(archive))
        )
        if status is None:
            raise Transient(f"{self._name}: the connection was lost while files were written to {folder}.")
        if status != 0:
            raise TransportError(f"{self._name}: can't write to {folder}: {_said(output)}.")

    async def get(self, path: str, limit: int) -> bytes:
        script = f'[ -f "$1" ] || exit {MISSING}; sha256sum <"$1" && head -c "$2" "$1"'
        status, output = await self.run(["sh", "-c", script, "get", path, str(limit + 1)], timeout=_patience_for(limit))
        if status is None:
            raise Transient(f"{self._name}: the connection was lost while {path} was read.")
        if status == MISSING:
            raise TransportError(f"{self._name}: there is no file {path}.")
        if status != 0:
            raise TransportError(f"{self._name}: {path} can't be read: {_said(output)}.")
        digest, _, data = output.partition(b"\n")
        if len(data) > limit:
            raise TransportError(f"{self._name}: {path} is larger than {limit} bytes.")
        if hashlib.sha256(data).hexdigest().encode() != digest.split()[0]:
            raise Transient(f"{self._name}: {path} changed while it was read.")
        return data

    async def tail(self, path: str, offset: int, limit: int = 1 << 20) -> bytes:
        script = f'[ -f "$1" ] || exit {MISSING}; tail -c "+$2" "$1" | head -c "$3"'
        status, output = await self.run(
            ["sh", "-c", script, "tail", path, str(offset + 1), str(limit)], timeout=DEADLINE
        )
        if status is None:
            raise Transient(f"{self._name}: the connection was lost while {path} was followed.")
        if status not in (0, MISSING):
            raise TransportError(f"{self._name}: {path} can't be read: {_said(output)}.")
        return output if status == 0 else b""

    @contextlib.asynccontextmanager
    async def forward(self, port: int) -> AsyncIterator[int]:
        connection = await self._connect()
        try:
            listener = await connection.forward_local_port("127.0.0.1", 0, "127.0.0.1", port)
        except (OSError, _asyncssh().Error) as error:
            raise Transient(f"{self._name}: port {port} can't be forwarded ({error}).") from error
        try:
            yield listener.get_port()
        finally:
            listener.close()

    async def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience.connect):
                    await self._connection.wait_closed()
            self._connection = None

    # ------------------------------------------------------------------------------------------ the connection

    @property
    def _name(self) -> str:
        return f"{self._host.user}@{self._host.address}:{self._host.port}"

    async def _connect(self) -> asyncssh.SSHClientConnection:
        """The connection, made anew when it was lost. Raises `Transient` when patience is at its end."""
        async with self._connecting:
            if self._closed:
                raise TransportError(f"{self._name}: this transport is closed.")
            if self._connection is not None and not self._connection.is_closed():
                return self._connection
            loop = asyncio.get_running_loop()
            give_up, pause = loop.time() + self._patience.total, self._patience.pause
            while True:
                try:
                    self._connection = await self._attempt()
                    return self._connection
                except Transient as error:
                    if loop.time() + pause > give_up:
                        raise
                    logger.debug("%s: %s; again in %.1f s", self._name, error, pause)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 10.0)
                    if self._locate is not None:
                        self._host = await self._locate()

    async def _attempt(self) -> asyncssh.SSHClientConnection:
        ssh = _asyncssh()
        transport = self

        class Client(ssh.SSHClient):  # type: ignore[name-defined]
            """Takes the first key that the host shows, or the known one, and no other later."""

            def validate_host_public_key(self, host: str, address: str, port: int, key: asyncssh.SSHKey) -> bool:
                return transport._trusts(key.export_public_key("openssh"))

        patience = self._patience
        try:
            async with asyncio.timeout(2 * patience.connect):
                return await ssh.connect(
                    self._host.address,
                    self._host.port,
                    username=self._host.user,
                    client_keys=[self._key()],
                    client_factory=Client,
                    known_hosts=b"",  # every key is asked about above
                    config=None,
                    agent_path=None,
                    connect_timeout=patience.connect,
                    login_timeout=patience.connect,
                    keepalive_interval=patience.keepalive,
                    keepalive_count_max=3,
                )
        except ssh.HostKeyNotVerifiable as error:
            raise TransportError(
                f"{self._name} shows another host key than before. If that is meant, forget the known one."
            ) from error
        except ssh.PermissionDenied as error:
            raise TransportError(f"{self._name} refuses the key {self._host.key}.") from error
        except (TimeoutError, OSError, ssh.Error) as error:
            raise Transient(f"{self._name} can't be reached ({error or type(error).__name__}).") from error

    def _trusts(self, shown: bytes) -> bool:
        known = self._host.known_host.encode().split()[:2] or self._seen_key.split()[:2]
        self._seen_key = self._seen_key or shown
        return not known or known == shown.split()[:2]

    def _key(self) -> asyncssh.SSHKey:
        ssh = _asyncssh()
        try:
            return ssh.read_private_key(Path(self._host.key).expanduser())
        except (OSError, ssh.KeyImportError) as error:
            raise ConfigurationError(f"The private key {self._host.key!r} can't be read: {error}.") from error

    def _drop(self, connection: asyncssh.SSHClientConnection) -> None:
        connection.abort()
        if self._connection is connection:
            self._connection = None


def _asyncssh() -> Any:
    try:
        import asyncssh
    except ImportError as error:
        raise MissingDependency.of("asyncssh", "ssh") from error
    logging.getLogger("asyncssh").setLevel(logging.WARNING)  # it tells of every command
    return asyncssh


def _status(process: Any) -> int | None:
    """Exit status as a shell gives it; ``None`` when the connection went before the command did."""
    if process.exit_signal is not None:
        number = getattr(signal, f"SIG{process.exit_signal[0]}", None)
        return 128 + int(number or 0)
    status: int | None = process.exit_status
    return status


def _patience_for(size: int) -> float:
    """Seconds that so many bytes may take. A connection that is lost is noticed long before."""
    return DEADLINE + size / SLOWEST


def _tar(files: Mapping[str, bytes]) -> bytes:
    """An uncompressed archive with plain files alone. Paths stay below the folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in sorted(files.items()):
            if path.startswith("/") or ".." in Path(path).parts or not path:
                raise ConfigurationError(f"{path!r} is no path below a folder.")
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _said(output: bytes) -> str:
    lines = output.decode("utf-8", "backslashreplace").strip().splitlines()
    return lines[-1][:300] if lines else "no message"
