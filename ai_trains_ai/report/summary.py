"""A run in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ai_trains_ai.records import Episode, mean_and_stderr
from ai_trains_ai.store import Store


def summarise(name: str, store: Store) -> dict[str, Any]:
    """Per step: reward, its components, validity, share of each base model, jobs. Totals: jobs, time, transfer."""
    steps = store.steps()
    results = store.results()
    busy = sum(result.train_seconds for result in results)
    wall, cores = store.meta("wall_seconds", 0.0), store.meta("cores", 1)
    totals: dict[str, Any] = {
        "steps": len(steps),
        "jobs": len(results),
        "jobs_succeeded": sum(result.status == "succeeded" for result in results),
        "wall_seconds": wall,
        "cpu_seconds": store.meta("cpu_seconds", 0.0),
        "cores": cores,
        "job_cpu_seconds": busy,
        "job_share_of_core_time": busy / (wall * cores) if wall else 0.0,
        "jobs_per_minute": 60 * len(results) / wall if wall else 0.0,
        "usd": sum(charge.usd for _, charge in store.charges()),
        "plugin_failures": store.meta("plugin_failures", {}),
        "reward_first_3": _mean_reward(steps[:3]),
        "reward_last_3": _mean_reward(steps[-3:]),
        "baselines": {f"{b.evaluation.task_id}/{b.base_model}": b.evaluation.mean for b in store.baselines()},
    }
    for key, phase in (("held_out_before", "probe-before"), ("held_out_after", "probe-after")):
        totals[key] = interval(store.probe(phase))
    return {"run": name, "steps": [_step(step) for step in steps], "totals": totals}


def interval(episodes: Sequence[Episode]) -> dict[str, float] | None:
    """Mean total reward of finished episodes with its 95 % confidence interval; ``None`` without any."""
    totals = [e.reward.total for e in episodes if e.reward is not None]
    if not totals:
        return None
    mean, stderr = mean_and_stderr(totals)
    return {"mean": mean, "n": len(totals), "stderr": stderr, "low": mean - 1.96 * stderr, "high": mean + 1.96 * stderr}


def _step(step: Mapping[str, float]) -> dict[str, Any]:
    prefix = "outer/base_model/"
    return {
        "step": int(step["step"]),
        "reward": step["outer/reward/mean"],
        **{name: step.get(f"outer/reward/{name}", 0.0) for name in ("validation", "job_quality", "train_speed")},
        "post": step["outer/valid/post"],
        "uplift": step["outer/valid/uplift"],
        "valid": step["outer/valid/any"],
        "valid_first": step["outer/valid/first"],
        "base_models": {key.removeprefix(prefix): value for key, value in step.items() if key.startswith(prefix)},
        "jobs": int(step["outer/jobs"]),
        "staleness": step["outer/staleness/mean"],
        "seconds": step["seconds"],
    }


def _mean_reward(steps: Sequence[Mapping[str, float]]) -> float | None:
    return sum(step["outer/reward/mean"] for step in steps) / len(steps) if steps else None
