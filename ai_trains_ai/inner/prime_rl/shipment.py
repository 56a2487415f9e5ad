"""What travels to a pod with a job: the order for the supervisor, the compiled config, the frozen rows, and our code.

The submission goes beside them as it was validated; on the pod it is imported in the env server's process alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

from attrs import asdict, frozen

from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.inner.prime_rl.compile import compile_job
from ai_trains_ai.inner.prime_rl.memory import Machine, Shape, plan
from ai_trains_ai.inner.prime_rl.profiles import Profile, Site
from ai_trains_ai.inner.prime_rl.surface import KEYS
from ai_trains_ai.records import TrainingJob
from ai_trains_ai.workspace.names import check_path

POD: Final = "ai_trains_ai.inner.prime_rl.pod"
SANDBOX: Final = ("kernel", "seccomp")  # what the wall on the pod shares with the sandbox here
PRACTICE: Final = ("errors", "events", "interfaces", "records")  # what `families.practice` needs of the library
PORTS: Final = (8000, 5000, 5555)
SLOT_PORTS: Final = 10  # jobs beside each other on one machine have ports so far apart


@frozen
class Deadlines:
    """Seconds for each phase of a job on its pod.

    ``first_step`` and ``step`` are how long no training step may come (or six times the median one, if that is
    longer), ``shutdown`` what the orchestrator may take once the trainer is done, ``gpu`` how long memory of a former
    process may linger. The time of the training itself is the task's.
    """

    launch: float = 180.0
    environment: float = 180.0
    inference: float = 420.0
    preflight: float = 180.0
    gpu: float = 60.0
    first_step: float = 900.0
    step: float = 180.0
    shutdown: float = 30.0

    def total(self, training: float) -> float:
        """The longest that a job may take in all."""
        before = self.gpu + self.launch + 2 * self.environment + self.inference + 4 * self.preflight
        return before + training + self.shutdown + 300.0  # the look at the weights


DEADLINES: Final = Deadlines()


@frozen
class Engine:
    """prime-rl on the pods.

    Attributes:
        profile: its version.
        bin: the folder of its programs.
        models: the folder of base models, each below its hub name.
        uid: whom the env server runs as, where the pod is entered as root.
        own_user: whether a pod where that can't be is refused.
        preflight: play rollouts before the training, on the CPU and with the base model.
        deadlines: of the phases.
        ports: of the inference server, the env server and the rollout transport.
        poll: seconds between two looks of the supervisor.
    """

    profile: Profile
    bin: str = "/app/.venv/bin"
    models: str = "/models"
    uid: int = 64_001
    own_user: bool = True
    preflight: bool = True
    deadlines: Deadlines = DEADLINES
    ports: tuple[int, int, int] = PORTS
    poll: float = 1.0

    def site(self, folder: str, model: str, slot: int) -> Site:
        """Where a job in ``folder`` runs, on the ports of its slot."""
        inference, env, rollout = (port + SLOT_PORTS * slot for port in self.ports)
        return Site(
            f"{folder}/run",
            f"{self.models}/{model}",
            inference_port=inference,
            env_port=env,
            rollout_port=rollout,
            ready_seconds=int(self.deadlines.inference),
        )

    def command(self, module: str, order: str) -> str:
        """What starts one of our programs in the job's folder."""
        return f"PYTHONPATH=lib exec {self.bin}/python -m {POD}.{module} {order}"


