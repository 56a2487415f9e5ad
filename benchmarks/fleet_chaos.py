"""A fleet whose controller is killed with SIGKILL at random moments: what is leaked, lost, counted twice, or mispaid.

A local Runpod (tests/fakes) runs in a process of its own, with real SSH machines and books of its own. A controller
runs 40 short jobs on 8 of its pods, is killed, started again on the same run folder, and so on; when the jobs are done,
the next round begins. Time is scaled: a second here is a minute of the service.

    python benchmarks/fleet_chaos.py --kills 100            # kills alone
    python benchmarks/fleet_chaos.py --kills 100 --faults   # and faults of the service and of its machines
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
SPEED = 60.0
JOBS, PODS = 40, 8
LONGEST = 6.0  # seconds until a kill
ROUND_SECONDS = 240.0  # a controller that needs longer hangs
WATCH = 10.0  # simulated seconds between two looks at the pods
MACHINE_FAULTS = ("stuck", "no_direct", "refuse", "error", "silent", "ecc", "remap", "die", "end", "freeze")
REQUEST_FAULTS = ("lost_after", "lost_before", "500_after", "500", "429", "html")
CREATE_FAULTS = (*REQUEST_FAULTS, "capacity", "403", "duplicate")


# ------------------------------------------------------------------------------------------ the controller


def controller(folder: Path, cloud: dict[str, Any]) -> None:
    """Runs all jobs of a round to their end, or goes on with those of an earlier controller."""
    from ai_trains_ai.errors import NoCapacity, Transient
    from ai_trains_ai.fleet import Fleet, FleetTimes, Ledger
    from ai_trains_ai.fleet.hosted import HostedJob, HostedJobs
    from ai_trains_ai.providers.runpod.provider import RunpodProvider
    from ai_trains_ai.records import Budget, PodRequest
    from ai_trains_ai.store import RunFolder, Store
    from ai_trains_ai.transport.ssh import Patience

    def clock() -> float:
        return float(cloud["epoch"] + (time.time() - cloud["epoch"]) * SPEED)

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / SPEED)

    os.environ["RUNPOD_API_KEY"] = cloud["key"]
    run = RunFolder(folder)
    store = Store.open(run.database) if run.database.exists() else Store.create(run.database)
    provider = RunpodProvider(
        max_pods=PODS, base_url=cloud["url"], clock=clock, sleep=sleep,
        patience=Patience(connect=3.0, total=6.0, pause=0.05, keepalive=0.5),
    )  # fmt: skip
    ledger = Ledger(store, Budget(usd=50.0), clock, lambda event: None)
    times = FleetTimes(boot=180.0, search=60.0, poll=5.0, watch=WATCH)
    fleet = Fleet(provider, ledger, clock, f"ata-{folder.name}", times, sleep)
    jobs = HostedJobs(fleet, store, run.artifacts, clock, sleep, poll=10.0, attempts=20)

    async def work() -> None:
        while True:
            try:
                await fleet.start(PodRequest(("A40",)))
                break
            except (Transient, NoCapacity) as error:
                print(error, flush=True)
        done = await asyncio.gather(*(jobs.run(HostedJob(**job(folder, number))) for number in range(1, JOBS + 1)))
        assert all(placement.exit == 0 for placement in done), [p for p in done if p.exit != 0]
        await fleet.close()

    with run.writer():
        asyncio.run(work())
    print("done", flush=True)


def job(folder: Path, number: int) -> dict[str, Any]:
    """Half a second to two seconds of work, that tells a file outside of the pods of every time that it ran."""
    seconds = 0.5 + (number * 7 % 16) / 10
    command = f"echo {number} >>{folder}/executions; sleep {seconds}; mkdir out; expr $(cat number) '*' 2 >out/answer"
    return {"id": f"job-{number}", "files": {"number": str(number).encode()}, "command": command, "seconds": 600.0}


# ------------------------------------------------------------------------------------------ the killer


class Cloud:
    """The local Runpod in a process of its own."""

    def __init__(self, folder: Path) -> None:
        ready = folder / "cloud.json"
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"}
        command = [sys.executable, "-m", "fakes.runpod", "--folder", str(folder / "cloud"), "--ready", str(ready)]
        self.process = subprocess.Popen([*command, "--speed", str(SPEED), "--balance", "1000"], env=environment)
        while not ready.exists():
            if self.process.poll() is not None:
                raise SystemExit("the local Runpod did not start")
            time.sleep(0.05)
        self.said = json.loads(ready.read_text())

    def ask(self, **what: Any) -> Any:
        url = self.said["url"].removesuffix("/v2") + "/_admin"
        request = urllib.request.Request(url, json.dumps(what).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def chaos(kills: int, seed: int, faults: bool, folder: Path) -> dict[str, Any]:
    """Kill controllers until ``kills`` are dead and all rounds are finished; what came of it."""
    draw = random.Random(seed)
    cloud = Cloud(folder)
    total: Counter[str] = Counter()
    booked = away = 0.0
    try:
        while total["kills"] < kills:
            place = folder / f"round-{total['rounds']}"
            place.mkdir()
            died: float | None = None
            while True:
                if faults:
                    for _ in range(draw.choice((0, 1, 1, 2))):
                        cloud.ask(fault=fault(draw))
                process = start(place, cloud.said)
                try:
                    wait = draw.uniform(0.3, LONGEST) if total["kills"] < kills else ROUND_SECONDS
                    code = process.wait(wait)
                except subprocess.TimeoutExpired:
                    if total["kills"] >= kills:
                        raise SystemExit(f"the controller of {place} hangs") from None
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    total["kills"] += 1
                    died = time.time()
                    continue
                if code != 0:
                    raise SystemExit(f"the controller of {place} ended with status {code}; see its log")
                break
            total["rounds"] += 1
            away += 0.0 if died is None else time.time() - died
            usd, found = verdict(place)
            booked += usd
            total += found
        state = cloud.ask(state=True)
        (folder / "state.json").write_text(json.dumps(state))
    finally:
        cloud.close()
    hourly = sum(pod["price"] for pod in state["pods"])
    return {
        **{name: total[name] for name in ("kills", "rounds", "jobs", "lost", "wrong", "counted_twice", "run_again")},
        "pods": len(state["pods"]),
        "leaked": len(state["alive"]) + len(state["processes"]),
        "booked_usd": booked,
        "spent_usd": state["spent"],
        "allowed_usd": max(0.01 * state["spent"], hourly * WATCH / 3600),
    }


def fault(draw: random.Random) -> dict[str, Any]:
    """One of the service or of a machine, at a moment drawn."""
    if draw.random() < 0.5:
        what = draw.choice(MACHINE_FAULTS)
        return {"on": "boot", "do": what, "at": draw.uniform(0, 120), "seconds": 60.0}
    if draw.random() < 0.5:
        return {"on": "create", "do": draw.choice(CREATE_FAULTS), "lag": draw.choice((0.0, 10.0, 30.0))}
    return {"on": draw.choice(("list", "delete", "get", "catalog")), "do": draw.choice(REQUEST_FAULTS)}


def start(folder: Path, cloud: dict[str, Any]) -> subprocess.Popen[bytes]:
    log = (folder / "controller.log").open("ab")
    command = [sys.executable, __file__, "--controller", str(folder), json.dumps(cloud)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_STATE_HOME": str(folder.parent / "state")}
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def verdict(folder: Path) -> tuple[float, Counter[str]]:
    """Dollars in the round's books, and what is wrong with its jobs."""
    from ai_trains_ai.store import RunFolder, Store

    run = RunFolder(folder)
    store = Store.open(run.database, write=False)
    ended = [placement for placement in store.placements() if placement.state == "ended"]
    answers = {p.job_id: (run.artifacts / p.job_id / "out/answer").read_text() for p in ended if p.exit == 0}
    executed = Counter((folder / "executions").read_text().split())
    charged = Counter(charge.subject for _, charge in store.charges() if charge.kind == "busy")
    found = Counter(
        jobs=JOBS,
        lost=JOBS - len(ended),
        wrong=sum(answers.get(f"job-{n}") != f"{2 * n}\n" for n in range(1, JOBS + 1)),
        counted_twice=len(ended) - len({p.job_id for p in ended}),
        run_again=sum(executed.values()) - JOBS,
        unpaid=JOBS - len(charged),
    )
    assert not store.leases(), "leases were left open"
    assert all(rental.state == "ended" for rental in store.rentals()), "rentals were left open"
    usd = sum(charge.usd for _, charge in store.charges())
    store.close()
    return usd, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", action="store_true", help="also faults of the service and of its machines")
    parser.add_argument("--folder", type=Path, help="where to work; kept")
    parser.add_argument("--controller", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.controller:
        controller(Path(options.controller[0]), json.loads(options.controller[1]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        begin = time.time()
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = chaos(options.kills, options.seed, options.faults, folder.absolute())
    for name, value in figures.items():
        print(f"{name:<14} {value:.4f}" if isinstance(value, float) else f"{name:<14} {value}")
    print(f"{'seconds':<14} {time.time() - begin:.0f}")
    off = abs(figures["booked_usd"] - figures["spent_usd"])
    bad = {name: figures[name] for name in ("leaked", "lost", "wrong", "counted_twice") if figures[name]}
    if off > figures["allowed_usd"]:
        bad["ledgers apart, USD"] = off
    if bad:
        raise SystemExit(f"failed: {bad}")


if __name__ == "__main__":
    main()
