"""The built-in parts, registered like any plugin's. Factories are import strings: listing imports nothing heavy."""

from __future__ import annotations

from ai_trains_ai.plugins.hookspecs import Register, hookimpl


@hookimpl
def register_outer_trainers(register: Register) -> None:
    register(
        "embedded",
        "ai_trains_ai.outer.embedded:EmbeddedOuterTrainer",
        summary="a tiny job-writing language model, trained by GRPO in NumPy",
        extra="embedded",
    )
    register(
        "tinker",
        "ai_trains_ai.outer.tinker:TinkerOuterTrainer",
        summary="a large model with a LoRA adapter, sampled and trained on Tinker",
        extra="tinker",
    )
    register(
        "frozen",
        "ai_trains_ai.outer.frozen:FrozenOuterTrainer",
        summary="any model behind an OpenAI-compatible endpoint, without training",
        extra="frozen",
    )


@hookimpl
def register_job_runners(register: Register) -> None:
    register(
        "embedded",
        "ai_trains_ai.inner.embedded:EmbeddedJobRunner",
        summary="GRPO on tiny Qwen3 models in NumPy, one jailed process a job",
        extra="embedded",
    )
    register(
        "prime-rl",
        "ai_trains_ai.inner.prime_rl.runner:PrimeRLRunner",
        summary="prime-rl GRPO on rented GPUs, one job a machine",
        extra="prime-rl",
    )


@hookimpl
def register_gpu_providers(register: Register) -> None:
    register("local", "ai_trains_ai.providers.local:LocalProvider", summary="this machine, one CPU slot per core")
    register("ssh", "ai_trains_ai.providers.ssh:SSHProvider", summary="machines of your own, over SSH", extra="ssh")
    runpod = "ai_trains_ai.providers.runpod.provider:RunpodProvider"
    register("runpod", runpod, summary="pods rented from Runpod, over its REST API", extra="runpod")
    register(
        "runpod-sdk",
        "ai_trains_ai.providers.runpod.sdk:RunpodSDKProvider",
        summary="Runpod over its official SDK: spot pods and the balance, until early 2027",
        extra="runpod-sdk",
    )


@hookimpl
def register_rewards(register: Register) -> None:
    hybrid = "ai_trains_ai.rewards.hybrid:HybridReward"
    register("hybrid", hybrid, summary="0.35 validation, 0.60 job quality, 0.05 train speed, hardened")
    register("hybrid-published", f"{hybrid}.published", summary="the published arithmetic, without the gates")


@hookimpl
def register_task_families(register: Register) -> None:
    rooms = "ai_trains_ai.families"
    register(
        "chained-arithmetic",
        f"{rooms}.chained_arithmetic:ChainedArithmetic",
        summary="a chain of operations modulo ten",
    )
    register("multi-hop", f"{rooms}.multi_hop:MultiHop", summary="follow links through a small graph")
    register("triage", f"{rooms}.triage:Triage", summary="an on-call alert to severity and team")


@hookimpl
def register_sandboxes(register: Register) -> None:
    register(
        "bubblewrap",
        "ai_trains_ai.sandbox.bubblewrap:BubblewrapSandbox",
        summary="Linux namespaces around a pre-warmed fork server",
        extra="embedded",
    )


@hookimpl
def register_trackers(register: Register) -> None:
    register("jsonl", "ai_trains_ai.trackers.jsonl:JsonlTracker", summary="metrics.jsonl in the run folder")
