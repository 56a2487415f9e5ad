"""The prime-rl runner on this machine, with the stand-in engine in place of prime-rl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import evolve
from fakes import engine
from inner.prime_rl.jobs import free_ports

from ai_trains_ai.inner.prime_rl.memory import Shape
from ai_trains_ai.inner.prime_rl.runner import PrimeRLRunner
from ai_trains_ai.inner.prime_rl.shipment import Deadlines
from ai_trains_ai.inner.prime_rl.surface import KEYS
from ai_trains_ai.interfaces import GPUProvider
from ai_trains_ai.providers.local import LocalProvider
from ai_trains_ai.records import TaskLimits, TrainingJob, content_hash

SHAPES = (Shape("Qwen/Qwen3-0.6B", 2, 8, 16, 2, 64, 1, 4), Shape("Qwen/Qwen3-1.7B", 2, 16, 32, 2, 64, 1, 4))
"""As small as the stand-in's models are: what fits where is tested elsewhere."""
QUICK = Deadlines(launch=60.0, environment=60.0, inference=60.0, preflight=60.0, gpu=20.0, first_step=60.0, step=60.0)
ENVIRONMENT = b"# an agent's environment\n"
ROWS = tuple(f'{{"idx": {i}, "prompt": "start {i} add 2 ->", "answer": "{i + 2}"}}' for i in range(8))


def runner(folder: Path, provider: GPUProvider | None = None, **options: Any) -> PrimeRLRunner:
    """A runner on stand-ins below ``folder``.

    ``fault`` is what goes wrong there, ``said`` what a pre-flight says, ``told`` what a program writes before its end.
    ``learns``: the environment is played, and a tiny model trained, for real.
    """
    learns = options.pop("learns", False)
    said, fault, told = options.pop("said", ""), options.pop("fault", ""), options.pop("told", None)
    programs = engine.install(folder / "engine", fault=fault, gpus=2, preflight=said, told=told, learns=learns)
    defaults: dict[str, Any] = {
        "models": SHAPES,
        "gpu_types": ["NVIDIA A40"],
        "own_user": False,  # the interpreter of the tests may be nobody else's to run
        "preflight": bool(said) or learns,
        "engine": str(programs),
        "models_folder": str((engine.learning_models if learns else engine.models)(folder / "models")),
        "ports": free_ports(),
        "deadlines": QUICK,
        "poll": 0.05,
    }
    return PrimeRLRunner(provider or LocalProvider(root=str(folder / "machine")), **{**defaults, **options})


def job(name: str = "job", source: bytes = ENVIRONMENT, **changes: Any) -> TrainingJob:
    """A small job; ``__`` in a changed key is a dot."""
    config = {key.path: key.default for key in KEYS}
    config |= {"max_steps": 3, "batch_size": 16, "group_size": 4, "seq_len": 256, "sampling.max_completion_tokens": 16}
    config |= {path.replace("__", "."): value for path, value in changes.items()}
    files = {"environment.py": source, "job.toml": b""}
    limits = TaskLimits(seconds=60.0)
    return TrainingJob(
        name, "episode", "task", SHAPES[0].name, files, config, {}, ROWS, 7, limits, content_hash(files)
    )  # fmt: skip


def with_limit(job: TrainingJob, seconds: float) -> TrainingJob:
    return evolve(job, limits=TaskLimits(seconds=seconds))
