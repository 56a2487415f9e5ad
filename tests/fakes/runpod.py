"""A local Runpod: the service's pods, stock, money and faults, served over HTTP, with real machines behind the pods.

`LocalRunpod` is what tests hold; `runpod_http` speaks REST v2 and `runpod_graphql` what the official SDK sends. Time is
simulated: `speed` seconds pass in one real second. `python -m fakes.runpod` serves the same in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import threading
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from fakes.pods import MACHINES, Machine, marked, variant
from fakes.runpod_records import CAPACITY, DATACENTERS, DISK, GPUS, HOUR, LIVE, OCI, Fault, PodState, Refused, actions

__all__ = ["CAPACITY", "GPUS", "Fault", "LocalRunpod", "PodState"]


class LocalRunpod:
    """The service with one account. Everything public may be used from any thread.

    Seconds are simulated ones, those in replies (``Retry-After``, uptime, time stamps) too. The account's limits are
    the documented ones: an hour of credit to create a pod, dollars per hour, a balance billed every five minutes.
    """

    def __init__(
        self,
        folder: Path,
        speed: float = 60.0,
        *,
        epoch: float | None = None,
        kind: str = "",
        balance: float = 50.0,
        spend_limit: float = 80.0,
        requests_per_minute: int = 60,
        provisioning: float = 5.0,
        pull: float = 20.0,
        sshd_after: float = 2.0,
        key_may_delete: bool = True,
    ) -> None:
        # sshd wants absolute paths
        self.folder, self.speed, self.kind = folder.absolute(), speed, kind or variant()
        self.epoch = time.time() if epoch is None else epoch
        self.key, self.balance, self.spend_limit = "rpa_" + secrets.token_hex(20).upper(), balance, spend_limit
        self.per_minute, self.tokens, self.refilled = requests_per_minute, float(requests_per_minute), self.clock()
        self.delays = {"provisioning": provisioning, "pull": pull, "sshd": sshd_after}
        self.key_may_delete = key_may_delete  # whether a pod's own key may end the pod: unverified on the real service
        self.gpus = dict(GPUS)
        self.stock = {(gpu, cloud, dc): 16 for gpu in GPUS for cloud in ("SECURE", "COMMUNITY") for dc in DATACENTERS}
        self.faults: list[Fault] = []
        self.pods: dict[str, PodState] = {}
        self.requests: list[tuple[float, str, str, int]] = []
        self.lock = threading.RLock()
        self.port = 0
        self._billed_at = self.clock()
        self._closing, self._thread = threading.Event(), threading.Thread(target=self._serve, daemon=True)
        self._up = threading.Event()
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------------------------------ serving

    def __enter__(self) -> LocalRunpod:
        self._thread.start()
        if not self._up.wait(30) or self._failure:
            raise RuntimeError(f"The local Runpod did not start: {self._failure}")
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(30)
        if self._failure is not None:
            raise RuntimeError(
                "The local Runpod failed while it served; its own error is the cause."
            ) from self._failure

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v2"

    @property
    def graphql_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def clock(self) -> float:
        return self.epoch + (time.time() - self.epoch) * self.speed

    async def sleep(self, seconds: float) -> None:
        """Wait for simulated seconds."""
        await asyncio.sleep(seconds / self.speed)

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._failure = error  # told by __enter__ and __exit__
            self._up.set()

    async def _run(self) -> None:
        from fakes.runpod_http import application

        runner = web.AppRunner(application(self), shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._up.set()
        try:
            while not self._closing.is_set():
                self.tick()
                await asyncio.sleep(0.01)
        finally:
            for pod in list(self.pods.values()):
                self._finish(pod, "TERMINATED")
            await runner.cleanup()

    def tick(self) -> None:
        """Do what is due by now."""
        with self.lock:
            now = self.clock()
            for pod in list(self.pods.values()):
                for plan in sorted((plan for plan in pod.plans if plan[0] <= now), key=lambda plan: plan[0]):
                    if plan in pod.plans:  # an earlier one may have ended the pod
                        pod.plans.remove(plan)
                        plan[1]()
            if now - self._billed_at >= 300:  # the service bills every five minutes
                self.balance -= sum(
                    pod.spent(k, self._billed_at, now) for pod in self.pods.values() for k in ("gpu", "disk")
                )
                self._billed_at = now
                if self.balance <= 0:
                    for pod in self.pods.values():
                        self._finish(pod, "TERMINATED")

    # ------------------------------------------------------------------------------------------ pods

    def create(
        self, name: str, gpu: str, count: int, cloud: str, places: list[str], bid: float | None = None, **rest: Any
    ) -> PodState:
        """Place a pod, or refuse as the service does. One with a `bid` per GPU pays that, and may be interrupted."""
        with self.lock:
            kind = self.gpus.get(gpu)
            if kind is None:
                raise Refused(400, f"gpu type {gpu!r} not found")
            limit = kind.max_secure if cloud == "SECURE" else kind.max_community
            if not 1 <= count <= limit:
                raise Refused(400, f"gpu.count must be between 1 and {limit} for {gpu} in {cloud}")
            price = round((kind.secure if cloud == "SECURE" else kind.community) * count, 4)
            if bid is not None:
                if bid < kind.least_bid:
                    raise Refused(400, CAPACITY)
                price = round(bid * count, 4)
            if self.balance < price:  # an hour of credit
                raise Refused(402, "insufficient balance: add credits to deploy this pod")
            if price + sum(pod.cost for pod in self.pods.values()) > self.spend_limit:
                raise Refused(402, f"insufficient spend limit: ${self.spend_limit:g} per hour")
            wanted = places or [dc for g, c, dc in self.stock if (g, c) == (gpu, cloud)]
            place = next((dc for dc in wanted if self.stock.get((gpu, cloud, dc), 0) >= count), None)
            if place is None:
                raise Refused(400, CAPACITY)
            self.stock[gpu, cloud, place] -= count
            pod = self._new(name, gpu, count, cloud, place, price, spot=bid is not None, **rest)
            pod.boot = self._take("boot")
            pull = (
                float(pod.boot.details.get("seconds", 0)) if pod.boot and pod.boot.do == "pull" else self.delays["pull"]
            )
            self._say(pod, "system", f"create container {pod.image}")
            self._plan(pod, self.delays["provisioning"], lambda: self._pull(pod))
            self._plan(pod, self.delays["provisioning"] + pull, lambda: self._boot(pod))
            return pod

    def _new(self, name: str, gpu: str, count: int, cloud: str, place: str, price: float, **rest: Any) -> PodState:
        now = self.clock()
        pod = PodState(secrets.token_hex(7), name, gpu, count, cloud, place, price=price, created=now, **rest)
        pod.bill(now, "gpu", price)
        self.pods[pod.id] = pod
        return pod

    def _pull(self, pod: PodState) -> None:
        pod.status = "STARTING"
        self._say(pod, "system", f"{pod.image} Pulling from registry")
        if pod.boot and pod.boot.do == "stuck":
            pod.plans.clear()
        elif pod.boot and pod.boot.do == "error":
            pod.plans.clear()
            self._plan(pod, self.delays["pull"], lambda: self._error(pod))

    def _error(self, pod: PodState) -> None:
        pod.status = "ERROR"
        self._say(pod, "system", f"error starting container: {OCI}")

    def _boot(self, pod: PodState) -> None:
        do, details = (pod.boot.do, pod.boot.details) if pod.boot else ("", {})
        kind = self.gpus[pod.gpu]
        smi = {
            "COUNT": str(details.get("count", 0) if do == "gpus" else pod.count),
            "NAME": "NVIDIA " + kind.name,
            "ID": pod.id,
            "DRIVER": "570.124.06",
            "CUDA": "12.8",
            "MEMORY": str(kind.memory * 1024),
            "USED": str(details.get("mib", 20000) if do == "busy" else 1),
            "ECC": str(details.get("count", 1) if do == "ecc" else 0),
        }
        env = {
            **pod.env,
            "RUNPOD_POD_ID": pod.id,
            "RUNPOD_DC_ID": pod.datacenter,
            "RUNPOD_API_KEY": self.pod_key(pod),
            "RUNPOD_GPU_COUNT": str(pod.count),
            "RUNPOD_PUBLIC_IP": "127.0.0.1",
        }
        public = pod.env.get("PUBLIC_KEY", "")
        pod.machine = MACHINES[self.kind](self.folder / "pods" / pod.id, pod.id, public, env, smi)
        if do == "silent":
            (pod.machine.folder / "bin/nvidia-smi").write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
        pod.status, pod.started = "RUNNING", self.clock()
        self._say(pod, "system", f"start container for {pod.image}: begin")
        # the images run sshd only with a key, and only when their own start script is what runs
        serves = bool(public.strip()) and (not pod.args.strip() or "/start.sh" in pod.args or "sshd" in pod.args)
        self._plan(pod, self.delays["sshd"], lambda: self._listen(pod, serves and do != "refuse"))
        if do != "no_direct" and "22/tcp" in pod.ports:
            self._plan(pod, self.delays["sshd"] / 2, lambda: setattr(pod, "direct", True))
        later = {"remap": self.remap, "die": lambda i: self.kill(i, "EXITED"), "freeze": self.freeze, "end": self.end}
        if do in later:
            self._plan(pod, self.delays["sshd"] + float(details.get("at", 0)), lambda: later[do](pod.id))
        if do == "freeze" and "seconds" in details:
            pause = float(details.get("at", 0)) + float(details["seconds"])
            self._plan(pod, self.delays["sshd"] + pause, lambda: self.thaw(pod.id))

    def _listen(self, pod: PodState, serves: bool) -> None:
        assert pod.machine is not None
        pod.machine.start(serves)
        if serves:
            self._say(pod, "container", f"SSH host keys: {pod.machine.fingerprint}")
            self._say(pod, "container", "Start script(s) finished, Pod is ready to use.")

    def _finish(self, pod: PodState, status: str) -> None:
        """Stop, loss of the host or end: the machine is gone, and the price with it."""
        with self.lock:
            if pod.status == status or pod.status == "TERMINATED":
                return
            if pod.status in LIVE and not pod.foreign:
                place = (pod.gpu, pod.cloud, pod.datacenter)
                self.stock[place] = self.stock.get(place, 0) + pod.count
            pod.status, pod.direct, now = status, False, self.clock()
            pod.plans.clear()
            if status == "TERMINATED":
                pod.ended = now
                pod.bill(now)
            else:
                size = pod.disk + pod.mounts.get("persistent", {}).get("size", 0)
                pod.bill(now, "disk", size * DISK["stopped"])
            if pod.machine is not None:
                pod.machine.kill()

    def act(self, pod: PodState, action: str) -> None:
        """What a request does to a pod."""
        with self.lock:
            pod.touched = True
            if action not in actions(pod):
                raise Refused(409, f"action {action} is not allowed while the pod is {pod.status}")
            if action == "terminate":
                self._finish(pod, "TERMINATED")
            elif action == "stop":
                self._finish(pod, "EXITED")
            elif action == "start":
                raise Refused(400, "There are not enough free GPUs on the host machine to start this pod.")
            # restart: answered with success, and nothing happens (seen on the real service)

    def find(self, pod_id: str) -> PodState:
        with self.lock:
            pod = self.pods.get(pod_id)
            if pod is None or pod.status == "TERMINATED" or pod.hidden_until > self.clock():
                raise Refused(404, "pod not found")
            return pod

    @property
    def listed(self) -> list[PodState]:
        with self.lock:
            now = self.clock()
            return [p for p in self.pods.values() if p.status != "TERMINATED" and p.hidden_until <= now]

    def pod_key(self, pod: PodState) -> str:
        return f"rpp_{pod.id}"

    def _take(self, *kinds: str) -> Fault | None:
        """The next fault for this, if any; it is used up."""
        with self.lock:
            found = next((fault for fault in self.faults if fault.on in kinds), None)
            if found is not None:
                self.faults.remove(found)
            return found

    def _plan(self, pod: PodState, delay: float, do: Any) -> None:
        pod.plans.append((self.clock() + delay, do))

    def _say(self, pod: PodState, source: str, line: str) -> None:
        pod.log.append((self.clock(), source, line))

    # ------------------------------------------------------------------------------------------ the test's side

    def add_foreign(self, name: str) -> str:
        """A pod of somebody else in the same account, running for long."""
        with self.lock:
            pod = self._new(
                *(name, "NVIDIA A40", 1, "SECURE", "US-KS-2", GPUS["NVIDIA A40"].secure),
                image="other/image",
                args="",
                disk=20,
                ports=["8888/http"],
                env={},
                mounts={},
            )
            pod.foreign, pod.status, pod.started = True, "RUNNING", pod.created
            return pod.id

    @property
    def foreign_untouched(self) -> bool:
        return not any(pod.touched for pod in self.pods.values() if pod.foreign)

    def end(self, pod_id: str) -> None:
        """Ended in the console."""
        self._finish(self.pods[pod_id], "TERMINATED")

    def kill(self, pod_id: str, status: str = "EXITED") -> None:
        """The host is lost."""
        self._finish(self.pods[pod_id], status)

    def interrupt(self, pod_id: str) -> None:
        """Somebody bid more for its GPU: it is stopped without notice."""
        assert self.pods[pod_id].spot
        self._finish(self.pods[pod_id], "EXITED")

    def freeze(self, pod_id: str) -> None:
        self._machine(pod_id).freeze()

    def thaw(self, pod_id: str) -> None:
        self._machine(pod_id).thaw()

    def remap(self, pod_id: str) -> None:
        self._machine(pod_id).remap()

    def root(self, pod_id: str) -> str:
        """The folder for jobs, as the pod sees it."""
        return self._machine(pod_id).root

    def _machine(self, pod_id: str) -> Machine:
        machine = self.pods[pod_id].machine
        if machine is None:
            raise RuntimeError(f"Pod {pod_id} has not booted yet; wait until it is RUNNING.")
        return machine

    @property
    def alive(self) -> list[str]:
        with self.lock:
            return [p.name for p in self.pods.values() if not p.foreign and p.status != "TERMINATED"]

    @property
    def spent(self) -> float:
        now = self.clock()
        ours = [pod for pod in list(self.pods.values()) if not pod.foreign]
        return sum(pod.spent(kind, 0.0, now) for pod in ours for kind in ("gpu", "disk"))

    @property
    def processes(self) -> list[int]:
        machines = [pod.machine for pod in list(self.pods.values()) if pod.machine]
        known = {pid for machine in machines for pid in machine.tree}
        return sorted(known.union(marked(*(machine.pod_id for machine in machines))))

    def assert_clean(self, booked_usd: float, poll: float = 10.0) -> None:
        """Nothing is left, nothing foreign was touched, and the books of the library agree with the cloud's."""
        assert not self.alive, f"pods that still cost money: {self.alive}"
        assert not self.processes, f"processes of pods that are still there: {self.processes}"
        assert self.foreign_untouched, "a pod that belongs to somebody else was touched"
        ours = [pod for pod in self.pods.values() if not pod.foreign]
        allowed = max(0.01 * self.spent, sum(pod.price for pod in ours) * poll / HOUR)
        assert abs(booked_usd - self.spent) <= allowed, f"booked {booked_usd:.6f}, spent {self.spent:.6f} dollars"


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a local Runpod until SIGTERM, or until the parent ends.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--speed", type=float, default=60.0)
    parser.add_argument("--epoch", type=float, default=None)
    parser.add_argument("--ready", type=Path, required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--per-minute", type=int, default=60)
    parser.add_argument("--balance", type=float, default=50.0)
    options = parser.parse_args()
    over, parent = threading.Event(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    with LocalRunpod(
        options.folder,
        options.speed,
        epoch=options.epoch,
        kind=options.variant,
        requests_per_minute=options.per_minute,
        balance=options.balance,
    ) as cloud:
        said = {
            "url": cloud.url,
            "graphql_url": cloud.graphql_url,
            "key": cloud.key,
            "epoch": cloud.epoch,
            "pid": os.getpid(),
        }
        temporary = options.ready.with_name(f"{options.ready.name}.{os.getpid()}")
        temporary.write_text(json.dumps(said))
        temporary.rename(options.ready)
        while not over.wait(0.2) and os.getppid() == parent:
            pass


if __name__ == "__main__":
    main()
