"""The programs of the stand-in engine: ``programs.py NAME FOLDER ARGUMENT…``. See the package."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAME, BIN = sys.argv[1], Path(sys.argv[2])
ARGUMENTS = sys.argv[3:]
FAULT = (BIN / "fault").read_text()
TOLD = json.loads((BIN / "told.json").read_text())
STEP_SECONDS = 0.3 if FAULT == "slow-steps" else 0.02


def log(level: str, message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {level: >7} {message}", flush=True)


def raises(line: str) -> None:
    """End as a program with a traceback does."""
    print(
        f'Traceback (most recent call last):\n  File "/app/src/main.py", line 9, in main\n    run(config)\n{line}',
        flush=True,
    )
    sys.exit(1)


def as_told() -> None:
    """Write what this program was told to, and end or stand still."""
    if TOLD and TOLD["program"] == NAME:
        print(TOLD["text"], end="", flush=True)
        if TOLD["status"] is not None:
            sys.exit(TOLD["status"])
        time.sleep(600)


def midway() -> None:
    """In the midst of training, where one that stands still keeps the other waiting."""
    as_told()
    if TOLD and TOLD["status"] is None:
        time.sleep(600)


def config() -> dict[str, Any]:
    path = Path(ARGUMENTS[ARGUMENTS.index("@") + 1])
    return dict(json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text()))


@contextlib.contextmanager
def on_gpu() -> Any:
    """Holds memory of the GPU, as nvidia-smi shows it, for as long as the process lives."""
    (BIN / f"gpu-{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}-{os.getpid()}").touch()
    yield


# ---------------------------------------------------------------------------------------------- the launcher


def rl() -> None:
    import tomli_w

    if FAULT == "config-unknown-key":
        print("1 validation error for RLConfig\norchestrator.buffer\n  Extra inputs are not permitted", flush=True)
        sys.exit(1)
    as_told()
    if FAULT == "launcher-hangs":
        time.sleep(600)
    whole = config()
    run = whole.get("run", {}).get("name", "")  # of later versions, where everything is below it
    folder = Path(whole["output_dir"]) / run / ("elsewhere" if FAULT == "configs-elsewhere" else "")
    source = whole["orchestrator"]["train"]["source"][0]
    address = f"tcp://127.0.0.1:{whole['orchestrator']['env_server_base_port']}"
    shared = {"max_steps": whole["max_steps"], "model": whole["model"], "output_dir": whole["output_dir"], "run": run}
    parts = {
        "trainer": {**shared, "trainer": whole["trainer"]},
        "orchestrator": {**shared, **whole["orchestrator"], "rollout_transport": whole["rollout_transport"]},
        "inference": {**whole["inference"], "model": {**whole["inference"].get("model", {}), **whole["model"]}},
        "envs/train/job": {"env": source["env"], "serve": {**source["serve"], "address": address}},
    }
    for name, part in parts.items():
        path = folder / "configs" / f"{name}.{'json' if run else 'toml'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(part) if run else tomli_w.dumps(part))
    log("INFO", f"Wrote subconfigs to {folder / 'configs'}")
    log("SUCCESS", "Dry run complete. To start an RL run locally, remove --dry-run from your command.")


# ---------------------------------------------------------------------------------------------- models that answer


class Model(ThreadingHTTPServer):
    """Answers chats by a function of its weights, the conversation and the seed."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, port: int, *weights: Path) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        digest = hashlib.sha256()
        for path in (path for folder in weights for path in sorted(folder.glob("*.safetensors"))):
            digest.update(path.read_bytes())
        self.weights = digest.hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Model

    def do_GET(self) -> None:
        self._send(200 if self.path == "/health" and FAULT != "vllm-never-ready" else 503, b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send(200, b"{}")
            return
        seed = asked.get("seed") if asked.get("temperature") else None
        text = hashlib.sha256(json.dumps([self.server.weights, asked["messages"], seed]).encode()).hexdigest()[:8]
        reply = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
        self._send(200, json.dumps(reply).encode())

    def log_message(self, format: str, *args: Any) -> None: ...

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def inference() -> None:
    about = config()
    if FAULT == "vllm-memory":
        print(
            "(EngineCore pid=4) ERROR 12-01 12:00:09 [core.py:866] ValueError: No available memory for the cache "
            "blocks. Try increasing gpu_memory_utilization.",
            flush=True,
        )
        sys.exit(1)
    with on_gpu():
        as_told()
        if FAULT == "vllm-exits-0":
            threading.Timer(1.0, lambda: os._exit(0)).start()
        Model(about["server"]["port"], Path(about["model"]["name"])).serve_forever()


def vllm() -> None:
    options = dict(argument[2:].split("=", 1) for argument in ARGUMENTS[2:] if "=" in argument)
    folders = [Path(ARGUMENTS[1])]
    if "--lora-modules" in ARGUMENTS:
        folders.append(Path(ARGUMENTS[ARGUMENTS.index("--lora-modules") + 1].partition("=")[2]))
        about = json.loads((folders[-1] / "adapter_config.json").read_text())
        if about["r"] > int(options["max-lora-rank"]):
            raises(f"ValueError: LoRA rank {about['r']} is greater than max_lora_rank {options['max-lora-rank']}.")
    for folder in folders:
        if not list(folder.glob("*.safetensors")):
            raises(f"OSError: Can't load the model for '{folder}'.")
    Model(int(options["port"]), *folders).serve_forever()


# ---------------------------------------------------------------------------------------------- the environment


def env_server() -> None:
    address = config()["serve"]["address"]
    source = (Path(os.environ["ATA_SUBMISSION"]) / "environment.py").read_text()
    if source.startswith("raise ") or FAULT == "environment-import":
        raises(
            "ImportError: Failed to load environment 'environment.py': ValueError: broken on purpose (environment.py:1)"
        )
    if FAULT == "reward-raises":
        log("ERROR", "Error calling reward function worth: 'NoneType' object has no attribute 'strip'")
    if FAULT == "environment-killed":
        threading.Timer(1.0, lambda: os.kill(os.getpid(), 9)).start()
    server = socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))
    while True:
        with contextlib.suppress(OSError), server.accept()[0] as client:
            client.sendall(b"ready")


