"""Episodes in process: batches, turns, token sequences, errors."""

import pytest

from .conftest import HEAD, REWARD, ROWS

SINGLE = HEAD + REWARD + ROWS
MULTI = """
import re
import verifiers.v1 as vf
__all__ = ["Rows", "Triage"]
class Row(vf.TaskData):
    root: str
    logs: dict[str, str]
class Check(vf.Task[Row]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == f"ROOT {self.data.root}")
    @vf.reward(weight=-0.1)
    async def checks(self, trace: vf.Trace) -> float:
        return trace.num_turns - 1
class Triage(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as chat:
            segment = await chat.turn()
            while not segment.terminated and (m := re.match(r"CHECK (\\w+)", segment.last_reply)):
                segment = await chat.turn(task.data.logs.get(m.group(1), "no such service"))
    async def finalize(self, task, episode):
        episode.traces[0].record_reward("bonus", 0.5)
class Rows(vf.Taskset[Check, vf.TasksetConfig]):
    def load(self):
        for n in range(4):
            yield Check(Row(prompt=f"Alert {n}", root="db", logs={"db": "disk full"}), self.config.task)
"""


def make(load, source):
    from ai_trains_ai.environments.scoring import Scorer

    loaded = load(source)
    return Scorer(loaded), loaded.tasks_from_rows(loaded.rows())


def generation(text, prompt=(1, 2), ids=(3,)):
    from ai_trains_ai.environments.seat import Generation

    return Generation(text, prompt, ids, [-0.5] * len(ids))


def test_single_turn_episodes_are_sampled_in_batches_and_scored(load):
    from ai_trains_ai.environments.seat import run_episodes

    scorer, tasks = make(load, SINGLE)
    seen = []

    def generate(conversations):
        seen.append(conversations)
        return [generation(str(int(c[-1]["content"].split()[0]) + 1)) for c in conversations]

    rollouts = run_episodes(scorer, tasks * 2, generate, max_batch=10)
    assert [len(batch) for batch in seen] == [10, 6]
    assert seen[0][0] == [{"role": "user", "content": "0 plus 1"}]
    assert [r.reward for r in rollouts] == [1.0] * 16
    assert rollouts[0].turns == (generation("1"),)


def test_multi_turn_episodes_advance_together(load):
    from ai_trains_ai.environments.seat import run_episodes

    scorer, tasks = make(load, MULTI)
    batches = []

    def generate(conversations):
        batches.append(len(conversations))
        replies = []
        for conversation in conversations:
            assert [m["role"] for m in conversation][::2] == ["user"] * ((len(conversation) + 1) // 2)
            replies.append("ROOT db" if "disk full" in conversation[-1]["content"] else "CHECK db")
        return [generation(text, ids=(7, 8)) for text in replies]

    assert not scorer.fast
    assert scorer.loaded.multi_turn
    rollouts = run_episodes(scorer, tasks, generate)
    assert batches == [4, 4]
    assert [r.reward for r in rollouts] == [pytest.approx(1.0 - 0.1 + 0.5)] * 4
    assert [turn.text for turn in rollouts[0].turns] == ["CHECK db", "ROOT db"]
    assert rollouts[0].turns[1].ids == (7, 8)


def test_scripted_replies_play_a_multi_turn_environment(load):
    scorer, tasks = make(load, MULTI)
    assert scorer.score(tasks[0], ["CHECK db", "ROOT db"]) == pytest.approx(1.4)
    assert scorer.score(tasks[0], "ROOT db") == pytest.approx(1.5)
    assert scorer.score(tasks[0], "CHECK db") == pytest.approx(0.5 - 0.1 * 7)


def test_an_episode_ends_after_its_turns(load):
    from ai_trains_ai.environments.seat import run_episodes

    scorer, tasks = make(load, MULTI)
    rollouts = run_episodes(scorer, tasks[:1], lambda cs: [generation("CHECK x") for _ in cs], max_turns=3)
    assert len(rollouts[0].turns) == 3


@pytest.mark.parametrize("source", [SINGLE, MULTI], ids=["single", "multi"])
def test_what_generate_raises_reaches_the_caller(source, load):
    from ai_trains_ai.environments.seat import run_episodes

    def generate(conversations):
        raise LookupError("no model")

    scorer, tasks = make(load, source)
    with pytest.raises(LookupError, match="no model"):
        run_episodes(scorer, tasks, generate)


@pytest.mark.parametrize(
    "source",
    [
        SINGLE.replace("return float(", "return 1 / len(trace.last_reply) - 1 + float("),
        MULTI.replace("return trace.num_turns - 1", "return 1 / len(trace.last_reply) - 1"),
    ],
    ids=["single", "multi"],
)
def test_an_error_of_one_episode_leaves_the_others(source, load):
    from ai_trains_ai.environments.seat import run_episodes

    scorer, tasks = make(load, source)
    texts = iter(["x", "", "x"])
    rollouts = run_episodes(scorer, tasks[:3], lambda cs: [generation(next(texts)) for _ in cs])
    assert [bool(r.error) for r in rollouts] == [False, True, False]
    assert "ZeroDivisionError" in rollouts[1].error
    assert rollouts[1].reward == 0.0
    assert len(rollouts[1].turns) == 1


def test_an_environment_that_runs_no_agent_is_an_error(load):
    from ai_trains_ai.errors import RewardError

    source = MULTI.split("    async def run(")[0] + "    async def run(self, task, agents): pass\n"
    source += "class Rows" + MULTI.split("class Rows")[1]
    scorer, tasks = make(load, source)
    with pytest.raises(RewardError, match="0 times"):
        scorer.score(tasks[0], "x")


def test_the_warm_up_checks_itself():
    from ai_trains_ai.environments.warm import warm_up

    warm_up()
