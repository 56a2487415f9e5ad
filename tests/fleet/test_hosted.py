"""Jobs on the pods of a fleet: their results once, whatever happens to their machines and to the controller."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ai_trains_ai.errors import Fenced
from ai_trains_ai.fleet import Fleet, FleetTimes, Held, Ledger
from ai_trains_ai.fleet.hosted import HostedJob, HostedJobs
from ai_trains_ai.interfaces import Transport
from ai_trains_ai.providers.local import LocalProvider
from ai_trains_ai.records import Budget, Offer, PodRequest
from ai_trains_ai.store import Store

TIMES = FleetTimes(watch=0.2, idle=60.0)


class Priced(LocalProvider):
    """This machine at 3.60 dollars an hour."""

    offer = Offer("here", "cpu", 0, 3.6, slots=1)

    async def offers(self, request: PodRequest) -> list[Offer]:
        return [self.offer]


async def fine(transport: Transport, offer: Offer) -> str:
    return ""


class Desk:
    """One controller of a run, and the next ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fleets: list[Fleet] = []
        self.store = Store.create(folder / "run.db")

    def controller(self, times: FleetTimes = TIMES, **options: Any) -> HostedJobs:
        self.provider = Priced(root=str(self.folder / "machine"))
        self.store = Store.open(self.folder / "run.db")
        self.ledger = Ledger(self.store, Budget(), time.time, lambda event: None)
        self.fleet = Fleet(self.provider, self.ledger, time.time, "ata-run", times, canary=fine)
        self.fleets.append(self.fleet)
        return HostedJobs(self.fleet, self.store, self.folder / "artifacts", time.time, poll=0.05, **options)

    def out(self, job_id: str) -> dict[str, bytes]:
        folder = self.folder / "artifacts" / job_id / "out"
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    async def die(self, *tasks: asyncio.Task[Any]) -> None:
        """What SIGKILL leaves of a controller: its books and its machines, and nothing that it would still do."""
        self.store.close()  # whatever it does on its way out is stored nowhere

        async def nothing(*_: Any, **__: Any) -> None:
            raise RuntimeError("this process is dead")

        self.provider.terminate = nothing  # type: ignore[method-assign]
        self.fleet.jobs = nothing  # type: ignore[method-assign]
        for task in (*tasks, *self.fleet._tasks):
            task.cancel()
        await asyncio.gather(*tasks, *self.fleet._tasks, return_exceptions=True)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    await desk.fleet.close()
    assert await desk.provider.list("ata-run") == []
    assert desk.store.leases() == []