# ---------------------------------------------------------------------------------------------- the training


def orchestrator() -> None:
    about = config()
    run = run_folder(about)
    transport = socket.create_server(("127.0.0.1", about["rollout_transport"]["port"]))
    address = ("127.0.0.1", about["env_server_base_port"])
    while not answers(address):
        time.sleep(0.05)
    run.mkdir(parents=True, exist_ok=True)
    if FAULT in ("zero-signal", "reward-raises"):
        for batch in range(1, 11):
            log("WARNING", f"Step 0 | empty train batch | consecutive empty batches: {batch}/10")
        raises("RuntimeError: 10 consecutive empty train batches")
    for step in range(1, about["max_steps"] + 1):
        if step > 2:
            midway()
        reward = min(1.0, 0.1 + 0.05 * step)
        row = {
            "train/agg/all/agent/reward/mean": reward,
            "train/agg/all/agent/is_truncated/mean": 0.0,
            "train/agg/all/agent/has_error/mean": 0.0,
        }
        append(run / "metrics.jsonl", {"step": step, "time": time.time(), **row})
        log(
            "SUCCESS",
            f"Step {step} | 0.02s | Reward {reward:.4f} | Trainable 16/16 (100.0%) | Turns 1.0 | Branches 1.0 | "
            "Max Off-Policy 0 | Error 0.0% | Truncation 0.0%",
        )
        while not (run / f"broadcasts/step_{step}/STABLE").exists():
            time.sleep(0.01)
            if FAULT == "stands-still" and step > 1:
                time.sleep(600)
    log("SUCCESS", "Orchestrator finished.")
    if FAULT == "orchestrator-lingers":
        time.sleep(600)
    if FAULT == "orchestrator-fails-at-the-end":
        raises("RuntimeError: the event loop is closed")
    transport.close()


def answers(address: tuple[str, int]) -> bool:
    """Whether the env server says that it is ready; a relay in between listens earlier."""
    with contextlib.suppress(OSError), socket.create_connection(address, 5) as client:
        return client.recv(10) == b"ready"
    return False


def run_folder(about: dict[str, Any]) -> Path:
    return Path(about["output_dir"]) / (about["run"] or "run_default")


