"""prime-rl as of 2026-08-21 (0.8.1.dev67, commit 559b44772): the layout after v0.8.0.

Broadcasts are the only weights in a form that others read, everything is below the run's name, the monitors have one
table, and vLLM's arguments are passed through unchecked: a wrong name among them shows when vLLM starts.
"""

from __future__ import annotations

from typing import Any, Final

from attrs import evolve

from ai_trains_ai.inner.prime_rl.profiles import v080
from ai_trains_ai.inner.prime_rl.profiles.base import Layout, Locks, Place, Site

RUN: Final = "job"

PLACES: Final = {
    **v080.PLACES,
    "max_inflight_episodes": Place("orchestrator.concurrency.max_inflight"),
    "filter_zero_advantages": Place("orchestrator.train.filter_zero_advantages"),
}

_GONE: Final = (
    "file_monitor.filename",
    "ckpt.keep_last",
    "trainer.ckpt.weights_only",
    "inference.seed",
    "inference.gpu_memory_utilization",
    "inference.model.max_model_len",
    "inference.vllm_extra.max_num_seqs",
)


def locked(site: Site, locks: Locks) -> dict[str, Any]:
    """What the harness sets, whatever the agent wrote."""
    kept = {path: value for path, value in v080.locked(site, locks).items() if path not in _GONE}
    return {
        **kept,
        "run.name": RUN,
        "orchestrator.model.client.base_url": site.inference_url,
        "monitors.file.path": "metrics.jsonl",
        "inference.vllm.seed": locks.seed,
        "inference.vllm.gpu_memory_utilization": locks.plan.utilisation,
        "inference.vllm.max_model_len": locks.seq_len,
        "inference.vllm.max_num_seqs": locks.plan.sequences,
    }


LAYOUT: Final = Layout(
    weights=f"{RUN}/broadcasts/step_{{step}}",
    broadcasts=f"{RUN}/broadcasts/step_{{step}}",
    marker="STABLE",
    metrics={"trainer": f"{RUN}/metrics.jsonl", "orchestrator": f"{RUN}/metrics.jsonl"},
    configs={
        "trainer": f"{RUN}/configs/trainer.json",
        "orchestrator": f"{RUN}/configs/orchestrator.json",
        "inference": f"{RUN}/configs/inference.json",
        "env": f"{RUN}/configs/envs/train/job.json",
    },
    logs={
        "trainer": f"{RUN}/logs/latest/trainer.log",
        "orchestrator": f"{RUN}/logs/latest/orchestrator.log",
        "inference": f"{RUN}/logs/latest/inference.log",
        "env": f"{RUN}/logs/latest/envs/train/job.log",
    },
    merged=False,
)

PROFILE: Final = evolve(
    v080.PROFILE,
    version="0.8.1.dev67",
    image="ghcr.io/primeintellect-ai/prime-rl:v0.8.1.dev67",
    verifiers="0.3.1.dev60",
    places=PLACES,
    locked=locked,
    layout=LAYOUT,
)
