"""What a step is summed up to: slash-named metrics over its episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ai_trains_ai.records import Episode, EpisodeGroup, JobResult, TrainStep


def mean(values: Sequence[float]) -> float:
    """Mean, 0 for none."""
    return sum(values) / len(values) if values else 0.0


def episode_metrics(episodes: Sequence[Episode], prefix: str) -> dict[str, float]:
    """Reward with its components, validity and model choice. Masked episodes count only as such."""
    paid = [e for e in episodes if e.status == "finished" and e.reward is not None]
    valid = [e for e in paid if e.valid_attempt is not None]
    metrics: dict[str, float] = {
        "episodes": len(episodes),
        "masked": len(episodes) - len(paid),
        "masked_share": (len(episodes) - len(paid)) / max(1, len(episodes)),
        "reward/mean": mean([e.reward.total for e in paid if e.reward]),
        "reward/max": max((e.reward.total for e in paid if e.reward), default=0.0),
        "valid/any": len(valid) / max(1, len(paid)),
        "valid/first": sum(e.valid_attempt == 1 for e in paid) / max(1, len(paid)),
        "jobs": len(valid),
        "tampered": sum(any(f.severity == "error" for f in e.findings) for e in paid) / max(1, len(paid)),
    }
    for name in sorted({name for e in paid if e.reward for name in e.reward.components}):
        metrics[f"reward/{name}"] = mean([e.reward.components.get(name, 0.0) for e in paid if e.reward])
    calls = [call for e in paid for m in e.messages if m.turn is not None for call in m.turn.calls]
    broken = Counter(
        (call.error.partition(": ")[0] or "?") if ": " in call.error else "malformed" for call in calls if call.error
    )
    metrics["parse_failures"] = sum(broken.values()) / max(1, len(calls))
    for kind, count in broken.items():
        metrics[f"parse_failures/{kind}"] = count / len(calls)
    metrics["valid/post"] = mean([e.post or 0.0 for e in valid])
    metrics["valid/uplift"] = mean([max(0.0, e.uplift or 0.0) for e in valid])
    for model, count in Counter(e.base_model for e in valid).items():
        metrics[f"base_model/{model}"] = count / len(valid)
    configs = [report for e in valid for report in e.reports if report.valid]
    for key, count in Counter(key for report in configs for key in report.configured).items():
        metrics[f"configured/{key}"] = count / len(configs)
    for end, count in Counter(e.end for e in paid).items():
        metrics[f"end/{end}"] = count / len(paid)
    return {f"{prefix}/{key}": float(value) for key, value in metrics.items()}


def step_metrics(
    groups: Sequence[EpisodeGroup],
    train: TrainStep,
    version_before: int,
    results: Mapping[str, JobResult],
    seconds: float,
) -> dict[str, float]:
    """All metrics of a training step. ``seconds`` are wall seconds since the step before ended."""
    episodes = [episode for group in groups for episode in group.episodes]
    metrics = episode_metrics(episodes, "outer")
    ages = [version_before - version for e in episodes for version in e.policy_versions[:1]]
    breaks = sum(max(0, len(e.segments) - 1) for e in episodes)
    metrics |= {
        "outer/staleness/mean": mean(ages),
        "outer/staleness/max": float(max(ages, default=0)),
        "outer/segment_breaks": float(breaks),
        "outer/segment_breaks_per_episode": breaks / max(1, len(episodes)),
        "outer/groups": float(len(groups)),
        "outer/groups_degenerate": float(sum(group.degenerate for group in groups)),
        "outer/version": float(train.version),
        "outer/tokens": float(train.tokens),
        "time/step": seconds,
    }
    jobs = [results[e.job_id] for e in episodes if e.job_id in results]
    metrics["inner/train_seconds"] = sum(job.train_seconds for job in jobs)
    metrics["inner/failed"] = float(sum(job.status != "succeeded" for job in jobs))
    return metrics | {key: float(value) for key, value in train.metrics.items()}
