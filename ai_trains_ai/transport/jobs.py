"""The protocol by which a job lives on a host, over any `Transport`.

A job is staged privately and published by one rename, so that a repeated submit is a no-op; it runs detached, in a
session of its own, with a heartbeat, and its exit record is the last thing that is written. A lost connection changes
nothing on the host, and is never read as an end. The shell scripts in ``host/`` are the host's side.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import tarfile
import uuid
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from importlib import resources
from typing import BinaryIO, Literal

from attrs import frozen

from ai_trains_ai.errors import ConfigurationError, Fenced, Transient, TransportError, UntrustedDataError
from ai_trains_ai.interfaces import Transport

SCRIPTS = ("fence.sh", "job.sh", "submit.sh", "poll.sh", "end.sh", "deadman.sh")
START_SECONDS = 30.0  # a started job that shows no process for so long was lost at its start
DEADLINE = 60.0  # seconds of one call
LARGE = 64 << 10  # bytes of a file from which on it is kept on the host for the next jobs
FENCED = 46  # exit status for a controller that another one has followed
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

HostJobStatus = Literal["absent", "starting", "running", "ended", "lost"]


def job_folder(root: str, job_id: str) -> str:
    """Where a job's files are on its host, and where it runs."""
    return f"{root}/jobs/{job_id}/files"


def beside(job_id: str) -> str:
    """The id of what runs beside a job, and is removed with it."""
    return f"{job_id}.beside"


@frozen
class HostJob:
    """A job's state. ``exit`` is its status once it has ended; ``silent`` are seconds since its last heartbeat, by the
    host's own clock; ``log`` is what it printed from the asked offset on.

    "lost" means that its process is gone without an exit record: killed from outside, or the host was restarted.
    """

    status: HostJobStatus
    exit: int | None = None
    silent: float = 0.0
    log: bytes = b""


