"""This machine as the only pod: one CPU slot per core, free of charge."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from ai_trains_ai.errors import ConfigurationError, Transient, TransportError
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.records import Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.threads import usable_cores

LOCAL_ADDRESS = "local"


class LocalProvider(GPUProvider):
    """Offers this machine.

    Args:
        slots: jobs at a time; default one per usable core.
    """

    def __init__(self, slots: int | None = None) -> None:
        if slots is not None and slots < 1:
            raise ConfigurationError(f"LocalProvider needs at least one slot, not {slots}.")
        self.slots = slots or usable_cores()
        self._pods: dict[str, Pod] = {}

    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        if request.gpu_types and "cpu" not in request.gpu_types:
            return []
        return [Offer("local-cpu", "cpu", 0, 0.0, slots=self.slots)]

    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        pod = Pod(spec.marker, spec.marker, offer, "ready", LOCAL_ADDRESS)
        self._pods[pod.id] = pod
        return pod

    async def get(self, pod_id: str) -> Pod | None:
        return self._pods.get(pod_id)

    async def list(self, marker: str) -> Sequence[Pod]:
        return [pod for pod in self._pods.values() if pod.marker.startswith(marker)]

    async def terminate(self, pod_id: str) -> None:
        self._pods.pop(pod_id, None)

    async def connect(self, pod: Pod) -> Transport:
        if pod.id not in self._pods:
            raise Transient(f"Pod {pod.id} was terminated, or never was; nobody gets in.")
        return LocalTransport()


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
            output, _ = await asyncio.wait_for(process.communicate(stdin), timeout)
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
                partial = target.with_name(target.name + ".partial")
                partial.write_bytes(data)
                os.replace(partial, target)

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