def shipment(
    job: TrainingJob, engine: Engine, machine: Machine, model: Shape, folder: str, slot: int = 0
) -> dict[str, bytes]:
    """Every file that a job needs in ``folder`` on its pod, by relative path.

    Raises:
        WorkspaceError: a file of the job has a name that no workspace takes.
        ConfigurationError: the job does not fit on the machine, or its config is not one of the surface.
    """
    config, profile = job.config, engine.profile
    for path in job.files:
        check_path(path)
    if missing := [key.path for key in KEYS if key.path not in config]:
        raise ConfigurationError(f"The config of job {job.id} lacks {missing[0]!r}: give the resolved one.")
    fitting = plan(
        model,
        machine,
        seq_len=config["seq_len"],
        lora_rank=config["lora.rank"],
        optimizer=config["optim.type"],
        in_flight=config["max_inflight_episodes"],
    )
    site = engine.site(folder, model.name, slot)
    order = {
        "job": job.id,
        "bin": engine.bin,
        "site": {
            name: getattr(site, name) for name in ("folder", "model", "inference_port", "env_port", "rollout_port")
        },
        "layout": asdict(profile.layout),
        "gpus": machine.count,
        "max_steps": config["max_steps"],
        "group_size": config["group_size"],
        "lora_rank": config["lora.rank"],
        "sampling": {
            "temperature": config["sampling.temperature"],
            "max_tokens": config["sampling.max_completion_tokens"],
            "thinking": config["renderer.enable_thinking"],
        },
        "preflight": {"rollouts": 8, "tasks": 16} if engine.preflight else {"rollouts": 0, "tasks": 0},
        "uid": engine.uid + slot if engine.uid else 0,  # what is left of a job is ended by its user
        "own_user": engine.own_user,
        "deadlines": {**asdict(engine.deadlines), "train": job.limits.seconds},
        "poll": engine.poll,
    }
    return {
        "order.json": json.dumps(order).encode(),
        "rl.toml": compile_job(job, profile, fitting, site).encode(),
        "rows.jsonl": "".join(f"{row}\n" for row in job.rows).encode(),
        **{f"submission/{path}": data for path, data in job.files.items()},
        **modules(),
        **library(),
    }


@cache
def library() -> Mapping[str, bytes]:
    """Our code for the pod, below ``lib/``: packages with an empty ``__init__``, for the library's own wants more.

    With one they come before a library that may be installed there, too.
    """
    pod = resources.files(POD)
    mine = [file for file in pod.iterdir() if file.name.endswith(".py")]
    packages = ("ai_trains_ai", "ai_trains_ai/inner", "ai_trains_ai/inner/prime_rl", "ai_trains_ai/sandbox")
    found = {f"lib/{package}/__init__.py": b"" for package in packages}
    found |= {f"lib/{POD.replace('.', '/')}/{file.name}": file.read_bytes() for file in mine}
    sandbox = resources.files("ai_trains_ai.sandbox")
    for name in SANDBOX:
        found[f"lib/ai_trains_ai/sandbox/{name}.py"] = (sandbox / f"{name}.py").read_bytes()
    return found


@cache
def modules() -> Mapping[str, bytes]:
    """What the engine imports by the names in its config: ours where no agent code may be, the shim where it is.

    Beside the shim are the practice rows, which an agent's module may import.
    """
    sources = resources.files(f"{POD}.modules")

    def source(name: str) -> bytes:
        return (sources / f"{name}.py").read_bytes()

    library = resources.files("ai_trains_ai")
    families = [file for file in (library / "families").iterdir() if file.name.endswith(".py")]
    return {
        "modules/agent/ai_trains_ai/__init__.py": b"",
        **{f"modules/agent/ai_trains_ai/{name}.py": (library / f"{name}.py").read_bytes() for name in PRACTICE},
        **{f"modules/agent/ai_trains_ai/families/{file.name}": file.read_bytes() for file in families},
        "modules/trusted/ata_job.py": source("stub"),
        "modules/agent/ata_job.py": source("shim"),
        **{f"modules/{side}/ata_harness.py": source("harness") for side in ("trusted", "agent")},
    }


def adapter_config(base: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config that an adapter of a job with this config gets, by peft's names; ``None``: it trains whole weights."""
    rank = config.get("lora.rank", 0)
    if not rank:
        return None
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": config.get("lora.alpha", 0),
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }


def serve_order(
    engine: Engine, base: str, weights: str, config: Mapping[str, Any], *, port: int, max_model_len: int, seed: int = 0
) -> bytes:
    """The order for the server of checked weights; ``weights`` "" is the base model itself."""
    order = {
        "bin": engine.bin,
        "base": f"{engine.models}/{base}",
        "weights": weights,
        "adapter": adapter_config(base, config),
        "port": port,
        "max_model_len": max_model_len,
        "utilisation": 0.85,
        "seed": seed,
        "seconds": engine.deadlines.inference,
    }
    return json.dumps(order).encode()
