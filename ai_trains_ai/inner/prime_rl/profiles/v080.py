"""prime-rl v0.8.0: the last stable tag, and the default."""

from __future__ import annotations

from typing import Any, Final

from ai_trains_ai.inner.prime_rl.profiles.base import Layout, Locks, Place, Profile, Site

SOURCE: Final = "orchestrator.train.source[]"

PLACES: Final = {
    "max_steps": Place("max_steps"),
    "seq_len": Place("seq_len"),
    "batch_size": Place("orchestrator.batch_size"),
    "group_size": Place("orchestrator.group_size"),
    "max_inflight_episodes": Place("orchestrator.max_inflight_episodes"),
    "max_off_policy_steps": Place("orchestrator.max_off_policy_steps"),
    "sampling.temperature": Place("orchestrator.train.sampling.temperature"),
    "sampling.max_completion_tokens": Place("orchestrator.train.sampling.max_completion_tokens"),
    "renderer.enable_thinking": Place("orchestrator.renderer.enable_thinking"),
    "filter_zero_advantages": Place(
        "orchestrator.post_batch_filters", lambda drop: [{"type": "zero_advantage", "enforce": drop}]
    ),
    "algo.type": Place("orchestrator.algo.type"),
    "algo.length_penalty.num_output_tokens_weight": Place("orchestrator.algo.length_penalty.num_output_tokens_weight"),
    "optim.type": Place("trainer.optim.type"),
    "optim.lr": Place("trainer.optim.lr"),
    "optim.weight_decay": Place("trainer.optim.weight_decay"),
    "optim.max_norm": Place("trainer.optim.max_norm"),
    "scheduler.type": Place("trainer.scheduler.type"),
    "scheduler.warmup_steps": Place("trainer.scheduler.warmup_steps"),
    "scheduler.decay_steps": Place("trainer.scheduler.decay_steps"),
    "scheduler.min_lr": Place("trainer.scheduler.min_lr"),
    "loss.type": Place("trainer.loss.type"),
    "loss.dppo_mask_low": Place("trainer.loss.dppo_mask_low"),
    "loss.dppo_mask_high": Place("trainer.loss.dppo_mask_high"),
    "loss.ipo_threshold": Place("trainer.loss.ipo_threshold"),
    "loss.adv_tau": Place("trainer.loss.adv_tau"),
    "loss.kl_tau": Place("trainer.loss.kl_tau"),
    "lora.rank": Place("trainer.model.lora.rank"),
    "lora.alpha": Place("trainer.model.lora.alpha"),
    "lora.dropout": Place("trainer.model.lora.dropout"),
}


def locked(site: Site, locks: Locks) -> dict[str, Any]:
    """What the harness sets, whatever the agent wrote."""
    return {
        "output_dir": site.folder,
        "env_vars.HF_HUB_OFFLINE": "1",
        "model.name": site.model,
        "file_monitor.filename": "metrics.jsonl",  # off by default
        "ckpt.keep_last": 1,  # without a ckpt table no weights are written at all
        "trainer.ckpt.weights_only": True,
        "weight_broadcast.type": "filesystem",  # NCCL needs two GPUs and has crashed on rented machines
        "rollout_transport.type": "zmq",
        "rollout_transport.port": site.rollout_port,
        "orchestrator.env_server_base_port": site.env_port,
        "orchestrator.model.client.base_url": [site.inference_url],  # does not follow the server's port by itself
        "orchestrator.model.client.wait_for_ready_timeout": site.ready_seconds,
        "orchestrator.renderer.name": site.renderer,
        f"{SOURCE}.name": "job",
        f"{SOURCE}.env.taskset.id": site.taskset,
        f"{SOURCE}.env.agent.harness.id": site.harness,
        f"{SOURCE}.env.agent.runtime.type": "subprocess",
        f"{SOURCE}.env.agent.timeout.rollout": site.rollout_seconds,  # no timeout by default
        f"{SOURCE}.env.agent.timeout.scoring": site.scoring_seconds,
        f"{SOURCE}.serve.pool.type": "static",
        f"{SOURCE}.serve.pool.num_workers": 1,
        "trainer.dist_timeout_seconds": 600,
        "trainer.model.attn": "flash_attention_2",  # 3 and 4 are for Hopper and later
        "trainer.model.fused_lm_head_token_chunk_size": locks.plan.lm_head_chunk,
        "inference.router": "None",  # the router's program is in no base install; one engine needs none
        "inference.seed": locks.seed,
        "inference.server.host": "127.0.0.1",
        "inference.server.port": site.inference_port,
        "inference.gpu_memory_utilization": locks.plan.utilisation,
        "inference.model.max_model_len": locks.seq_len,  # vLLM's default of 40,960 leaves no room for a cache
        "inference.vllm_extra.max_num_seqs": locks.plan.sequences,
        # the schema wants a GPU each; the supervisor starts both processes on the GPUs that there are
        "deployment.type": "single_node",
        "deployment.gpus_per_node": 2,
        "deployment.num_train_gpus": 1,
        "deployment.num_infer_gpus": 1,
    }


LAYOUT: Final = Layout(
    weights="weights/step_{step}",
    broadcasts="run_default/broadcasts/step_{step}",
    marker="STABLE",
    metrics={"trainer": "metrics.jsonl", "orchestrator": "run_default/metrics.jsonl"},
    configs={
        "trainer": "configs/trainer.toml",
        "orchestrator": "configs/orchestrator.toml",
        "inference": "configs/inference.toml",
        "env": "configs/envs/train/job.toml",
    },
    logs={
        "trainer": "logs/trainer.log",
        "orchestrator": "logs/orchestrator.log",
        "inference": "logs/inference.log",
        "env": "logs/envs/train/job.log",
    },
    merged=True,
)

PROFILE: Final = Profile(
    "v0.8.0", "ghcr.io/primeintellect-ai/prime-rl:v0.8.0", "0.3.0", places=PLACES, locked=locked, layout=LAYOUT
)
