"""Logs of failed prime-rl jobs, made of the engine's own messages in different surroundings.

Each case: the code that it shows, the process whose log it is, the last lines, and how the job ended otherwise.
"""

# ruff: noqa: E501 (lines of logs are as long as they are)

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from ai_trains_ai.inner.prime_rl.rules import HEAD, V080, Process


@frozen
class Case:
    code: str
    process: Process
    text: str
    versions: tuple[str, ...] = (V080, HEAD)
    ending: dict[str, Any] = field(factory=dict)


def raised(line: str, before: str = "12:03:11    INFO Starting") -> str:
    """A process that ends with a traceback."""
    return (
        f"{before}\nTraceback (most recent call last):\n"
        '  File "/app/src/prime_rl/entrypoints/main.py", line 88, in main\n    run(config)\n'
        f"{line}\n"
    )


def fatal(line: str) -> str:
    """The same as loguru prints it, in colours and with values."""
    return (
        "\x1b[2m12:03:11\x1b[0m \x1b[1m  ERROR\x1b[0m \x1b[22mFatal error in main\x1b[0m\n"
        "Traceback (most recent call last):\n\n"
        '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
        '> File "/app/src/prime_rl/main.py", line 12, in main\n'
        "    run(config)\n    │   └ Config(name='job')\n    └ <function run at 0x7f>\n\n"
        f"{line}\n"
    )


def logged(level: str, message: str) -> str:
    return f"12:00:01    INFO Starting\n12:04:09 {level: >7} {message}\n12:04:10    INFO Shutting down\n"


def vllm(message: str) -> str:
    return f"(EngineCore pid=412) ERROR 12-01 12:00:09 [core.py:866] {message}\n(APIServer pid=400) INFO 12-01 12:00:10 [launcher.py:44] Bye\n"


def rank(message: str) -> str:
    return f'[rank0]: Traceback (most recent call last):\n[rank0]:   File "/app/train.py", line 3, in <module>\n[rank0]: {message}\n'


def invalid(detail: str) -> str:
    return f"1 validation error for RLConfig\norchestrator.buffer\n  {detail}\n    For further information visit pydantic\n"


def step(error: float, truncation: float) -> str:
    return (
        "12:05:00 SUCCESS Step 7 | 15.20s | Reward 0.1000 | Trainable 8/64 (12.5%) | Turns 1.0 | Branches 1.0 "
        f"| Max Off-Policy 1 | Error {error}% | Output 200 | Truncation {truncation}%\n"
    )


STALLED: dict[str, Any] = {"deadline": "step", "exits": {}}


def stalled(code: str, text: str, **changes: Any) -> Case:
    return Case(code, "orchestrator", text, ending=STALLED, **changes)