class HostJobs:
    """The jobs on one host, below the folder ``root``. Safe to use from several tasks, and after a restart of ours.

    ``epoch`` is the fencing token: once a controller of a higher one was here, every call of a lower one raises
    `Fenced`.
    """

    def __init__(self, transport: Transport, root: str, epoch: int = 0) -> None:
        if not root.startswith("/"):
            raise ConfigurationError(f"The root of jobs on a host must be an absolute path, not {root!r}.")
        self._transport, self._root, self._epoch = transport, root.rstrip("/"), epoch
        self.prepared = False
        self._preparing = asyncio.Lock()

    async def prepare(self) -> None:
        """Put the host's side there, and shut out older controllers. Idempotent."""
        async with self._preparing:
            if self.prepared:
                return
            folder = resources.files("ai_trains_ai.transport") / "host"
            await self._transport.put({name: (folder / name).read_bytes() for name in SCRIPTS}, self._root)
            await self._call("mkdir", "-p", f"{self._root}/jobs")
            await self.beat()
            self.prepared = True

    async def submit(self, job_id: str, files: Mapping[str, bytes], command: str, user: str = "") -> bool:
        """Start ``sh command`` in a folder with ``files``; what it leaves in ``out/`` is its result.

        Idempotent by ``job_id``: returns whether this call started it. ``user`` is whom it runs as, where we are root
        on the host: such a job can't read what only root can, the key of the dead-man switch above all. Large files
        are sent to a host once, whatever job they belong to.

        Raises:
            Transient: the connection was lost; submit again, it is safe.
        """
        stage = f"{self._root}/stage-{uuid.uuid4().hex}"
        script = (resources.files("ai_trains_ai.transport") / "host" / "job.sh").read_bytes()
        large = {path: data for path, data in files.items() if len(data) >= LARGE}
        staged = {f"files/{path}": data for path, data in files.items() if path not in large}
        if large:
            staged["blobs"] = await self._blobs(large)
        if user:
            staged["user"] = _safe(user).encode()
        await self._transport.put({"job.sh": script, "command": command.encode(), **staged}, stage)
        said = await self._script("submit.sh", stage, _safe(job_id))
        return said.strip() == b"started"

    async def poll(self, job_id: str, offset: int = 0, limit: int = 1 << 16) -> HostJob:
        """State and the next piece of the log. Tells the host that the controller is there."""
        said = await self._script("poll.sh", _safe(job_id), str(offset + 1), str(limit))
        line, _, log = said.partition(b"\n")
        there, ended, alive, heartbeat, now, since = (*line.decode("ascii", "replace").split("|"), "", "", "")[:6]
        if there != "yes":
            return HostJob("absent")
        if ended:
            return HostJob("ended", _number(ended), log=log)
        silent = float(_number(now) - _number(heartbeat or since or now))
        if alive:
            return HostJob("running", silent=silent, log=log)
        starting = not heartbeat and silent < START_SECONDS
        return HostJob("starting" if starting else "lost", silent=silent, log=log)

    async def cancel(self, job_id: str, grace: int = 5) -> None:
        """End a job and all that it started; ``grace`` seconds lie between asking and killing. Idempotent."""
        await self._script("end.sh", str(grace), _safe(job_id), timeout=DEADLINE + grace)

    async def result(self, job_id: str, limit: int) -> dict[str, bytes]:
        """The files that a job left in ``out/``, at most ``limit`` bytes in all: untrusted, the job wrote them.

        Raises:
            TransportError: there is no result, or it is larger.
            UntrustedDataError: the archive holds anything but plain files with harmless names.
        """
        archive = await self._transport.get(f"{self._root}/jobs/{_safe(job_id)}/result.tar", limit)
        return _plain_files(archive)

    async def fetch(self, path: str, target: BinaryIO, piece: int = 8 << 20) -> None:
        """Append to ``target`` what it lacks of a file on the host, piece by piece: it may be larger than memory.

        Raises:
            Transient: the connection was lost; call again with the same target.
        """
        while data := await self._transport.tail(path, target.tell(), piece):
            await asyncio.to_thread(target.write, data)

    async def listing(self, folder: str, ending: str) -> list[str]:
        """The names of files in a folder of the host that end so."""
        said = await self._call("sh", "-c", 'ls "$1" 2>/dev/null || true', "ls", folder)
        return [name for name in said.decode("utf-8", "replace").splitlines() if name.endswith(ending)]

    def forward(self, port: int) -> AbstractAsyncContextManager[int]:
        """A port here that leads to one on the host's own loopback."""
        return self._transport.forward(port)

    async def remove(self, job_id: str) -> None:
        """End a job and what runs beside it, and remove their files. Idempotent."""
        for name in (beside(job_id), job_id):
            await self.cancel(name, 2)
            # what was ended a moment ago may still have left a file while the folder was emptied
            again = 'for i in 1 2 3 4; do rm -rf "$1" 2>/dev/null && exit; sleep 0.3; done; rm -rf "$1"'
            await self._call("sh", "-c", again, "remove", f"{self._root}/jobs/{_safe(name)}")

    async def wipe(self) -> None:
        """End every job and remove its files: the next lease finds nothing of the last. Idempotent.

        Large input files stay for a day, readable for nobody but the host's own user.
        """
        await self._script("end.sh", "2")
        old = 'rm -rf "$1"/stage-*; [ -d "$1/blobs" ] || exit 0; find "$1/blobs" -type f -mtime +0 -delete'
        await self._call("sh", "-c", old, "wipe", self._root)

    async def arm(self, seconds: int, command: str) -> None:
        """End everything here, then run ``sh command``, once no controller was heard for ``seconds``.

        Replaces an earlier one. ``command`` may hold a key: only the host's own user can read it, and it is on no
        command line.
        """
        # Runpod's start script leaves the pod's own key readable for everybody
        keep = (
            "chmod 600 /etc/rp_environment 2>/dev/null; umask 077; "
            'cat >"$1/deadman.tmp" && mv "$1/deadman.tmp" "$1/deadman.command"'
        )
        await self._call("sh", "-c", keep, "arm", self._root, stdin=command.encode())
        await self.beat()
        start = 'setsid nohup sh "$1/deadman.sh" "$1" "$2" "$1/deadman.command" </dev/null >/dev/null 2>&1 &'
        await self._call("sh", "-c", start, "arm", self._root, str(seconds))

    async def disarm(self) -> None:
        """Stop the dead-man switch. Idempotent."""
        await self.beat()
        await self._call("rm", "-f", f"{self._root}/deadman.pid", f"{self._root}/deadman.command")

    async def beat(self) -> None:
        """Tell the host that the controller is there."""
        await self._script("beat")

    async def _blobs(self, files: Mapping[str, bytes]) -> bytes:
        """See that the host has these files under their hashes; the list of hashes and paths."""
        hashes = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
        there = await self._call("sh", "-c", 'ls "$1" 2>/dev/null || true', "ls", f"{self._root}/blobs")
        missing = {name: files[path] for path, name in hashes.items() if name.encode() not in there.split()}
        if missing:
            await self._call("sh", "-c", 'mkdir -p "$1" && chmod 700 "$1"', "blobs", f"{self._root}/blobs")
            await self._transport.put(missing, f"{self._root}/blobs")
        return "".join(f"{name}  {path}\n" for path, name in hashes.items()).encode()

    # ------------------------------------------------------------------------------------------ calls

    async def _script(self, name: str, *arguments: str, timeout: float = DEADLINE) -> bytes:
        fence = f"{self._root}/fence.sh"
        return await self._call("sh", fence, self._root, str(self._epoch), name, *arguments, timeout=timeout)

    async def _call(self, *argv: str, stdin: bytes = b"", timeout: float = DEADLINE) -> bytes:
        status, output = await self._transport.run(argv, stdin=stdin, timeout=timeout)
        if status is None:
            raise Transient(
                f"The connection was lost in {argv[0]} {argv[1].rpartition('/')[2]}; it may have been done."
            )
        if status == FENCED:
            raise Fenced("Another controller of this run took the machine over. Stop this one.")
        if status != 0:
            said = output.decode("utf-8", "backslashreplace").strip()[-300:]
            raise TransportError(f"{argv[1].rpartition('/')[2]} failed on the host with status {status}: {said}")
        return output


def _safe(job_id: str) -> str:
    if not _NAME.fullmatch(job_id):
        raise ConfigurationError(f"{job_id!r} can't name a job on a host. Use letters, digits, dots, - and _.")
    return job_id


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UntrustedDataError(f"The host's record of a job holds {text[:40]!r}, which is no number.") from None


def _plain_files(archive: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                if member.isdir():
                    continue
                path = member.name.removeprefix("out/")
                parts = path.split("/")
                if not member.isfile() or path.startswith("/") or {"", ".", ".."} & set(parts) or path in found:
                    raise UntrustedDataError(f"The result holds {ascii(member.name)[:80]}, which is no plain file.")
                content = tar.extractfile(member)
                assert content is not None
                found[path] = content.read()
    except tarfile.TarError as error:
        raise UntrustedDataError(f"The result is no archive: {error}.") from error
    return found
