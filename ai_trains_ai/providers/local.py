"""This machine as a provider: one CPU slot per core, or one slot per GPU, free of charge.

A pod is a folder that holds its jobs, so a restarted controller finds its pods and the jobs that went on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from ai_trains_ai.convert import from_json, to_json
from ai_trains_ai.errors import ConfigurationError, StorageError, Transient, TransportError
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.records import Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.threads import usable_cores

LOCAL_ADDRESS = "local"
ANY_GPU = "gpu"  # what a request names when any GPU of this machine will do
# ends the jobs of a pod that a dead controller left behind
END_JOBS = '[ -f "$1/end.sh" ] && sh "$1/end.sh" "$1" 2; rm -f "$1/deadman.pid"'


class LocalProvider(GPUProvider):
    """Offers this machine: its CPU, and its GPUs to a request that names their type, or "gpu".

    Args:
        slots: jobs at a time on the CPU; default one per usable core.
        root: the folder that pods live in; default one of this user in /var/tmp.
    """

    max_pods = 1
    listing_lag = 0.0  # a pod is a folder

    def __init__(self, slots: int | None = None, root: str = "") -> None:
        if slots is not None and slots < 1:
            raise ConfigurationError(f"LocalProvider needs at least one slot, not {slots}.")
        self.slots = slots or usable_cores()
        self._root = Path(root or f"/var/tmp/ai-trains-ai-{os.getuid()}").absolute()

    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        types = {name.lower() for name in request.gpu_types}
        offers = [] if types and "cpu" not in types else [Offer("local-cpu", "cpu", 0, 0.0, slots=self.slots)]
        for name, count in (await asyncio.to_thread(_gpus)).items() if types else ():
            if types & {name.lower(), ANY_GPU} and count >= request.count:
                offers.append(Offer(f"local-{name}", name, count, 0.0, slots=count // max(1, request.count)))
        return offers

    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        folder = self._folder(spec.marker)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial = folder / "offer.partial"
            partial.write_text(to_json(offer))
            partial.rename(folder / "offer.json")
        except OSError as error:
            raise StorageError(
                f"Can't write to {folder}: {error.strerror}. Give LocalProvider another root."
            ) from error
        return self._pod(spec.marker, offer)

    async def get(self, pod_id: str) -> Pod | None:
        try:
            return self._pod(pod_id, from_json((self._folder(pod_id) / "offer.json").read_text(), Offer))
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def list(self, marker: str) -> Sequence[Pod]:
        names = sorted(path.name for path in self._root.glob("pods/*") if path.name.startswith(marker))
        return [pod for name in names if (pod := await self.get(name)) is not None]

    async def terminate(self, pod_id: str) -> None:
        folder = self._folder(pod_id)
        if folder.is_dir():
            await LocalTransport().run(["sh", "-c", END_JOBS, "end", str(folder / "jobs")], timeout=60)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def connect(self, pod: Pod) -> Transport:
        if await self.get(pod.id) is None:
            raise Transient(f"Pod {pod.id} was terminated, or never was; nobody gets in.")
        return LocalTransport()

    def _folder(self, marker: str) -> Path:
        if not marker or "/" in marker or marker.startswith("."):
            raise ConfigurationError(f"{marker!r} can't name a pod: it must be a text without slashes.")
        return self._root / "pods" / marker

    def _pod(self, marker: str, offer: Offer) -> Pod:
        root = str(self._folder(marker) / "jobs")
        return Pod(marker, marker, offer, "ready", LOCAL_ADDRESS, host=LOCAL_ADDRESS, root=root)


def _gpus() -> Counter[str]:
    """Names of this machine's GPUs, and how many of each."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return Counter()
    return Counter(line.strip() for line in listed.splitlines() if line.strip())


class LocalTransport(Transport):
    """Commands and files on this machine, without a shell in between."""

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> tuple[int | None, bytes]:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return (127 if isinstance(error, FileNotFoundError) else 126), f"{argv[0]}: {error.strerror}".encode()
        try:
            async with asyncio.timeout(timeout):
                output, _ = await process.communicate(stdin)
        except TimeoutError:
            return None, b""
        finally:
            if process.returncode is None:  # out of time, or the caller was cancelled
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return process.returncode, output

    async def put(self, files: Mapping[str, bytes], folder: str) -> None:
        def write() -> None:
            for path, data in files.items():
                target = Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".put.", delete=False) as partial:
                    partial.write(data)
                os.chmod(partial.name, 0o644)
                os.replace(partial.name, target)

        await asyncio.to_thread(write)

    async def get(self, path: str, limit: int) -> bytes:
        def read() -> bytes:
            with Path(path).open("rb") as file:
                return file.read(limit + 1)

        try:
            data = await asyncio.to_thread(read)
        except OSError as error:
            raise TransportError(f"{path} can't be read: {error.strerror}.") from error
        if len(data) > limit:
            raise TransportError(f"{path} is larger than {limit} bytes.")
        return data

    async def tail(self, path: str, offset: int, limit: int = 1 << 20) -> bytes:
        def read() -> bytes:
            with Path(path).open("rb") as file:
                file.seek(offset)
                return file.read(limit)

        try:
            return await asyncio.to_thread(read)
        except FileNotFoundError:
            return b""

    @contextlib.asynccontextmanager
    async def forward(self, port: int) -> AsyncIterator[int]:
        yield port  # it is this machine's own already
