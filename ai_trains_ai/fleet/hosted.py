"""Jobs on rented machines, from files and a command to the files that they leave.

A job is placed in the run's books before it is started, goes on while nobody looks, and is found again by a restarted
controller. Its result is fetched to the run folder and counted once, whoever fetches it. A machine that fails costs an
attempt, never the job. Whoever needs more of an ended job than its result (its weights, say) holds its machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from attrs import evolve, field, frozen

from ai_trains_ai.errors import Fenced, Transient, TransportError, UntrustedDataError
from ai_trains_ai.fleet.pool import Fleet
from ai_trains_ai.records import Lease, Offer, Placement
from ai_trains_ai.store import Store
from ai_trains_ai.transport.jobs import HostJob, HostJobs, beside, job_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3  # of a job whose machine fails
SILENCE = 180.0  # seconds without a word from a machine, or without a heartbeat of a job, after which it is given up
SLACK = 60.0  # seconds of a lease around the job itself
FAREWELL = 10.0  # seconds to end a job that was cancelled
LOG_BYTES = 1 << 20  # of a job's log that are kept at most


@frozen
class HostedJob:
    """What to run: ``sh command`` in a folder with ``files``; what it leaves in ``out/`` is its result.

    ``files`` may depend on the machine: a function of the lease. ``seconds`` is the longest that it may run, ``held``
    how long its machine may be held after that, ``result_bytes`` the largest result that is taken; ``user`` is whom it
    runs as where the machine is entered as root (empty: root).
    """

    id: str
    files: Mapping[str, bytes] | Callable[[Lease], Mapping[str, bytes]] = field(repr=False)
    command: str
    seconds: float
    held: float = 0.0
    result_bytes: int = 1 << 30
    user: str = ""


class MachineLost(Exception):
    """An attempt that ended without the job's doing."""


@frozen
class Held:
    """A job that has ended, and its machine, which nobody else gets: for more work beside the job's files."""

    placement: Placement
    lease: Lease
    folder: str
    """The job's own folder on the machine."""
    _call: Callable[[Lease, Callable[[HostJobs], Awaitable[Any]]], Awaitable[Any]] = field(repr=False)

    async def call(self, work: Callable[[HostJobs], Awaitable[T]]) -> T:
        """What a repeatable call of the machine gives, tried for as long as the machine may come back.

        Raises:
            Transient, TransportError: the machine is gone, or refuses.
        """
        found: T = await self._call(self.lease, work)
        return found

    @property
    def beside(self) -> str:
        """The id of what runs beside it."""
        return beside(self.placement.job_id)

    async def start(self, files: Mapping[str, bytes], command: str) -> None:
        """Start something beside it on the same devices, in place of what was there. It is removed with the job."""

        async def anew(host: HostJobs) -> None:
            await host.remove(self.beside)
            await host.submit(self.beside, files, f"{_devices(self.lease)}{command}")

        await self.call(anew)


