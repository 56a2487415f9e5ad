"""Runs one job of prime-rl on a pod: ``python -m …pod.supervisor order.json`` in the job's folder.

The engine's launcher wants a GPU for each of its processes and knows no deadlines, so only its dry run is used, which
checks the config and writes one for every process; the processes are started here, in order: inference alone on a clean
GPU, the environment behind its wall, then orchestrator and trainer. One code path serves one GPU and two.

Before the engine takes the GPU, the environment plays a few rollouts against a stand-in model on the CPU; before the
first training step, the base model shows whether its rewards differ at all. Whatever happens, everything is ended, the
GPU is looked at, and ``out/`` tells: ``verdict.json``, the ends of the logs, and the metrics.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ai_trains_ai.inner.prime_rl.pod import weights
from ai_trains_ai.inner.prime_rl.pod.confine import Confined, Limits, memory_of, probe, start
from ai_trains_ai.inner.prime_rl.pod.metrics import TRAINER, Rows
from ai_trains_ai.inner.prime_rl.pod.process import Process, alive, signal_all, tree, until_gone
from ai_trains_ai.inner.prime_rl.pod.surroundings import (
    INFERENCE,
    TRAINING,
    answers,
    free_port,
    gpu_memory,
    healthy,
    taken,
    variables,
    versions,
)
from ai_trains_ai.sandbox import kernel

POD = "ai_trains_ai.inner.prime_rl.pod"
LOG_BYTES = 256 << 10  # of each log that go back
USED_MIB = 1024  # memory of a GPU above which somebody uses it
OPEN_FILES = 32_000
MANY_ERRORS = 0.5  # share of a pre-flight's rollouts
STEPS = 6.0  # times the median step after which training stands still
WORKER_SECONDS = 20.0  # a process that was there for longer is a worker
ENVIRONMENT_BYTES = 12 << 30


@dataclass
class Verdict:
    """How a job ended; ``out/verdict.json``. Seconds are wall seconds.

    ``phase`` is what it was at, "done" when it trained to the end (or to its time: ``salvaged``). ``exits`` are of
    processes that ended by themselves. ``deadline`` is which one passed, ``found`` what was seen here (a code that the
    controller knows), ``detail`` its words. ``weights`` is the folder of complete and checked weights of ``step``.
    """

    phase: str = "launch"
    deadline: str = ""
    found: str = ""
    detail: str = ""
    exits: dict[str, int] = field(default_factory=dict)
    gpu: str = "clean"
    weights: str = ""
    step: int = 0
    salvaged: bool = False
    train_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    guarantee: str = ""
    preflight: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class Ended(Exception):
    """The job is over before its end; the verdict says why."""


class Stopped(BaseException):
    """Somebody outside wants it to end."""


class Supervisor:
    """One job. ``order`` is what the controller wrote, ``folder`` where the job lies."""

    def __init__(self, order: Mapping[str, Any], folder: Path) -> None:
        self._order, self._folder = order, folder
        self._site, self._layout, self._deadlines = order["site"], order["layout"], order["deadlines"]
        self._run, self._logs = Path(self._site["folder"]), folder / "logs"
        self._bin, self._poll = order["bin"], float(order["poll"])
        self._processes: dict[str, Process | Confined] = {}
        self._verdict = Verdict()
        self._phase_began = time.monotonic()
        self._rows = Rows({self._run / path for path in self._layout["metrics"].values()})
        self._step_times: list[float] = []
        self._last_step = 0.0
        self._workers: dict[int, float] = {}  # processes of the environment, and when they were first seen
        self._gone = False
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(order["gpus"])))
        self._devices = devices.split(",")[: order["gpus"]]
        name = f"ata-env-{self._site['env_port']}-"
        for stale in Path(tempfile.gettempdir()).glob(f"{name}*"):  # of a job here whose supervisor was killed
            shutil.rmtree(stale, ignore_errors=True)
        self._private = Path(tempfile.mkdtemp(prefix=name))  # what the environment sees of the job
        folder.chmod(0o700)  # and nothing else

    def run(self) -> Verdict:
        """The job from its start to its verdict; nothing of it is left running."""
        try:
            self._launch()
            self._try_environment()
            self._start_inference()
            self._start_environment()
            self._try_signal()
            self._train()
        except Ended:
            pass
        finally:
            self._end_all()
        self._collect()
        return self._verdict

    # ------------------------------------------------------------------------------------------ phases

    def _launch(self) -> None:
        """The engine checks the config and writes one for each of its processes."""
        self._enter("launch")
        self._verdict.versions = versions(self._bin)
        self._require_clean_gpu()
        self._require_free_ports()
        launcher = self._spawn("launcher", ["rl", "@", str(self._folder / "rl.toml"), "--dry-run"], self._trusted())
        status = launcher.wait(self._deadlines["launch"])
        if status is None:
            self._end("launcher")
            raise self._over(found="launch-slow", detail="the dry run did not end")
        self._end("launcher")
        missing = [path for path in self._layout["configs"].values() if not (self._run / path).is_file()]
        if status != 0 or missing:
            self._verdict.exits["launcher"] = status
            raise self._over(found="" if status else "no-configs", detail=f"the dry run wrote no {', '.join(missing)}")

    def _try_environment(self) -> None:
        """A few rollouts against a stand-in model, before the GPU is touched: broken code dies here."""
        rollouts = self._order["preflight"]["rollouts"]
        if not rollouts:
            return
        self._enter("environment")
        port = str(self._site["inference_port"])
        argv = ["python", "-m", f"{POD}.replies", "--port", port, "--model", self._site["model"]]
        self._spawn("replies", argv, self._trusted())
        self._await_http("replies", self._deadlines["environment"], "replies-start")
        self._start_environment()
        self._preflight(tasks=rollouts, group=1)
        self._end("env")
        self._end("replies")

    def _start_inference(self) -> None:
        self._enter("inference")
        device = {"CUDA_VISIBLE_DEVICES": self._devices[0]}
        self._spawn("inference", ["inference", "@", self._config("inference")], self._trusted(INFERENCE, device))
        self._await_http("inference", self._deadlines["inference"], "", deadline="inference")

    def _start_environment(self) -> None:
        """The only process that runs the agent's code, behind its wall."""
        self._enter("environment")
        if not self._verdict.guarantee:
            self._wall = probe(f"{self._bin}/python", self._order["uid"])
            self._verdict.guarantee = self._wall.text()
            self._say("guarantee", text=self._verdict.guarantee)
            if self._order["own_user"] and not self._wall.uid:
                raise self._over(found="no-user", detail=self._verdict.guarantee)
            self._share()
        mine = {
            "PYTHONPATH": str(self._private / "modules"),
            # a private /tmp is bounded as a whole
            "HOME": "/tmp" if self._wall.private_files else str(self._private / "home"),
            "ATA_SUBMISSION": str(self._private / "submission"),
        }
        self._processes["env"] = start(
            self._wall,
            [f"{self._bin}/env-server", "@", str(self._private / Path(self._layout["configs"]["env"]).name)],
            env=variables(self._bin, mine),
            cwd=self._private,
            log=self._log("env"),
            visible=[str(self._private), str(Path(self._bin).parent)],
            listen_port=self._site["env_port"],
            connect_port=self._site["inference_port"],
            limits=Limits(open_files=OPEN_FILES),
        )
        self._await(
            lambda: answers(self._site["env_port"]), "env", self._deadlines["environment"], deadline="env_server"
        )

    def _try_signal(self) -> None:
        """Where all rewards of the base model are equal there is nothing to learn: better said now than in an hour."""
        tasks = self._order["preflight"]["tasks"]
        if not tasks:
            return
        rewards = self._preflight(tasks=tasks, group=self._order["group_size"])
        groups = [[reward for reward in group if reward is not None] for group in rewards]
        if all(max(group) - min(group) < 1e-9 for group in groups if group):
            means = ", ".join(f"{statistics.fmean(group):.3g}" for group in groups[:8] if group)
            raise self._over(
                found="zero-signal", detail=f"{len(groups)} tasks, the rewards of each are all equal: {means}"
            )

    def _train(self) -> None:
        self._enter("training")
        began = self._last_step = time.monotonic()
        self._spawn("orchestrator", ["orchestrator", "@", self._config("orchestrator")], self._trusted())
        trainer = [
            "torchrun",
            "--role=trainer",
            f"--rdzv-endpoint=localhost:{free_port()}",
            f"--rdzv-id={uuid.uuid4().hex}",
            f"--log-dir={self._folder / 'logs' / 'torchrun'}",
            "--local-ranks-filter=0",
            "--redirect=3",
            "--tee=3",
            "--nproc-per-node=1",
            "-m",
            "prime_rl.trainer.rl.train",
            "@",
            self._config("trainer"),
        ]
        self._spawn("trainer", trainer, self._trusted(TRAINING, {"CUDA_VISIBLE_DEVICES": self._devices[-1]}))
        try:
            self._watch(began)
        finally:
            self._verdict.train_seconds = time.monotonic() - began
            self._progress()

    # ------------------------------------------------------------------------------------------ watching

    def _watch(self, began: float) -> None:
        """Until both have trained, one of them failed, nothing moves any more, or the time is over."""
        trained, log = 0.0, _Tail(self._log("trainer"))
        while True:
            time.sleep(self._poll)
            self._progress()
            now = time.monotonic()
            failed = self._ended()
            if self._verdict.exits.get("trainer") == 0:  # done; the orchestrator may take minutes to end
                trained = trained or now
                if "orchestrator" in self._verdict.exits or now - trained > self._deadlines["shutdown"]:
                    return
                continue
            if failed:
                raise self._over()
            if now - began > self._deadlines["train"]:
                self._verdict.salvaged = True
                return
            if log.has(b"Error broadcasting weights for run"):  # it is only logged, and everybody waits for ever
                raise self._over(deadline="broadcast", detail="the trainer could not broadcast its weights")
            gone = self._look_at_environment(now)
            if now - self._last_step > self._patience() / (3.0 if gone else 1.0):
                why = ", and a process of the environment is gone" if gone else ""
                raise self._over(deadline="step", detail=f"no step for {now - self._last_step:.0f} s{why}")

    def _ended(self) -> bool:
        """Note who ended by itself; whether that is a failure. Inference and environment must not end at all."""
        for name, process in self._processes.items():
            if name not in (*self._verdict.exits, "preflight") and (status := process.poll()) is not None:
                self._verdict.exits[name] = status
        return self._failed

    def _patience(self) -> float:
        if not self._step_times:
            return float(self._deadlines["first_step"])
        return max(float(self._deadlines["step"]), STEPS * statistics.median(self._step_times))

    def _look_at_environment(self, now: float) -> bool:
        """Whether a worker is gone: its rollouts hang, and nobody replaces it. What comes and goes is no worker."""
        engine = {pid for name, process in self._processes.items() if name != "env" for pid in tree(process.pid)}
        family = set(tree(os.getpid())) - engine - {os.getpid()}  # with its orphans, which are ours now
        if memory_of(family) > ENVIRONMENT_BYTES:
            raise self._over(found="environment-memory", detail=f"more than {ENVIRONMENT_BYTES >> 30} GiB")
        there = {member for member in family if alive(member)}
        for member in there:
            self._workers.setdefault(member, now)
        for member in self._workers.keys() - there:
            self._gone |= now - self._workers.pop(member) > WORKER_SECONDS
        return self._gone

    def _progress(self) -> None:
        for writer, step, values in self._rows.new():
            if writer == TRAINER:
                now = time.monotonic()
                self._step_times.append(now - self._last_step)
                self._last_step = now
            self._say("progress", step=step, writer=writer, metrics=values)

    # ------------------------------------------------------------------------------------------ processes

    def _spawn(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Process:
        process = Process([f"{self._bin}/{argv[0]}", *argv[1:]], env, self._folder, self._log(name))
        self._processes[name] = process
        return process

    def _end(self, name: str, grace: float = 0.0) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill(grace) if isinstance(process, Process) else process.kill()
        if name == "env":
            self._end_strays()

    def _end_strays(self) -> None:
        """End what descends from us and belongs to none of the processes: the environment's orphans."""
        known = {pid for process in self._processes.values() for pid in tree(process.pid)}
        strays = [pid for pid in tree(os.getpid()) if pid != os.getpid() and pid not in known]
        signal_all(strays, signal.SIGKILL)
        until_gone(strays)

    def _end_all(self) -> None:
        """Nothing of the job is left, and nobody holds the GPU. The environment goes first: it could meddle."""
        for name in ("env", *(name for name in list(self._processes) if name != "env")):
            self._end(name)
        self._end_strays()
        shutil.rmtree(self._private, ignore_errors=True)
        if self._verdict.gpu == "clean":
            self._verdict.gpu = self._gpu_state()

    def _await(
        self, ready: Callable[[], bool], name: str, seconds: float, *, found: str = "", deadline: str = ""
    ) -> None:
        """Wait for a process to be ready; its end, or ours of patience, ends the job."""
        until = time.monotonic() + seconds
        while not ready():
            if self._ended():
                status = self._verdict.exits.get(name)
                raise self._over() if status is None else self._over(found=found, detail=f"{name} ended ({status})")
            if time.monotonic() > until:
                raise self._over(found=found, deadline=deadline, detail=f"{name} was not ready after {seconds:.0f} s")
            time.sleep(min(self._poll, 0.5))

    def _await_http(self, name: str, seconds: float, found: str, *, deadline: str = "") -> None:
        url = f"http://127.0.0.1:{self._site['inference_port']}/health"
        self._await(lambda: healthy(url), name, seconds, found=found, deadline=deadline)

    def _preflight(self, *, tasks: int, group: int) -> list[list[float | None]]:
        """Play rollouts by the engine's own way to the environment; their rewards by task. Too many errors end it."""
        site, sampling = self._site, self._order["sampling"]
        arguments = {
            "address": f"tcp://127.0.0.1:{site['env_port']}",
            "base-url": f"http://127.0.0.1:{site['inference_port']}/v1",
            "model": site["model"],
            "tasks": tasks,
            "group": group,
            "temperature": sampling["temperature"],
            "max-tokens": sampling["max_tokens"],
            "thinking": int(sampling["thinking"]),
            "timeout": self._deadlines["preflight"],
        }
        argv = ["python", "-m", f"{POD}.preflight", *(f"--{name}={value}" for name, value in arguments.items())]
        log = self._log("preflight")
        log.unlink(missing_ok=True)
        client = self._spawn("preflight", argv, self._trusted())
        until = time.monotonic() + 2 * self._deadlines["preflight"]
        while client.poll() is None and time.monotonic() < until:
            others = {name: process.poll() for name, process in self._processes.items() if name != "preflight"}
            if any(status is not None for status in others.values()):
                self._ended()
                raise self._over()
            time.sleep(min(self._poll, 0.2))
        status = client.poll()
        self._end("preflight")
        try:
            found: dict[str, Any] = json.loads(log.read_bytes().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            raise self._over(found="preflight", detail=f"the pre-flight's client ended with status {status}") from None
        self._verdict.preflight = {**found, "rewards": found.get("rewards", [])[:32]}
        self._say("preflight", **{name: value for name, value in found.items() if name != "rewards"})
        if found.get("unhealthy"):
            raise self._over(deadline="env_server", detail="the env server does not answer")
        if found["errors"] >= MANY_ERRORS * found["rollouts"]:
            raise self._over(found="rollout-errors", detail=found["error"])
        rewards: list[list[float | None]] = found["rewards"]
        return rewards

    # ------------------------------------------------------------------------------------------ the pod

    def _trusted(self, *more: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process without agent code: it imports the stub of the taskset."""
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        paths = [str(self._folder / "modules" / "trusted"), str(self._folder / "lib")]
        mine = {"HOME": str(home), "PYTHONPATH": ":".join(paths), "ATA_ROWS": str(self._folder / "rows.jsonl")}
        return variables(self._bin, mine, *more)

    def _share(self) -> None:
        """Copy what the environment needs to where its user may read it."""
        self._private.chmod(0o755)
        shutil.copytree(self._folder / "submission", self._private / "submission")
        shutil.copytree(self._folder / "modules" / "agent", self._private / "modules")
        config = self._run / self._layout["configs"]["env"]
        shutil.copyfile(config, self._private / config.name)
        for path in self._private.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        home = self._private / "home"
        home.mkdir()
        if self._wall.uid:
            os.chown(home, self._wall.uid, self._wall.uid)

    def _require_clean_gpu(self) -> None:
        until = time.monotonic() + self._deadlines["gpu"]
        while (state := self._gpu_state(0.0)) != "clean":
            if state == "lost" or time.monotonic() > until:
                self._verdict.gpu = state
                raise self._over(found="gpu", detail=f"the GPU is {state} before anything was started")
            time.sleep(self._poll)

    def _gpu_state(self, patience: float = 20.0) -> str:
        """ "clean", "occupied" when somebody holds memory of ours, "lost" when the driver doesn't answer."""
        until = time.monotonic() + patience
        while True:
            used = gpu_memory(self._devices, variables(self._bin))
            if used is None:
                return "lost"
            if max(used) < USED_MIB:
                return "clean"
            if time.monotonic() > until:
                return "occupied"
            time.sleep(min(1.0, self._poll))

    def _require_free_ports(self) -> None:
        for name in ("inference_port", "env_port", "rollout_port"):
            if why := taken(self._site[name]):
                raise self._over(found="ports", detail=why)

    # ------------------------------------------------------------------------------------------ the verdict

    def _enter(self, phase: str) -> None:
        self._leave()
        self._verdict.phase = phase
        self._say("phase", phase=phase)

    def _leave(self) -> None:
        """Count the time of the phase that it was in; some are entered twice."""
        now, seconds = time.monotonic(), self._verdict.seconds
        seconds[self._verdict.phase] = seconds.get(self._verdict.phase, 0.0) + now - self._phase_began
        self._phase_began = now

    def _over(self, *, deadline: str = "", found: str = "", detail: str = "") -> Ended:
        verdict = self._verdict
        verdict.deadline, verdict.found, verdict.detail = deadline, found, detail[:600]
        return Ended()

    def _collect(self) -> None:
        """Take the weights, if training came far enough, and tell."""
        verdict = self._verdict
        over = verdict.exits.get("trainer") == 0 or verdict.salvaged
        whole = verdict.phase == "training" and over and not (verdict.deadline or verdict.found)
        hung = verdict.deadline in ("step", "broadcast", "weights")  # what a hang had trained before is good
        if whole:
            self._enter("weights")
        if whole or hung:
            self._take_weights(whole)
        self._leave()
        if whole and verdict.weights:
            verdict.phase = "done"
        out = self._folder / "out"
        (out / "logs").mkdir(parents=True, exist_ok=True)
        for log in self._logs.glob("*.log"):
            (out / "logs" / log.name).write_bytes(_end_of(log))
        for path in {self._run / path for path in self._layout["metrics"].values()}:
            if path.is_file():
                with (out / "metrics.jsonl").open("ab") as target:
                    target.write(path.read_bytes())
        partial = out / "verdict.partial"
        partial.write_text(json.dumps(asdict(verdict)))
        partial.rename(out / "verdict.json")
        self._say("end", phase=verdict.phase, step=verdict.step)

    @property
    def _failed(self) -> bool:
        exits = self._verdict.exits
        return any(status != 0 or name not in ("trainer", "orchestrator") for name, status in exits.items())

    def _take_weights(self, whole: bool) -> None:
        verdict, layout = self._verdict, self._layout
        names = ("weights", "broadcasts")
        templates = {name: layout[name] for name in names}
        found = weights.newest(self._run, templates, layout["marker"], self._order["max_steps"])
        if found is None:
            if whole and verdict.salvaged:
                verdict.found, verdict.detail = "over-time", "no step was complete when the time was over"
            return
        step, folder = found
        rank = 0 if self._merged(folder) else self._order["lora_rank"]
        odd = weights.check(folder, Path(self._site["model"]), rank)
        if odd and whole:
            known = {weights.UNTRAINED: "did-not-train", weights.NOT_FINITE: "not-finite"}
            verdict.found = next((code for end, code in known.items() if odd.endswith(end)), "bad-weights")
            verdict.detail = odd
        if not odd:
            verdict.step, verdict.weights = step, str(folder.relative_to(self._folder))

    def _merged(self, folder: Path) -> bool:
        return not (folder / "adapter_model.safetensors").is_file()

    def _config(self, process: str) -> str:
        return str(self._run / self._layout["configs"][process])

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    @staticmethod
    def _say(event: str, **values: Any) -> None:
        print(json.dumps({"event": event, "time": time.time(), **values}), flush=True)


class _Tail:
    """Looks for a text in what is added to a log."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def has(self, text: bytes) -> bool:
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._offset - len(text)))
                data = file.read()
                self._offset = file.tell()
        except FileNotFoundError:
            return False
        return text in data


def _end_of(path: Path) -> bytes:
    """The last bytes of a log, from the beginning of a line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        data = file.read()
    return data if size <= LOG_BYTES else data[data.find(b"\n") + 1 :]


def main(path: str) -> int:
    """Run the order in ``path``; 0 when there is a verdict, whatever it says."""

    def stop(*_: Any) -> None:
        raise Stopped

    kernel.adopt_orphans()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        Supervisor(json.loads(Path(path).read_text()), Path.cwd()).run()
    except Stopped:
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