CASES = (
    Case(
        "run-dir", "launcher", raised("FileExistsError: Output directory /out already contains checkpoints from a run")
    ),
    Case("run-dir", "launcher", fatal("FileExistsError: Run directory /out/job already contains artifacts")),
    Case("gpu-count", "launcher", raised("ValueError: Requested 2 GPUs via deployment settings, but only 1 physical")),
    Case("gpu-count", "launcher", fatal("ValueError: Requested 4 GPUs via deployment settings, but only 2 physical")),
    Case("renderer", "launcher", invalid("Value error, '/models/a' is not in renderers.base.MODEL_RENDERER_MAP. Set")),
    Case("renderer", "orchestrator", fatal("ValueError: '/models/a' is not in renderers.base.MODEL_RENDERER_MAP")),
    Case("config-unknown-key", "launcher", invalid("Extra inputs are not permitted [type=extra_forbidden]")),
    Case("config-unknown-key", "launcher", "ERROR: rl.toml\n\n" + invalid("Extra inputs are not permitted [type=x]")),
    Case(
        "config-invalid", "launcher", raised("pydantic_core._pydantic_core.ValidationError: " + invalid("Value error"))
    ),
    Case("config-invalid", "launcher", "2 validation errors for RLConfig\n" + invalid("Value error, Batch size must")),
    Case(
        "driver", "trainer", rank("RuntimeError: CUDA error: no kernel image is available for execution on the device")
    ),
    Case(
        "driver", "inference", raised("RuntimeError: The CUDA driver version is insufficient for CUDA runtime version")
    ),
    Case("driver", "launcher", "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, update\n"),
    Case("disk-full", "trainer", rank("OSError: [Errno 28] No space left on device: '/out/weights/step_4'")),
    Case("disk-full", "orchestrator", fatal("OSError: [Errno 28] No space left on device")),
    Case("open-files", "inference", raised("OSError: [Errno 24] Too many open files")),
    Case("open-files", "orchestrator", fatal("OSError: [Errno 24] Too many open files: '/out/traces.jsonl'")),
    Case(
        "ports",
        "inference",
        "INFO:     Started server\nERROR:    [Errno 98] error while attempting to bind on address\n",
    ),
    Case("ports", "inference", raised("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:13345')")),
    Case("hub", "trainer", rank("OSError: We couldn't connect to 'https://huggingface.co' to load the files")),
    Case("hub", "inference", raised("requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: x")),
    Case("hub", "inference", vllm("huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate file")),
    Case("flash-attention", "trainer", rank("ModuleNotFoundError: No module named 'flash_attn'")),
    Case(
        "flash-attention", "trainer", raised("ImportError: flash-attn-cute has probably been overwritten by flash-attn")
    ),
    Case("router", "inference", raised("FileNotFoundError: [Errno 2] No such file or directory: 'vllm-router'")),
    Case("router", "inference", fatal("RuntimeError: Router exited with code 1")),
    Case("wandb", "orchestrator", fatal("wandb.errors.CommError: Run initialization has timed out after 90.0 sec")),
    Case("wandb", "trainer", rank("wandb.errors.errors.CommError: shared mode needs a primary writer")),
    Case("vllm-arguments", "inference", "usage: x\ninference: error: unrecognized arguments: --bogus 1\n", (HEAD,)),
    Case("vllm-arguments", "inference", raised("TypeError: AsyncEngineArgs.__init__() got an unexpected key"), (HEAD,)),
    Case("vllm-memory", "inference", vllm("ValueError: No available memory for the cache blocks. Try increasing")),
    Case(
        "vllm-memory",
        "inference",
        raised(
            "ValueError: Free memory on device (3.1/44.4 GiB) on startup is less than desired GPU memory utilization (0.45)"
        ),
    ),
    Case("vllm-memory", "inference", raised("AssertionError: Error in memory profiling. Initial free memory 20.1 GiB")),
    Case("model-name", "orchestrator", fatal("ValueError: Model '/models/a' was not found in the inference pool")),
    Case("model-name", "orchestrator", raised("ValueError: Model Qwen/Qwen3 was not found in the inference pool on x")),
    Case("trainer-memory", "trainer", rank("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")),
    Case(
        "trainer-memory", "trainer", fatal("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB.")
    ),
    Case("trainer-memory", "trainer", "[default0]:[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to\n"),
    Case(
        "nccl", "trainer", rank("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, unhandled")
    ),
    Case(
        "nccl",
        "trainer",
        "[rank0]:[E1201 12:00:00.1 ProcessGroupNCCL.cpp:6] [Rank 0] Watchdog caught collective operation timeout: Work\n",
    ),
    Case("vllm-dead", "inference", vllm("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue")),
    Case(
        "vllm-dead",
        "inference",
        vllm("Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."),
        ending={"exits": {"inference": 0}},
    ),
    Case("vllm-not-ready", "orchestrator", fatal("TimeoutError: Inference server was not reached after 420 seconds")),
    Case(
        "vllm-not-ready",
        "orchestrator",
        raised("TimeoutError: Inference server is not ready after 421 (>420) seconds. Aborting..."),
    ),
    Case(
        "broadcast", "trainer", logged("ERROR", "Error broadcasting weights for run 0: [Errno 13] Permission"), (V080,)
    ),
    Case(
        "broadcast",
        "trainer",
        "12:00:01   ERROR Error broadcasting weights for run 0: timed out\n",
        (V080,),
        {"exits": {}},
    ),
    Case("weights-wait", "orchestrator", fatal("TimeoutError: Weights for step 3 not found after 1200 seconds")),
    Case("weights-wait", "orchestrator", raised("FileNotFoundError: Weights /out/broadcasts/step_3 not found")),
    Case("uv-script", "orchestrator", fatal("ProgramError: failed to prepare uv script: no index")),
    Case("uv-script", "launcher", raised("RuntimeError: failed to prepare uv script")),
    Case(
        "environment-import",
        "launcher",
        raised("ModuleNotFoundError: taskset 'ata-job' not found (tried to import 'ata_job')"),
    ),
    Case("environment-import", "orchestrator", fatal("AttributeError: module 'ata_job' defines no __all__")),
    Case(
        "environment-start",
        "orchestrator",
        fatal("TimeoutError: env server at tcp://127.0.0.1:5000 did not become healthy in 600s"),
    ),
    Case(
        "environment-start",
        "orchestrator",
        logged("ERROR", "env server at tcp://127.0.0.1:5000 did not become healthy in 600s"),
    ),
    Case("zero-signal", "orchestrator", fatal("RuntimeError: 10 consecutive empty train batches")),
    stalled("zero-signal", logged("WARNING", "empty train batch at step 3 (consecutive empty batches: 7/10)")),
    Case("not-finite", "trainer", logged("WARNING", "Dropping 3 non-finite value(s) of step 4"), ending=STALLED),
    Case(
        "not-finite",
        "trainer",
        "12:05:00 SUCCESS Step 4 | 9.1s | Loss 0.1 | Entropy 0.2 | Grad. Norm nan | LR 1e-3\n",
        ending=STALLED,
    ),
    stalled("rollout-errors", step(5, 1) + step(62.5, 80)),
    stalled("rollout-errors", step(100.0, 0) + "12:05:01    INFO Waiting\n"),
    stalled("truncation", step(1.0, 51.5)),
    stalled("truncation", step(0, 10) + step(0.0, 100.0) + "12:05:01    INFO Waiting\n"),
    stalled("staleness", "12:05:00 WARNING Dropped 12 queued rollouts past max_off_policy_steps\n" * 3),
    stalled("staleness", ("12:05:00 WARNING Dropped 4 queued traces past max_off_policy_steps=8\n" + step(0, 0)) * 4),
)
