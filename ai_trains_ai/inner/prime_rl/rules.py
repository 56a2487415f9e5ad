"""The ways in which a prime-rl job fails, root causes first: the first rule that is proven names the failure.

A pattern is matched at the beginning of a line's message, after the logger's or torchrun's prefix, and every wildcard
in it is bounded: text inside of a line proves nothing, and no line takes long.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from attrs import field, frozen

from ai_trains_ai.inner.prime_rl.profiles import head, v080
from ai_trains_ai.records import FailureSide

Process = Literal["launcher", "inference", "env", "orchestrator", "trainer"]
Retry = Literal["same pod", "another pod", "never"]
Deadline = Literal["", "inference", "env_server", "step", "weights", "broadcast", "evaluation"]

V080: Final = v080.PROFILE.version
HEAD: Final = head.PROFILE.version

Patterns = tuple[re.Pattern[str], ...]


def _compile(patterns: tuple[str, ...]) -> Patterns:
    return tuple(re.compile(pattern) for pattern in patterns)


@frozen
class Rule:
    """One way to fail.

    Attributes:
        logs: Processes whose logs may prove it. The env server runs agent code: its log alone proves nothing.
        patterns: Beginnings of a line's message, any of which proves it.
        share: The first group of a pattern is a percentage that must be at least this in the last line that has it.
        times: So many lines must match.
        symptom: It proves nothing when a process of the engine failed: that has another cause.
        deadline: It is proven as well by the supervisor's deadline that passed.
        message: What happened and the remedy, for the agent.
        versions: Where it can occur.
    """

    code: str
    side: FailureSide
    retry: Retry
    message: str
    logs: tuple[Process, ...]
    patterns: Patterns = field(converter=_compile, default=())
    share: float = 0.0
    times: int = 1
    symptom: bool = False
    deadline: Deadline = ""
    versions: tuple[str, ...] = (V080, HEAD)


ALL: Final[tuple[Process, ...]] = ("launcher", "inference", "orchestrator", "trainer")
_RAISES: Final = r"(?:[\w.]{1,80}(?:Error|Exception|Exit): )?"
_NOT_YOURS: Final = "This is not a fault of the submission."
_ZERO_SIGNAL: Final = (
    "All rewards of a group were equal, batch after batch: there was nothing to learn. Use tasks that the base model "
    "solves sometimes, a reward with partial credit, a group_size of 8 or more, or a higher temperature."
)

RULES: Final = (
    # ------------------------------------------------------------------ before anything runs
    Rule(
        "run-dir",
        "infrastructure",
        "same pod",
        f"The output folder of the attempt was in use. {_NOT_YOURS} A retry gets a fresh folder.",
        ("launcher",),
        (r"FileExistsError: .{0,400}already contains (?:checkpoints|artifacts)\b",),
    ),
    Rule(
        "gpu-count",
        "infrastructure",
        "another pod",
        f"The machine has fewer GPUs than the deployment asks for. {_NOT_YOURS}",
        ("launcher",),
        (r"(?:ValueError: )?Requested \d{1,4} GPUs via deployment settings, but only \d",),
    ),
    Rule(
        "renderer",
        "infrastructure",
        "never",
        f"The chat renderer can't be told from the model's folder. {_NOT_YOURS} The operator sets the renderer's name.",
        ("launcher", "orchestrator"),
        (_RAISES + r"(?:Value error, )?.{0,200}is not in renderers\.base\.MODEL_RENDERER_MAP\b",),
    ),
    Rule(
        "config-unknown-key",
        "agent",
        "never",
        "prime-rl does not know a key of the config. Use the keys of the guide alone; the log names the key.",
        ("launcher",),
        (r"Extra inputs are not permitted\b",),
    ),
    Rule(
        "config-invalid",
        "agent",
        "never",
        "prime-rl refuses the config: values don't fit together. Repair what the log names.",
        ("launcher",),
        (r"(?:pydantic_core\.[\w.]{1,60}ValidationError: )?\d{1,4} validation errors? for RLConfig\b",),
    ),
    # ------------------------------------------------------------------ the machine
    Rule(
        "driver",
        "infrastructure",
        "another pod",
        f"The machine's GPU driver is too old for the image. {_NOT_YOURS}",
        ALL,
        (
            r".{0,200}\bunsatisfied condition: cuda>=12\.8",
            _RAISES + r"(?:CUDA error: )?no kernel image is available for execution",
            _RAISES + r".{0,80}\bCUDA driver version is insufficient for CUDA runtime version",
        ),
    ),
    Rule(
        "disk-full",
        "infrastructure",
        "another pod",
        f"The machine's disk is full. {_NOT_YOURS}",
        ALL,
        (
            _RAISES + r"(?:\[Errno 28\] )?No space left on device\b",
            r"Error broadcasting weights for run \S{1,40} .{0,40}No space left on device\b",
        ),
    ),
    Rule(
        "open-files",
        "infrastructure",
        "same pod",
        f"A process of the engine ran out of open files. {_NOT_YOURS} The operator raises the limit (ulimit -n 32000).",
        ("inference", "orchestrator", "trainer"),
        (_RAISES + r"(?:\[Errno 24\] )?Too many open files\b",),
    ),
    Rule(
        "ports",
        "infrastructure",
        "same pod",
        f"A port of the engine was in use, likely by a process of an earlier job. {_NOT_YOURS}",
        # Inference and launcher start before agent code does; a later port can be taken by agent code.
        ("launcher", "inference"),
        (
            r"(?:OSError: )?\[Errno 98\] ",
            _RAISES + r"Address already in use\b",
            r"(?:\S{1,40} )?EADDRINUSE\b",
        ),
    ),
    Rule(
        "hub",
        "infrastructure",
        "same pod",
        f"The engine asked the model hub, which refused or is out of reach. {_NOT_YOURS} Models belong into the image.",
        ALL,
        (
            r"(?:[\w.]{1,80}Error: )?429 Client Error: Too Many Requests\b",
            r"(?:[\w.]{1,80}\.)?LocalEntryNotFoundError\b",
            r"OSError: We couldn't connect to 'https://huggingface\.co'",
        ),
    ),
    Rule(
        "flash-attention",
        "infrastructure",
        "never",
        f"The attention kernels of the image don't fit the GPU. {_NOT_YOURS} The operator sets flash_attention_2.",
        ("trainer",),
        (
            r"(?:ModuleNotFoundError|ImportError): No module named 'flash_attn'",
            _RAISES + r"flash-attn-cute has probably been overwritten\b",
            r"ValueError: .{0,80}(?:flash_attention_3|Flash ?Attention 3|FA3)\b.{0,120}Hopper",
        ),
    ),
    Rule(
        "router",
        "infrastructure",
        "never",
        f"The inference router is not installed or ended. {_NOT_YOURS} The operator sets router to None.",
        ("launcher", "inference"),
        (r"FileNotFoundError: .{0,80}'vllm-router'", _RAISES + r"Router exited with code -?\d"),
    ),
    Rule(
        "wandb",
        "infrastructure",
        "never",
        f"Weights & Biases failed. {_NOT_YOURS} The operator leaves it out.",
        ("orchestrator", "trainer"),
        (r"wandb\.(?:errors|sdk)\.[\w.]{1,80}Error\b",),
    ),
    # ------------------------------------------------------------------ inference
    Rule(
        "vllm-arguments",
        "infrastructure",
        "never",
        f"vLLM does not know an argument that the harness passed. {_NOT_YOURS} The version's profile needs repair.",
        ("inference",),
        (
            r"(?:[\w.-]{1,40}: )?error: unrecognized arguments: ",
            r"TypeError: .{0,40}AsyncEngineArgs\b",
        ),
        versions=(HEAD,),
    ),
    Rule(
        "vllm-memory",
        "infrastructure",
        "same pod",
        f"vLLM found too little free GPU memory. {_NOT_YOURS} A retry checks that the GPU is clean.",
        ("inference",),
        (
            r"ValueError: No available memory for the cache blocks\b",
            r"ValueError: Free memory on device .{0,160}is less than desired GPU memory utilization\b",
            r"(?:AssertionError: )?Error in memory profiling\. Initial free memory\b",
        ),
    ),
    Rule(
        "model-name",
        "infrastructure",
        "never",
        f"The served model has another name than the one asked for. {_NOT_YOURS} The version's profile needs repair.",
        ("orchestrator",),
        (_RAISES + r"Model .{1,200} was not found in the inference pool\b",),
    ),
    # ------------------------------------------------------------------ training
    Rule(
        "trainer-memory",
        "agent",
        "never",
        "The trainer ran out of GPU memory. Halve seq_len or batch_size, or train a LoRA adapter (lora.rank).",
        ("trainer",),
        (r"torch\.(?:cuda\.)?OutOfMemoryError: CUDA out of memory\.",),
    ),
    Rule(
        "nccl",
        "infrastructure",
        "another pod",
        f"Communication between GPUs failed. {_NOT_YOURS}",
        ("inference", "trainer"),
        (
            _RAISES + r"NCCL error\b",
            r"ncclUnhandledCudaError\b",
            r"(?:\[[^\]]{1,80}\] ?){0,4}Watchdog caught collective operation timeout\b",
            _RAISES + r"NCCL weight broadcast requires at least 2 GPUs\b",
        ),
    ),
    Rule(
        "vllm-dead",
        "infrastructure",
        "another pod",
        f"The inference engine died. {_NOT_YOURS}",
        ("inference",),
        (
            r"(?:[\w.]{1,80}\.)?EngineDeadError\b",
            r"(?:Engine core proc )?EngineCore\S{0,20} (?:.{0,40} )?died\b",
        ),
    ),
    Rule(
        "vllm-not-ready",
        "infrastructure",
        "another pod",
        f"The inference server did not become ready in time. {_NOT_YOURS}",
        ("orchestrator",),
        (
            _RAISES + r"Inference server was not reached after \d",
            _RAISES + r"Inference server is not ready after \d{1,6} \(>\d{1,6}\) seconds\. Aborting\b",
        ),
        deadline="inference",
    ),
    Rule(
        "broadcast",
        "infrastructure",
        "same pod",
        f"The trainer could not hand new weights to the inference server. {_NOT_YOURS}",
        ("trainer",),
        (r"Error broadcasting weights for run \S",),
        deadline="broadcast",
        versions=(V080,),
    ),
    Rule(
        "weights-wait",
        "infrastructure",
        "same pod",
        f"New weights did not reach the inference server in time. {_NOT_YOURS}",
        ("orchestrator",),
        (_RAISES + r"Weights .{0,200}not found\b",),
        deadline="weights",
    ),
    Rule(
        "uv-script",
        "infrastructure",
        "never",
        f"The engine's stock harness wants a package index. {_NOT_YOURS} The operator ships the in-process harness.",
        ("launcher", "orchestrator"),
        (_RAISES + r"failed to prepare uv script\b",),
    ),
    Rule(
        "evaluation-hang",
        "infrastructure",
        "same pod",
        f"An evaluation inside of the run did not end. {_NOT_YOURS} The operator leaves such evaluations out.",
        (),
        deadline="evaluation",
    ),
    # ------------------------------------------------------------------ the submission
    Rule(
        "environment-import",
        "agent",
        "never",
        "The environment can't be imported or loaded. Run environment.py by itself and repair what it raises.",
        ("launcher", "orchestrator", "env"),
        (
            _RAISES + r"Could not import '[^']{1,80}' environment\b",
            _RAISES + r"(?:Module )?.{0,80}does not expose load_environment\b",
            _RAISES + r"Failed to load environment '?[\w./-]{1,80}",
            _RAISES + r"taskset '[^']{1,80}' not found \(tried to import\b",
            _RAISES + r".{0,80}defines no __all__\b",
        ),
    ),
    Rule(
        "environment-start",
        "agent",
        "never",
        "The environment did not start in time. Build its data faster, and download nothing.",
        ("orchestrator",),
        (_RAISES + r"env server at \S{1,80} did not become healthy in \d",),
        deadline="env_server",
    ),
    Rule(
        "zero-signal",
        "agent",
        "never",
        _ZERO_SIGNAL,
        ("orchestrator",),
        (r"RuntimeError: \d{1,3} consecutive empty train batches\b",),
    ),
    Rule(
        "zero-signal",
        "agent",
        "never",
        _ZERO_SIGNAL,
        ("orchestrator",),
        (
            r"empty train batch .{0,200}consecutive empty batches: (?:[5-9]|10)/10",
            r"(?:[5-9]|\d\d) consecutive zero-output batch equivalents\b",
        ),
        symptom=True,
    ),
    Rule(
        "not-finite",
        "agent",
        "never",
        "The training diverged: gradients or losses are no finite numbers. Lower optim.lr.",
        ("trainer",),
        (
            r"Step \d{1,7} \|.{0,160}\| Grad\. Norm (?:nan|inf)\b",
            r"Dropping \d{1,6} non-finite value",
        ),
        symptom=True,
    ),
    Rule(
        "rollout-errors",
        "agent",
        "never",
        "Half of the rollouts or more ended in an error. Repair what the environment raises, or make it faster.",
        ("orchestrator",),
        (r"Step \d{1,7} \|.{0,240}\| Error (\d{1,3}(?:\.\d{1,4})?)%",),
        share=50.0,
        symptom=True,
    ),
    Rule(
        "truncation",
        "agent",
        "never",
        "Half of the replies or more were cut off. Raise sampling.max_completion_tokens, or turn thinking off "
        "(renderer.enable_thinking = false).",
        ("orchestrator",),
        (r"Step \d{1,7} \|.{0,320}\| Truncation (\d{1,3}(?:\.\d{1,4})?)%",),
        share=50.0,
        symptom=True,
    ),
    Rule(
        "staleness",
        "agent",
        "never",
        "Rollouts became too old before the trainer took them. Lower max_inflight_episodes or raise "
        "max_off_policy_steps.",
        ("orchestrator",),
        (r"Dropped \d{1,7} queued (?:traces|rollouts) past max_off_policy_steps\b",),
        times=3,
        symptom=True,
    ),
    Rule(
        "environment-hang",
        "agent",
        "same pod",
        "Training stood still: the environment answered no more. Bound every loop of it, and the time of every reward.",
        (),
        deadline="step",
    ),
)
"""Rules that evidence proves."""

EXPLANATIONS: Final = (
    next(rule for rule in RULES if rule.code == "environment-import"),
    Rule(
        "reward-raises",
        "agent",
        "never",
        "A reward function raises, and each raise counts as reward 0. Repair the function that the evidence names.",
        ("env",),
        (r"Error calling (?:group )?reward function \w{1,80}:",),
        versions=(V080,),
    ),
    Rule(
        "rollout-errors",
        "agent",
        "never",
        "Rollouts ended in an error. Repair what the environment raises, or make it faster.",
        ("env",),
        (r"request failed: ",),
    ),
)
"""What the env server's log may add to a failure that is the agent's already."""

EXPLAINED: Final = ("unknown", "environment-start", "zero-signal", "rollout-errors", "environment-hang")
"""Failures of the agent's that the env server's log explains."""

HOST_MEMORY: Final = Rule(
    "host-memory",
    "infrastructure",
    "another pod",
    f"The machine ran out of memory and killed a process of the engine. {_NOT_YOURS}",
    (),
)
ENVIRONMENT_MEMORY: Final = Rule(
    "host-memory",
    "agent",
    "never",
    "The environment was killed, as happens when memory is short. Hold less data at a time.",
    (),
)
NO_WEIGHTS: Final = Rule(
    "no-weights",
    "infrastructure",
    "same pod",
    f"Training ended well but left no weights. {_NOT_YOURS} The operator compares the profile with the engine.",
    (),
)
INFERENCE_ENDED: Final = next(rule for rule in RULES if rule.code == "vllm-dead")
POD_LOST: Final = Rule(
    "pod-lost", "infrastructure", "another pod", f"The machine or its GPU was lost. {_NOT_YOURS}", ()
)
GPU_OCCUPIED: Final = Rule(
    "vllm-memory",
    "infrastructure",
    "another pod",
    f"The GPU's memory is taken by processes that are not of this job. {_NOT_YOURS}",
    (),
)
UNKNOWN: Final = Rule(
    "unknown", "infrastructure", "another pod", "The job failed in a way that no rule knows; the last lines follow.", ()
)
UNKNOWN_ENVIRONMENT: Final = Rule(
    "unknown",
    "agent",
    "never",
    "The environment's process ended in a way that no rule knows; its last lines follow. Run environment.py by itself.",
    (),
)


def _rule(code: str) -> Rule:
    return next(rule for rule in RULES if rule.code == code)


FOUND: Final = {
    "gpu": GPU_OCCUPIED,
    "ports": _rule("ports"),
    "launch-slow": Rule(
        "launch-slow", "infrastructure", "another pod", f"The engine's dry run did not end. {_NOT_YOURS}", ()
    ),
    "no-configs": Rule(
        "no-configs",
        "infrastructure",
        "never",
        f"The engine's dry run wrote its configs elsewhere. {_NOT_YOURS} The version's profile needs repair.",
        (),
    ),
    "replies-start": Rule(
        "pre-flight", "infrastructure", "another pod", f"The pre-flight's model did not start. {_NOT_YOURS}", ()
    ),
    "preflight": Rule(
        "pre-flight", "infrastructure", "another pod", f"The pre-flight's client failed. {_NOT_YOURS}", ()
    ),
    "no-user": Rule(
        "no-user",
        "infrastructure",
        "another pod",
        f"Agent code can't have a user of its own on the machine. {_NOT_YOURS} The operator lets everybody run the "
        "engine's interpreter and enters the machine as root, or trusts agent code (own_user=False).",
        (),
    ),
    "rollout-errors": _rule("rollout-errors"),
    "zero-signal": _rule("zero-signal"),
    "environment-memory": ENVIRONMENT_MEMORY,
    "over-time": Rule(
        "over-time",
        "agent",
        "never",
        "Not one training step was complete when the time was over. Use a smaller batch_size or shorter replies.",
        (),
    ),
    "not-finite": _rule("not-finite"),
    "did-not-train": Rule(
        "did-not-train",
        "agent",
        "never",
        "The weights are those of the base model: every step left them as they were. Raise optim.lr, and see that "
        "rewards differ.",
        (),
    ),
    "bad-weights": Rule(
        "bad-weights",
        "infrastructure",
        "another pod",
        f"The engine's weights are not those of the base model's shape. {_NOT_YOURS}",
        (),
    ),
}
"""What the supervisor sees by itself, by its word for it."""