async def until(holds: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it never happens"
        await asyncio.sleep(0.02)
    return found


def job(name: str, command: str, seconds: float = 60.0, **options: Any) -> HostedJob:
    return HostedJob(name, options.pop("files", {}), command, seconds, **options)


async def test_a_job_from_its_files_to_its_result(desk: Desk) -> None:
    jobs = desk.controller()
    ended = await jobs.run(job("one", "cat n; mkdir out; cp n out/m; exit 3", files={"n": b"41\n"}))
    assert (ended.exit, ended.attempt, ended.why) == (3, 1, "")
    assert desk.out("one") == {"m": b"41\n"}
    assert (desk.folder / "artifacts/one/log.1").read_bytes() == b"41\n"
    assert await jobs.run(job("one", "exit 9")) == ended  # it is over, once and for all


async def test_a_job_is_paid_for_by_the_second(desk: Desk) -> None:
    await desk.controller().run(job("one", "sleep 0.5"))
    [busy] = [charge for _, charge in desk.store.charges() if charge.kind == "busy"]
    assert busy.subject == "one"
    assert 0.0005 < busy.usd < 0.01


async def test_a_job_over_its_time_is_ended(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ai_trains_ai.fleet.hosted.SLACK", 0.2)
    ended = await desk.controller().run(job("slow", f"sleep 5; touch {desk.folder}/went-on", 0.5))
    assert ended.exit is None
    assert "not over after 0 s" in ended.why or "not over after 1 s" in ended.why
    assert not (desk.folder / "went-on").exists()


async def test_a_result_that_is_too_large_is_not_taken(desk: Desk) -> None:
    jobs = desk.controller()
    ended = await jobs.run(job("fat", "mkdir out; head -c 100000 /dev/zero >out/x", result_bytes=1000))
    assert ended.exit is None
    assert "larger than 1000 bytes" in ended.why
    assert desk.out("fat") == {}


async def test_a_result_with_a_link_is_not_taken(desk: Desk) -> None:
    ended = await desk.controller().run(job("sly", "mkdir out; ln -s /etc/passwd out/x"))
    assert "is no plain file" in ended.why


async def test_of_a_huge_log_the_beginning_is_kept(desk: Desk) -> None:
    await desk.controller().run(job("loud", "yes | head -c 3000000"))
    assert (desk.folder / "artifacts/loud/log.1").stat().st_size == 1 << 20


async def test_a_job_whose_processes_are_killed_is_run_again(desk: Desk) -> None:
    command = f"echo run >>{desk.folder}/runs; [ $(wc -l <{desk.folder}/runs) = 2 ] || sleep 60"
    running = asyncio.ensure_future(desk.controller().run(job("shot", command)))
    record = await until(lambda: list(desk.folder.glob("machine/pods/*/jobs/jobs/shot/pid")))
    await until(lambda: (desk.folder / "runs").exists())
    wrapper, group = map(int, record[0].read_text().split())
    os.kill(wrapper, signal.SIGKILL)
    os.killpg(group, signal.SIGKILL)
    ended = await asyncio.wait_for(running, 60)
    assert (ended.exit, ended.attempt) == (0, 2)


async def test_a_job_that_no_machine_holds_is_given_up(desk: Desk) -> None:
    # it ends its own wrapper, so that no exit record is ever written
    ended = await asyncio.wait_for(
        desk.controller(attempts=2).run(job("suicide", "sleep 0.5; kill -9 $(cut -d' ' -f1 ../pid)")), 60
    )
    assert ended.exit is None
    assert ended.why.startswith("its machine was lost 2 times: the job is lost")


async def test_a_restarted_controller_goes_on_with_a_job_and_its_lease(desk: Desk) -> None:
    task = asyncio.ensure_future(
        desk.controller().run(work := job("long", f"echo run >>{desk.folder}/runs; sleep 1.5"))
    )
    await until(lambda: (desk.folder / "runs").exists())
    await desk.die(task)
    [lease] = Store.open(desk.folder / "run.db", write=False).leases()
    ended = await desk.controller().run(work)
    assert (ended.exit, ended.attempt, ended.marker) == (0, 1, lease.pod.marker)
    assert (desk.folder / "runs").read_text() == "run\n"
    [busy] = [charge for _, charge in desk.store.charges() if charge.kind == "busy"]
    assert busy.quantity == pytest.approx(time.time() - lease.begin, abs=1.0)


async def test_a_job_that_ended_while_nobody_was_there_is_fetched(desk: Desk) -> None:
    work = job("left", "mkdir out; echo done >out/x; sleep 0.3")
    task = asyncio.ensure_future(desk.controller().run(work))
    await until(lambda: list(desk.folder.glob("machine/pods/*/jobs/jobs/left/pid")))
    await desk.die(task)
    await until(lambda: list(desk.folder.glob("machine/pods/*/jobs/jobs/left/exit")))
    assert (await desk.controller().run(work)).exit == 0
    assert desk.out("left") == {"x": b"done\n"}


async def test_a_job_that_nobody_takes_up_again_gives_its_slot_to_others(desk: Desk) -> None:
    task = asyncio.ensure_future(desk.controller().run(job("orphan", f"sleep 4; touch {desk.folder}/went-on", 0.0)))
    await until(lambda: list(desk.folder.glob("machine/pods/*/jobs/jobs/orphan/pid")))
    [lease] = desk.store.leases()
    desk.store.save_lease(evolve(lease, seconds=0.5))
    await desk.die(task)
    jobs = desk.controller(FleetTimes(watch=0.1, idle=0.5))
    assert (await asyncio.wait_for(jobs.run(job("other", "true")), 30)).exit == 0
    await asyncio.sleep(1.0)
    assert not (desk.folder / "went-on").exists()


async def test_the_lease_of_a_job_that_has_ended_is_not_waited_for(desk: Desk) -> None:
    task = asyncio.ensure_future(desk.controller().run(work := job("over", "sleep 0.2", 7200.0)))
    await until(lambda: list(desk.folder.glob("machine/pods/*/jobs/jobs/over/pid")))
    placed = desk.store.placement("over")
    assert placed is not None
    await desk.die(task)
    store = Store.open(desk.folder / "run.db")
    assert store.end_placement(evolve(placed, state="ended", exit=0))
    store.close()
    jobs = desk.controller()
    assert (await jobs.run(work)).exit == 0
    assert (await asyncio.wait_for(jobs.run(job("next", "true")), 20)).exit == 0


async def test_a_job_that_was_cancelled_is_gone_from_its_machine(desk: Desk) -> None:
    jobs = desk.controller()
    task = asyncio.ensure_future(jobs.run(work := job("gone", f"echo run >>{desk.folder}/runs; sleep 3; echo end")))
    await until(lambda: (desk.folder / "runs").exists())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not list(desk.folder.glob("machine/pods/*/jobs/jobs/gone"))
    assert (await jobs.run(work)).exit == 0  # whoever wants it again gets it anew
    assert (desk.folder / "runs").read_text() == "run\nrun\n"


async def test_a_job_that_writes_its_own_record_harms_nobody_else(desk: Desk) -> None:
    jobs = desk.controller()
    desk.provider.offer = Offer("here", "cpu", 0, 3.6, slots=2)  # type: ignore[misc]
    good, bad = await asyncio.gather(
        jobs.run(job("good", "sleep 1; mkdir out; echo fine >out/x")),
        jobs.run(job("bad", "sleep 0.3; echo rubbish >../exit; sleep 60")),
    )
    assert (good.exit, good.attempt, desk.out("good")) == (0, 1, {"x": b"fine\n"})
    assert bad.exit is None
    assert "rubbish" in bad.why


async def test_the_machine_of_an_ended_job_can_be_held(desk: Desk) -> None:
    jobs = desk.controller()
    async with jobs.holding(job("one", "echo made >weights; mkdir out; echo x >out/x", held=30.0)) as held:
        assert isinstance(held, Held)
        assert (held.placement.exit, desk.out("one")) == (0, {"x": b"x\n"})
        target = io.BytesIO()
        await held.call(lambda host: host.fetch(f"{held.folder}/weights", target))
        assert target.getvalue() == b"made\n"
        assert await held.call(lambda host: host.listing(held.folder, "ights")) == ["weights"]
    assert jobs.result("one") == held.placement
    assert not list(desk.folder.glob("machine/pods/*/jobs/jobs/one"))


async def test_nobody_else_gets_a_held_machine(desk: Desk) -> None:
    jobs = desk.controller()
    async with jobs.holding(job("one", "true")):
        other = asyncio.ensure_future(jobs.run(job("two", "true")))
        assert await asyncio.wait({other}, timeout=1.0) == (set(), {other})
    assert (await asyncio.wait_for(other, 30)).exit == 0


async def test_a_held_job_is_found_again_by_a_restarted_controller(desk: Desk) -> None:
    work = job("one", f"echo run >>{desk.folder}/runs; echo made >weights")

    async def hold() -> None:
        async with desk.controller().holding(work):
            (desk.folder / "holding").touch()
            await asyncio.sleep(60)

    task = asyncio.ensure_future(hold())
    await until(lambda: (desk.folder / "holding").exists())
    await desk.die(task)
    async with desk.controller().holding(work) as held:
        assert isinstance(held, Held)
        assert await held.call(lambda host: host.listing(held.folder, "weights")) == ["weights"]
    assert (desk.folder / "runs").read_text() == "run\n"


async def test_what_is_started_beside_a_held_job_sees_the_same_devices(desk: Desk) -> None:
    jobs = desk.controller()
    desk.provider.offer = Offer("here", "cpu", 2, 3.6, slots=2)  # type: ignore[misc]
    show = "mkdir out; echo $CUDA_VISIBLE_DEVICES >out/devices"
    async with jobs.holding(job("one", show)) as one, jobs.holding(job("two", show)) as two:
        for held in (one, two):
            assert isinstance(held, Held)
            await held.start({}, "echo wrong")
            await held.start({}, show)  # in place of the first
            for _ in range(200):
                if (await held.call(lambda host, held=held: host.poll(held.beside))).status == "ended":
                    break
                await asyncio.sleep(0.05)
            said = await held.call(lambda host, held=held: host.result(held.beside, 1 << 16))
            assert said == desk.out(held.placement.job_id)
    assert desk.out("one") != desk.out("two")


async def test_of_a_job_that_ended_before_only_its_end_is_left(desk: Desk) -> None:
    jobs = desk.controller()
    ended = await jobs.run(job("one", "true"))
    async with jobs.holding(job("one", "true")) as held:
        assert held == ended


async def test_files_may_depend_on_the_machine(desk: Desk) -> None:
    work = HostedJob("one", lambda lease: {"n": lease.pod.offer.gpu_type.encode()}, "mkdir out; cp n out", 60.0)
    await desk.controller().run(work)
    assert desk.out("one") == {"n": b"cpu"}


async def test_what_a_job_prints_is_heard_while_it_runs(desk: Desk) -> None:
    said: list[bytes] = []
    running = asyncio.ensure_future(
        desk.controller().run(
            job("one", f"echo first; while [ ! -e {desk.folder}/go ]; do sleep 0.05; done; echo last"), said.append
        )
    )
    await until(lambda: b"".join(said) == b"first\n")
    (desk.folder / "go").touch()
    await asyncio.wait_for(running, 30)
    assert b"".join(said) == b"first\nlast\n"


async def test_of_two_controllers_the_older_one_is_shut_out(desk: Desk) -> None:
    older = asyncio.ensure_future(desk.controller().run(work := job("long", "sleep 2")))
    await until(lambda: list(desk.folder.glob("machine/pods/*/jobs/jobs/long/pid")))
    first = desk.fleet
    newer = asyncio.ensure_future(desk.controller().run(work))
    with pytest.raises(Fenced):
        await asyncio.wait_for(older, 20)
    for task in list(first._tasks):
        task.cancel()
    await asyncio.wait([newer], timeout=30)


@pytest.mark.parametrize(("count", "slots", "seen"), [(2, 2, {"0", "1"}), (4, 2, {"0,1", "2,3"}), (1, 1, {""})])
async def test_a_job_sees_the_gpus_of_its_slot(desk: Desk, count: int, slots: int, seen: set[str]) -> None:
    jobs = desk.controller()
    desk.provider.offer = Offer("here", "H200", count, 3.6, slots=slots)  # type: ignore[misc]
    gpus = 'mkdir out; printf %s "$CUDA_VISIBLE_DEVICES" >out/gpus; '
    wait = (
        f"while [ $(ls {desk.folder} | grep -c there) -lt {slots} ]; do sleep 0.05; done"  # for the others to run, too
    )
    await asyncio.gather(
        *(jobs.run(job(f"job-{n}", f"{gpus} touch {desk.folder}/there-{n}; {wait}")) for n in range(slots))
    )
    assert {desk.out(f"job-{n}")["gpus"].decode() for n in range(slots)} == seen
