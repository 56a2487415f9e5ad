"""What processes on the pod see of it, and the few questions that are asked of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

KEPT = (
    "AITA_JOB",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
)
"""What processes see of the pod's environment, beside the name of the job; keys of the pod's provider are not in it."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_MODE": "disabled",
}
COMMON = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
INFERENCE = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    "VLLM_ENGINE_READY_TIMEOUT_S": "4200",
}
TRAINING = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def variables(programs: str, *more: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a process: what is kept, the engine's ``programs`` first in the path, and ``more``."""
    found = {name: os.environ[name] for name in KEPT if name in os.environ}
    found |= {"PATH": f"{programs}:{os.environ.get('PATH', '/usr/bin:/bin')}", **COMMON, **OFFLINE}
    for extra in more:
        found |= extra
    return found


def healthy(url: str) -> bool:
    """Whether a server says that it is ready."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def answers(port: int) -> bool:
    """Whether somebody listens on a port of the loopback."""
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return int(probing.getsockname()[1])


def taken(port: int) -> str:
    """Why a port of the loopback can't be had; "" when it can."""
    with socket.socket() as probing:
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probing.bind(("127.0.0.1", port))
        except OSError as error:
            return f"port {port} is taken: {error.strerror}"
    return ""


def gpu_memory(devices: Sequence[str], env: Mapping[str, str]) -> list[int] | None:
    """MiB in use on each device, by index; ``None`` when the driver doesn't know them all."""
    said = _output(["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"], env)
    lines = [line.split(",") for line in said.splitlines() if line.count(",") == 1]
    used = {index.strip(): int(mib) for index, mib in lines if mib.strip().isdigit()}
    return [used[device] for device in devices] if used.keys() >= set(devices) else None


def versions(programs: str) -> dict[str, str]:
    """Of the engine and what it stands on, as far as they are installed as packages."""
    script = (
        "import importlib.metadata as m, json\nfound = {}\n"
        "for name in ('prime-rl', 'verifiers', 'vllm', 'torch'):\n"
        "    try: found[name] = m.version(name)\n    except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    )
    try:
        return dict(json.loads(_output([f"{programs}/python", "-c", script])))
    except ValueError:
        return {}


def _output(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """What a short command prints; "" when it fails."""
    try:
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
