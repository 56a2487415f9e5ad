"""Plays a few rollouts through a running env server, the way that the engine does, and tells what they came to.

``python -m …pod.preflight --address tcp://… --base-url http://…/v1 --model NAME --tasks T --group G …``, with the stub
of the taskset on the path. Prints one line of JSON: ``rollouts``, ``errors``, the commonest ``error``, ``truncated``,
``rewards`` (a list for each task; ``null`` for a rollout without one) and ``seconds``; or ``{"unhealthy": true}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

ERROR_CHARACTERS = 400


@dataclass(frozen=True)
class Outcome:
    """Of one rollout: a reward or an error."""

    reward: float | None = None
    error: str = ""
    truncated: bool = False


def outcome_of(episode: Any) -> Outcome:
    """What an episode came to, by the engine's own measure of a usable one, and a finite reward besides."""
    traces = episode.traces
    truncated = any(trace.is_truncated for trace in traces)
    errors = [error for record in (episode, *traces) if not record.ok for error in record.errors]
    late = [record.stop_condition for record in traces if getattr(record, "is_timeout", False)]
    if errors:
        return Outcome(error=f"{errors[-1].type}: {errors[-1].message}", truncated=truncated)
    if late or getattr(episode, "is_timeout", False):
        return Outcome(error=f"timeout: {late[0] if late else 'the episode'}", truncated=truncated)
    if not episode.ok or not traces or not all(trace.num_turns for trace in traces):
        return Outcome(error="the rollout has no turn of the model", truncated=truncated)
    reward = sum(trace.reward for trace in traces) / len(traces)
    if not math.isfinite(reward):
        return Outcome(error="reward is not finite", truncated=truncated)
    return Outcome(reward, truncated=truncated)


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most so many, evenly from the first to the last."""
    count = min(count, len(items))
    return [items[index * (len(items) - 1) // max(1, count - 1)] for index in range(count)]


def report(groups: Sequence[Sequence[Outcome]], seconds: float) -> dict[str, Any]:
    outcomes = [outcome for group in groups for outcome in group]
    errors = Counter(outcome.error[:ERROR_CHARACTERS] for outcome in outcomes if outcome.error)
    return {
        "rollouts": len(outcomes),
        "errors": errors.total(),
        "error": errors.most_common(1)[0][0] if errors else "",
        "truncated": sum(outcome.truncated for outcome in outcomes),
        "rewards": [[outcome.reward for outcome in group] for group in groups],
        "seconds": round(seconds, 3),
    }


async def play(options: argparse.Namespace) -> dict[str, Any]:
    """All rollouts at once. The seconds that importing verifiers takes are part of the wait for the server."""
    began = time.monotonic()
    import verifiers.v1 as vf
    from verifiers.v1.serve import EnvClient

    rows = import_module("ata_job")  # the stub
    server = EnvClient(options.address)
    patience = max(1.0, began + options.timeout - time.monotonic())
    try:
        await server.wait_for_server_startup(timeout=patience, interval=0.5)
    except TimeoutError:
        return {"unhealthy": True}
    tasks = spread(list(rows.FrozenRows(rows.AnyConfig(id="ata-job")).load()), options.tasks)
    client = vf.EvalClientConfig(base_url=options.base_url, api_key_var="ATA_NO_KEY")
    sampling = vf.SamplingConfig.model_validate(
        {
            "temperature": options.temperature,
            "top_p": 1.0,
            "max_tokens": options.max_tokens,
            # of the request's body, as the engine's: not every version of verifiers unpacks an extra_body
            "top_k": -1,
            "min_p": 0.0,
            "chat_template_kwargs": {"enable_thinking": bool(options.thinking)},
        }
    )

    async def rollout(task: Any) -> Outcome:
        data = task.data.model_dump(mode="json")
        run = server.run(task_data=data, client=client, model=options.model, sampling=sampling)
        try:
            return outcome_of(await asyncio.wait_for(run, options.timeout))
        except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
            return Outcome(error="timeout")
        except Exception as error:
            return Outcome(error=f"{type(error).__name__}: {error}")

    began = time.monotonic()
    groups = await asyncio.gather(*(asyncio.gather(*(rollout(task) for _ in range(options.group))) for task in tasks))
    return report(groups, time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", required=True)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--thinking", type=int, choices=(0, 1), default=0)
    parser.add_argument("--timeout", type=float, required=True)
    found = asyncio.run(play(parser.parse_args()))
    print(json.dumps(found, allow_nan=False), flush=True)
    sys.stderr.flush()
    os._exit(0)  # the line is the last one: no farewell of anything that still runs


if __name__ == "__main__":
    main()