class HostedJobs:
    """Runs jobs on the pods of a fleet.

    Args:
        fleet: where they run.
        store: the run's; keeps where every job is.
        folder: results go to ``folder/JOB/out``, logs to ``folder/JOB/log.ATTEMPT``.
        clock: seconds since the epoch; ``sleep`` waits by it.
        poll: seconds between two looks at a job.
        silence: seconds without a word after which a machine or a job is given up.
        attempts: of a job whose machines fail.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: Store,
        folder: Path,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        poll: float = 2.0,
        silence: float = SILENCE,
        attempts: int = ATTEMPTS,
    ) -> None:
        self._fleet, self._store, self._folder = fleet, store, folder
        self._clock, self._sleep, self._poll, self._silence = clock, sleep, poll, silence
        self._attempts = attempts

    def result(self, job_id: str) -> Placement | None:
        """How a job ended; ``None`` while it hasn't."""
        placement = self._store.placement(job_id)
        return placement if placement is not None and placement.state == "ended" else None

    async def run(self, job: HostedJob, on_log: Callable[[bytes], None] | None = None) -> Placement:
        """How the job ended, its result and its log in the folder. Starts it, or goes on with one that is there.

        Idempotent by ``job.id``. Its exit status is ``None`` when it did not end by itself: over its time, its result
        not to be used, or no machine held it; `Placement.why` says which.

        Args:
            job: what to run.
            on_log: called with every new piece of what it prints.

        Raises:
            BudgetExceeded, ProviderError: as `Fleet.lease` does; the job can be run again.
        """
        if (ended := self.result(job.id)) is None:
            async with self.holding(job, on_log) as held:
                ended = held if isinstance(held, Placement) else held.placement
        return self.result(job.id) or ended

    @contextlib.asynccontextmanager
    async def holding(
        self, job: HostedJob, on_log: Callable[[bytes], None] | None = None
    ) -> AsyncIterator[Held | Placement]:
        """As `run`, and inside of the context the machine is still the job's, with its files.

        The job counts as ended when the context is left: a controller that is restarted before finds it on its machine
        again, by the same call. A `Placement` is given when no machine holds the job: it ended before, or was given up.
        """
        while (ended := self.result(job.id)) is None:
            try:
                async with self._fleet.lease(job.id, job.seconds + job.held + SLACK, lasting=True) as lease:
                    placed = await self._attempt(job, lease, on_log)
                    folder = job_folder(lease.pod.root, job.id)
                    try:
                        yield Held(placed, lease, folder, self._patiently)
                    finally:
                        self._store.end_placement(placed)
                        await self._cleared(job, lease)
                    return
            except MachineLost as lost:
                placed = self._store.placement(job.id) or Placement(job.id, 1, "")
                logger.warning("Job %s, attempt %d: %s.", job.id, placed.attempt, lost)
                if placed.attempt < self._attempts:
                    self._store.place(Placement(job.id, placed.attempt + 1, ""))
                else:
                    why = f"its machine was lost {placed.attempt} times: {lost}"
                    self._store.end_placement(evolve(placed, state="ended", why=why))
        yield ended

    async def distrust(self, held: Held, why: str) -> None:
        """Give up the machine of a held job: it can't be used for another."""
        await self._fleet.distrust(held.lease, why)

    async def _attempt(self, job: HostedJob, lease: Lease, on_log: Callable[[bytes], None] | None) -> Placement:
        """The job from its start, or from where it is, to its end; its result is in the folder."""
        try:
            placed = await self._patiently(lease, lambda host: self._placed(job, lease, host))
            try:
                state = await self._followed(job, lease, placed, on_log)
                why = "" if state is not None else f"it was not over after {job.seconds:.0f} s"
            except UntrustedDataError as error:  # the machine answers, and what the job left there makes no sense
                state, why = None, str(error).rstrip(".")
            return await self._fetched(job, lease, placed, state, why)
        except (Transient, TransportError) as error:
            await self._lose(lease, error)
        except Fenced as error:
            self._fleet.stop(error)
            raise
        except BaseException:  # also one of the caller's: nobody wants the job now, and its slot goes to another one
            await self._cleared(job, lease)
            raise

    async def _patiently(self, lease: Lease, call: Callable[[HostJobs], Awaitable[T]]) -> T:
        """What a call of the machine gives, repeated while the machine may come back. All calls can be repeated."""
        heard = self._clock()
        while True:
            try:
                return await call(await self._fleet.jobs(lease))
            except Transient:
                there = any(pod.marker == lease.pod.marker for pod in self._fleet.pods)
                if not there or self._clock() - heard > self._silence:
                    raise
                await self._sleep(self._poll)

    async def _placed(self, job: HostedJob, lease: Lease, host: HostJobs) -> Placement:
        """The attempt that runs on the leased pod: started now, or found there."""
        placed = self._store.placement(job.id)
        if placed is None or placed.marker != lease.pod.marker:
            # nothing of an earlier job, or of an attempt that was given up, may be here
            await (host.wipe() if lease.pod.offer.slots == 1 else host.remove(job.id))
            attempt = 1 if placed is None else placed.attempt + bool(placed.marker)
            placed = Placement(job.id, attempt, lease.pod.marker, began=self._clock())
            self._store.place(placed)
        files = job.files(lease) if callable(job.files) else job.files
        if await host.submit(job.id, files, f"{_devices(lease)}{job.command}", job.user):
            placed = evolve(placed, began=self._clock())
            self._store.place(placed)
        return placed

    async def _lose(self, lease: Lease, error: Exception) -> NoReturn:
        """Give the pod of a lease up, and this attempt with it."""
        why = str(error).rstrip(".")
        await self._fleet.distrust(lease, why)
        raise MachineLost(why) from error

    async def _cleared(self, job: HostedJob, lease: Lease) -> None:
        """Take the job off its machine; one that can't be reached is wiped before its next job."""

        async def remove() -> None:
            await (await self._fleet.jobs(lease)).remove(job.id)

        try:
            await asyncio.wait_for(asyncio.shield(remove()), FAREWELL)
        except Exception as error:
            logger.debug("job %s stays on its machine: %s", job.id, error)

    async def _followed(
        self, job: HostedJob, lease: Lease, placed: Placement, on_log: Callable[[bytes], None] | None
    ) -> HostJob | None:
        """The state of the job once it has ended; ``None`` when its time is over."""
        log = self._folder / job.id / f"log.{placed.attempt}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:

            async def look(host: HostJobs) -> HostJob:
                return await host.poll(job.id, file.tell())

            while True:
                state = await self._patiently(lease, look)
                new = state.log[: max(0, LOG_BYTES - file.tell())]
                file.write(new)
                file.flush()  # for those who watch
                if new and on_log is not None:
                    on_log(new)
                if state.status == "ended" and (not state.log or file.tell() >= LOG_BYTES):
                    return state
                if state.status == "ended":
                    continue  # there may be more to read
                if state.status in ("lost", "absent") or state.silent > self._silence:
                    raise MachineLost(
                        f"the job is {state.status} on pod {placed.marker}, silent for {state.silent:.0f} s"
                    )
                if self._clock() - placed.began > job.seconds + SLACK / 2:
                    await self._patiently(lease, lambda host: host.cancel(job.id))
                    return None
                await self._sleep(self._poll)

    async def _fetched(
        self, job: HostedJob, lease: Lease, placed: Placement, state: HostJob | None, why: str
    ) -> Placement:
        """Take the result to the run folder; how the job ended."""
        files: Mapping[str, bytes] = {}
        if state is not None:
            try:
                files = await self._patiently(lease, lambda host: host.result(job.id, job.result_bytes))
            except (TransportError, UntrustedDataError) as error:
                state, why = None, f"its result can't be used: {error}"
        await asyncio.to_thread(_replace, self._folder / job.id / "out", files)
        seconds = self._clock() - placed.began
        return evolve(placed, state="ended", exit=None if state is None else state.exit, seconds=seconds, why=why)


def _devices(lease: Lease) -> str:
    """Shows a job the GPUs of its slot, and no others."""
    offer: Offer = lease.pod.offer
    if offer.count == 0 or offer.slots == 1:
        return ""
    each = max(1, offer.count // offer.slots)
    devices = ",".join(str(lease.slot * each + device) for device in range(each))
    return f"export CUDA_VISIBLE_DEVICES={devices}; "


def _replace(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put a whole result in place: a reader sees the old one, or the new one."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path, data in files.items():
        target = partial / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
