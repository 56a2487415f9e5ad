"""Cost of a rollout on the pod: our in-process harness against the stock one, in one run, as a ratio.

Run: ``python benchmarks/harness.py``. Real env servers of the installed verifiers play a single-turn environment
against the stand-in model. Prints rollouts per second, and CPU time of the env server and its children per rollout.
The stock harness needs ``uv`` and a package index; where it has none, only ours is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ai_trains_ai.inner.prime_rl.pod import preflight
from ai_trains_ai.inner.prime_rl.shipment import POD, modules

ENVIRONMENT = """
import verifiers.v1 as vf
__all__ = ["Rows"]
class Check(vf.Task[vf.TaskData]):
    @vf.reward
    async def long(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) / 1000
class Rows(vf.Taskset[Check, vf.TasksetConfig]):
    def load(self):
        return []
"""
SERVE = """
import json, sys
import verifiers.v1 as vf
from verifiers.v1.serve import env_config_data, serve_env
serve_env(
    max_workers=1, address=sys.argv[1], config_data=env_config_data(vf.resolve_env_config(json.loads(sys.argv[2])))
)
"""
HARNESSES = {"ata-harness": (64, 8), "null": (8, 1)}  # tasks and rollouts of each, all at once
ROUNDS = 3


def cpu(pid: int) -> float:
    """CPU seconds of a process and its ended children."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return int(probing.getsockname()[1])


def measure(folder: Path, harness: str, model_port: int) -> tuple[float, float]:
    """Rollouts per second and CPU seconds per rollout, of the best round after one that warms up."""
    tasks, group = HARNESSES[harness]
    port = free_port()
    agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    config = json.dumps({"taskset": {"id": "ata-job"}, "agent": agent})
    paths = {"PYTHONPATH": str(folder / "modules" / "agent"), "ATA_SUBMISSION": str(folder)}
    with (folder / "env.log").open("ab") as log:
        argv = [sys.executable, "-c", SERVE, f"tcp://127.0.0.1:{port}", config]
        server = subprocess.Popen(argv, env={**os.environ, **paths}, stdout=log, stderr=log)
    options = argparse.Namespace(
        address=f"tcp://127.0.0.1:{port}",
        base_url=f"http://127.0.0.1:{model_port}/v1",
        model="small",
        tasks=tasks,
        group=group,
        temperature=1.0,
        max_tokens=64,
        thinking=0,
        timeout=300.0,
    )
    rounds = []
    try:
        for _ in range(1 + ROUNDS):
            before = cpu(server.pid)
            found = asyncio.run(preflight.play(options))
            if found.get("errors", 1):
                raise RuntimeError(found.get("error", "The env server does not start: see its log."))
            count = found["rollouts"]
            rounds.append((count / found["seconds"], (cpu(server.pid) - before) / count))
    finally:
        server.terminate()
        server.wait()
    return max(speed for speed, _ in rounds[1:]), min(seconds for _, seconds in rounds[1:])


def main() -> None:
    results: dict[str, Any] = {}
    model_port = free_port()
    model = subprocess.Popen([sys.executable, "-m", f"{POD}.replies", "--port", str(model_port), "--model", "small"])
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for path, data in {**modules(), "environment.py": ENVIRONMENT.encode()}.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
            (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "say {n}"}}\n' for n in range(64)))
            os.environ["ATA_ROWS"] = str(folder / "rows.jsonl")
            sys.path.insert(0, str(folder / "modules" / "trusted"))
            for harness in HARNESSES:
                try:
                    results[harness] = speed, seconds = measure(folder, harness, model_port)
                except RuntimeError as error:
                    print(f"{harness:12} not measured: {error}")
                else:
                    print(f"{harness:12} {speed:7.1f} rollouts/s {1000 * seconds:8.1f} ms CPU per rollout")
    finally:
        model.terminate()
        model.wait()
    if len(results) == len(HARNESSES):
        (fast, cheap), (slow, dear) = results["ata-harness"], results["null"]
        print(f"ratio        {fast / slow:7.0f}            {dear / cheap:8.0f}")


if __name__ == "__main__":
    main()
