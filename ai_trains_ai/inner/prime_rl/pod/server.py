"""Serves trained weights, or a base model, on the pod: ``python -m …pod.server serve.json`` in the job's folder.

Started when nothing of a training job is left. The weights are checked again, put beside the base model's own config
and tokenizer, and served by vLLM on the pod's loopback, where the controller gets in through its tunnel. Requests are
logged nowhere. It prints one JSON object a line: ``ready`` with the port, or ``refused`` with the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ai_trains_ai.inner.prime_rl.pod import weights
from ai_trains_ai.inner.prime_rl.pod.process import Process
from ai_trains_ai.inner.prime_rl.pod.surroundings import INFERENCE, healthy, taken, variables

NAME = "policy"


class Refused(Exception):
    """It can't be served; says why."""


def serve(order: dict[str, Any], folder: Path) -> None:
    """Serve until somebody ends this process."""
    base = Path(order["base"])
    trained = Path(order["weights"]) if order["weights"] else None
    adapter = order["adapter"] if trained and (trained / "adapter_model.safetensors").is_file() else None
    if trained is not None and (odd := weights.check(trained, base, adapter["r"] if adapter else 0)):
        raise Refused(f"the weights can't be served: {odd}")
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    weights.lay_out(model, trained, base, adapter)
    server = Process(command(order, model, adapter), _environment(order, folder), folder, folder / "logs" / "serve.log")
    try:
        _wait(server, order)
        print(json.dumps({"event": "ready", "port": order["port"], "model": NAME}), flush=True)
        while server.poll() is None:
            time.sleep(0.5)
        raise Refused(f"vLLM ended with status {server.poll()}: {_last_words(folder / 'logs' / 'serve.log')}")
    finally:
        server.kill(grace=5.0)


def command(order: dict[str, Any], model: Path, adapter: dict[str, Any] | None) -> list[str]:
    """vLLM's command line. ``--generation-config vllm`` keeps the model's own sampling defaults out of the score."""
    argv = [
        f"{order['bin']}/vllm",
        "serve",
        str(model),
        "--host=127.0.0.1",
        f"--port={order['port']}",
        f"--max-model-len={order['max_model_len']}",
        f"--gpu-memory-utilization={order['utilisation']}",
        f"--seed={order['seed']}",
        "--generation-config=vllm",
        "--disable-uvicorn-access-log",
        "--no-enable-log-requests",
    ]
    if adapter is None:
        return [*argv, f"--served-model-name={NAME}"]
    rank = max(8, adapter["r"])  # vLLM takes powers of two from 8 on
    rank = 1 << (rank - 1).bit_length()
    return [
        *argv,
        "--served-model-name=base",
        "--enable-lora",
        f"--max-lora-rank={rank}",
        "--lora-modules",
        f"{NAME}={model / 'adapter'}",
    ]


def _environment(order: dict[str, Any], folder: Path) -> dict[str, str]:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    device = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
    return variables(order["bin"], INFERENCE, device, {"HOME": str(home)})


def _wait(server: Process, order: dict[str, Any]) -> None:
    until = time.monotonic() + order["seconds"]
    while not healthy(f"http://127.0.0.1:{order['port']}/health"):
        if server.poll() is not None or time.monotonic() > until:
            ended = f"ended with status {server.poll()}" if server.poll() is not None else "is not ready"
            raise Refused(f"vLLM {ended} after {order['seconds']:.0f} s at most: {_last_words(Path('logs/serve.log'))}")
        time.sleep(0.2)


def _last_words(log: Path) -> str:
    try:
        lines = log.read_bytes()[-4000:].decode("utf-8", "backslashreplace").strip().splitlines()
    except OSError:
        return "it left no log"
    return " / ".join(lines[-3:])[-600:]


def main(path: str) -> int:
    """Serve the order in ``path``; 1 when it was refused."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    order = json.loads(Path(path).read_text())
    try:
        if why := taken(order["port"]):
            raise Refused(why)
        serve(order, Path.cwd())
    except Refused as refused:
        print(json.dumps({"event": "refused", "why": str(refused)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