def torchrun() -> None:
    about = config()
    later = bool(about["run"])
    folder, run, base = Path(about["output_dir"]), run_folder(about), Path(about["model"]["name"])
    rank = about["trainer"]["model"].get("lora", {}).get("rank", 0)
    tensors = (base / "model.safetensors").read_bytes()
    with on_gpu():
        while not (run / "metrics.jsonl").exists():  # rollouts come from the orchestrator
            time.sleep(0.02)
        for step in range(1, about["max_steps"] + 1):
            time.sleep(STEP_SECONDS)
            if step > 2:
                midway()
            if FAULT == "first-step-late":
                time.sleep(600)
            if FAULT == "gpu-lost":
                (BIN / "lost").touch()
                raises("[default0]:torch.AcceleratorError: CUDA error: unspecified launch failure")
            if FAULT == "trainer-memory":
                raises("[default0]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
            if FAULT == "disk-full":
                raises("[default0]:OSError: [Errno 28] No space left on device")
            if FAULT == "host-memory":
                os.kill(os.getpid(), 9)
            if FAULT == "broadcast":
                log("ERROR", "Error broadcasting weights for run 0: [Errno 13] Permission denied")
                time.sleep(600)
            if FAULT == "stands-still" and step > 1:
                time.sleep(600)
            broadcast = run / f"broadcasts/step_{step}"
            if rank:
                leave(broadcast, adapter(base, rank, step), "adapter_model.safetensors")
            else:
                leave(broadcast, changed(tensors, step))
            row = {"loss/mean": 0.1, "entropy/all/mean": 1.0, "mismatch_kl/all/mean": 0.001, "optim/grad_norm": 0.5}
            more = {"optim/lr": 1e-6, "perf/throughput": 900.0, "perf/peak_memory": 12.5, "time/step": STEP_SECONDS}
            append((run if later else folder) / "metrics.jsonl", {"step": step, "time": time.time(), **row, **more})
        if FAULT != "no-weights" and not later:
            leave(folder / f"weights/step_{about['max_steps']}", changed(tensors, about["max_steps"]))
        log("SUCCESS", "RL trainer finished!")
        if FAULT == "no-weights":
            for path in run.glob("broadcasts/*/STABLE"):
                path.unlink()


def changed(tensors: bytes, step: int) -> bytes:
    """Other values of the same form in the last tensor."""
    if FAULT == "untrained":
        return tensors
    if FAULT == "other-shapes":
        return tensors.replace(b"64, 8", b"32,16")  # as many values
    value = b"\xc0\x7f" if FAULT == "not-finite" else struct.pack("<H", 0x3F80 + min(step, 100))
    return tensors[:-2] + value


def adapter(base: Path, rank: int, step: int) -> bytes:
    """A LoRA pair for the base model's one linear layer, without its config."""
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    header, body = {}, b""
    for letter, shape in (("A", [rank, width]), ("B", [width, rank])):
        data = struct.pack("<H", 0x3F80 + min(step, 100)) * (rank * width)
        name = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.weight"
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def leave(folder: Path, weights: bytes, name: str = "model.safetensors") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(weights)
    (folder / "STABLE").touch()


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


# ---------------------------------------------------------------------------------------------- the driver


def nvidia_smi() -> None:
    """``--query-gpu`` alone, as the canary, the provider and the supervisor ask it."""
    if (BIN / "lost").exists():
        print("Unable to determine the device handle for GPU0000:01:00.0: Unknown Error")
        sys.exit(15)
    users = [path.name.split("-")[1:] for path in BIN.glob("gpu-*")]
    used = {device for device, pid in users if Path(f"/proc/{pid}").exists()}
    known = {
        "name": "NVIDIA A40",
        "driver_version": "570.1",
        "memory.total": "46068",
        "memory.used": "4",
        "ecc.errors.uncorrected.volatile.total": "0",
    }
    query = next(argument.partition("=")[2] for argument in ARGUMENTS if argument.startswith("--query-gpu="))
    for index in range(int((BIN / "gpus").read_text())):
        mine = {"index": str(index), **({"memory.used": "9000"} if str(index) in used else {})}
        print(", ".join({**known, **mine}[name] for name in query.split(",")))


PROGRAMS = {
    "rl": rl,
    "inference": inference,
    "vllm": vllm,
    "env-server": env_server,
    "orchestrator": orchestrator,
    "torchrun": torchrun,
    "nvidia-smi": nvidia_smi,
}
if __name__ == "__main__":
    PROGRAMS[NAME]()
