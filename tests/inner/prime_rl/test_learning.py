"""Both loops on the prime-rl runner, whose stand-in engine really learns.

Of the agent's work and ours everything is real: validation, the shipped environment behind its wall, verifiers' env
server and client, both pre-flights, the supervisor, weights, serving and the hidden evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import engine
from fakes.pods import path_of_a_pod
from inner.prime_rl.standing import runner

import ai_trains_ai as ata
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.outer.chat import call_text
from ai_trains_ai.records import Message
from ai_trains_ai.testing.fakes import ScriptedAgent, environment

JOB = """
base_model = "Qwen/Qwen3-0.6B"
[prime_rl]
max_steps = 16
batch_size = 48
group_size = 8
seq_len = 512
sampling.max_completion_tokens = 24
"""


def script(conversation: Sequence[Message], number: int) -> str:
    spoken = sum(message.role == "assistant" for message in conversation)
    if number % 2 == 0 or spoken > 2:
        return "No."
    return (
        call_text("write_file", path="environment.py", content=environment()),
        call_text("write_file", path="job.toml", content=JOB),
        call_text("submit"),
    )[spoken]


@pytest.mark.slow
async def test_a_job_makes_its_model_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox) -> None:
    monkeypatch.setenv("PATH", path_of_a_pod(engine.install(tmp_path / "driver", gpus=2)))
    experiment = ata.Experiment(
        outer=ScriptedAgent(script),
        inner=runner(tmp_path, learns=True),
        families=["chained-arithmetic"],
        sandbox=sandbox,
        groups_per_step=1,
        group_size=2,
        eval_items=64,
        probe_episodes=0,
        max_tokens=512,
    )
    run = await experiment.run(1, out=tmp_path / "run")
    (result,) = run.jobs
    assert (result.status, result.steps) == ("succeeded", 16), result.failure
    assert "env server: " in result.guarantees
    rewards = [metrics["reward"] for metrics in result.metrics]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.8
    worked, gave_up = sorted(run.episodes, key=lambda episode: -(episode.post or 0.0))
    untrained = max(baseline.evaluation.mean for baseline in run._read("baselines"))
    assert worked.post is not None
    assert worked.post > untrained + 0.2
    assert gave_up.valid_attempt is None
    assert worked.reward is not None
    assert worked.reward.components["uplift"] > 0
