"""The fast path gives what `Task.score` gives, and whatever doesn't fit takes the full path or is refused."""
# ruff: noqa: E501 - scripts as text

import asyncio
import math

import pytest

from ai_trains_ai.errors import InvalidEnvironment, RewardError

from .conftest import HEAD, REWARD, ROWS

REPLIES = ["", "1", "4", "  4 ", "so 4", "I don't know", "4\nso 4", "ü" * 300]


def task_of(body):
    return HEAD + "class Check(vf.Task[Row]):\n" + body + ROWS


VARIED = {
    "one reward": HEAD + REWARD + ROWS,
    "weights": task_of("""
    @vf.reward(weight=0.7)
    async def exact(self, trace: vf.Trace) -> float:
        return trace.last_reply == self.data.answer
    @vf.reward(weight=-0.1)
    async def long(self, trace) -> float:
        return len(trace.last_reply) / 7
    @vf.reward(priority=3)
    async def first(self) -> int:
        return 1
"""),
    "metrics": task_of("""
    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)
    @vf.metric
    async def several(self, trace) -> dict:
        return {"a": 1, "b": 2.5}
    @vf.reward
    async def uses_metric(self, trace) -> float:
        return trace.metrics["length"] + trace.metrics["b"]
"""),
    "mapping": task_of("""
    @vf.reward(weight=0.5)
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        return {"x": float("4" in trace.last_reply), "y": 2.0}
"""),
    "trace and task": task_of("""
    @vf.reward
    async def all(self, trace: vf.Trace, task: vf.TaskData) -> float:
        assert task.answer == self.data.answer and trace.task.data is task
        roles = [message.role for message in trace.messages]
        assert roles == ["user", "assistant"], roles
        trace.info["seen"] = 1
        assert trace.is_completed and not trace.errors and trace.num_branches == 1
        return trace.num_turns + len(trace.assistant_messages) + len(trace.messages[-1].content or "")
"""),
    "state": HEAD
    + """
class Memory(vf.State):
    n: int = 0
class Check(vf.Task[Row, Memory]):
    @vf.metric
    async def count(self, trace) -> float:
        trace.state.n += 1
        return trace.state.n
    @vf.reward
    async def once(self, trace: vf.Trace) -> float:
        return trace.state.n
"""
    + ROWS,
    "written by hand": task_of("""
    @vf.reward
    async def hack(self, trace: vf.Trace) -> float:
        trace.record_reward("more", 5.0, 2.0)
        return 1.0
"""),
    "system prompt": (HEAD + REWARD + ROWS).replace("answer: str", "answer: str\n    system_prompt: str = 'Be brief.'"),
    "messages": (HEAD + REWARD + ROWS).replace(
        'f"{n} plus 1"', '[vf.UserMessage(content="a"), vf.UserMessage(content="b")]'
    ),
    "inherited": HEAD + REWARD.replace("Check", "Base") + "class Check(Base):\n    pass\n" + ROWS,
    "awaits": task_of("""
    @vf.reward
    async def slow(self, trace: vf.Trace) -> float:
        import asyncio
        await asyncio.sleep(0)
        return await asyncio.wait_for(self.inner(trace), 1)
    async def inner(self, trace):
        return float(trace.last_reply == self.data.answer)
"""),
}


def reference(task, reply):
    """What verifiers itself says of a finished single-turn trace."""
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode

    from ai_trains_ai.environments.seat import new_trace, opening_messages

    trace = new_trace(task)
    for message in [*opening_messages(task), vf.AssistantMessage(content=reply)]:
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(MessageNode(parent=parent, message=message, sampled=message.role == "assistant"))
    trace.ok = True
    trace.stop("user_closed")
    asyncio.run(task.score(trace))
    return trace.reward, {name: value for name, value in trace.metrics.items() if value is not None}


def scorer_of(load, source, config=None):
    from ai_trains_ai.environments.scoring import Scorer

    loaded = load(source, config)
    return Scorer(loaded), loaded.tasks_from_rows(loaded.rows())


@pytest.mark.parametrize("name", VARIED)
def test_fast_and_full_path_agree_with_verifiers(name, load):
    scorer, tasks = scorer_of(load, VARIED[name])
    assert scorer.fast
    for task in tasks[2:5]:
        for reply in REPLIES:
            expected = reference(task, reply)
            assert scorer.score_with_metrics(task, reply) == expected
            assert scorer.score_with_metrics(task, [reply]) == expected
    assert scorer.fast == (name != "awaits")
    scorer.close()


def configured(source, rewards):
    """The source with settings for its rewards in its own config class: the agent's table can't have them."""
    own = f"class Config(vf.TasksetConfig):\n    task: vf.TaskConfig = vf.TaskConfig(rewards={rewards!r})\n"
    return source.replace(
        "class Rows(vf.Taskset[Check, vf.TasksetConfig])", own + "class Rows(vf.Taskset[Check, Config])"
    )


def test_config_weights_count(load):
    scorer, tasks = scorer_of(load, configured(VARIED["weights"], {"exact": {"weight": 3.0}}))
    assert scorer.fast
    for reply in REPLIES:
        assert scorer.score_with_metrics(tasks[3], reply) == reference(tasks[3], reply)
    assert scorer.score(tasks[3], "4") == pytest.approx(3.0 - 0.1 / 7 + 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            "    @vf.stop\n    async def enough(self, trace: vf.Trace) -> bool:\n        return trace.num_turns >= 1\n",
            "stop hook",
        ),
        (
            "    async def score(self, trace, runtime=None):\n        trace.record_reward('own', len(trace.last_reply))\n",
            "own score",
        ),
    ],
    ids=["stop hook", "own score"],
)
def test_what_does_not_fit_takes_the_full_path(change, reason, load):
    scorer, tasks = scorer_of(load, HEAD + REWARD + change + ROWS)
    assert not scorer.fast
    for reply in REPLIES:
        assert scorer.score(tasks[3], reply) == reference(tasks[3], reply)[0]
    scorer.close()


def test_a_plugged_function_takes_the_full_path(load):
    plugged = "async def extra(trace, task):\n    return 2.0 * len(trace.last_reply)\n"
    rewards = {"extra": {"fn": "plugged_by_agent:extra", "weight": 0.5}}
    from ai_trains_ai.environments.scoring import Scorer

    loaded = load(configured(HEAD + REWARD + ROWS, rewards), plugged_by_agent=plugged)
    scorer = Scorer(loaded)
    (task, *_) = loaded.tasks_from_rows(loaded.rows())
    assert not scorer.fast
    assert scorer.score(task, "1") == 1.0 + 1.0


ERRORS = {
    "raises": ("raise KeyError('x')", "reward-raises"),
    "divides by zero": ("return 1 / 0", "reward-raises"),
    "nan": ("return float('nan')", "reward-not-finite"),
    "infinite": ("return float('inf')", "reward-not-finite"),
    "none": ("return None", "reward-raises"),
    "text": ("return 'good'", "reward-raises"),
    "a list": ("return [1.0]", "reward-raises"),
    "nan in a mapping": ("return {'a': float('nan')}", "reward-not-finite"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_reward_that_fails_is_an_error_with_its_line(name, load):
    line, code = ERRORS[name]
    source = task_of(f"    @vf.reward\n    async def bad(self, trace):\n        {line}\n")
    scorer, tasks = scorer_of(load, source)
    for reply in ("x", ["x"]):
        with pytest.raises(RewardError) as caught:
            scorer.score(tasks[0], reply)
        assert caught.value.code == code
        if "return" not in line or "/" in line:
            assert caught.value.place == "environment.py:9"
    scorer.close()


def test_what_float_accepts_is_accepted_as_verifiers_does(load):
    for line, value in (("return True", 1.0), ("return '0.5'", 0.5), ("return 3", 3.0)):
        scorer, tasks = scorer_of(load, task_of(f"    @vf.reward\n    async def odd(self, trace):\n        {line}\n"))
        assert scorer.score(tasks[0], "x") == value == reference(tasks[0], "x")[0]


REFUSED = {
    "no-reward": task_of("    pass\n"),
    "reserved-name": HEAD + REWARD.replace("right", "score") + ROWS,
    "reward-not-async": HEAD + REWARD.replace("async def", "def") + ROWS,
    "needs-runtime": HEAD + REWARD.replace("trace: vf.Trace", "trace, runtime") + ROWS,
    "reward-argument": HEAD + REWARD.replace("trace: vf.Trace", "trace, answer") + ROWS,
    "runtime-hook": HEAD + REWARD + "    async def setup(self, trace, runtime): pass\n" + ROWS,
    "container": HEAD + REWARD + "    NEEDS_CONTAINER = True\n" + ROWS,
    "toolset": HEAD + REWARD + "    @vf.tool\n    async def look(self): pass\n" + ROWS,
    "intercept": HEAD + REWARD + "    @vf.intercept\n    async def change(self, request): pass\n" + ROWS,
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_can_not_be_honoured_is_refused(code, load):
    with pytest.raises(InvalidEnvironment) as caught:
        scorer_of(load, REFUSED[code])
    assert caught.value.code == code


def test_a_judge_is_refused(load):
    scorer, _ = scorer_of(load, HEAD + REWARD + ROWS)
    scorer.loaded.example().config.judges.append(object())
    from ai_trains_ai.environments.hooks import check_task

    with pytest.raises(InvalidEnvironment, match="Judges"):
        check_task(scorer.loaded.example(), None)


def test_the_fast_path_is_much_cheaper_than_verifiers(load):
    import time

    scorer, tasks = scorer_of(load, VARIED["weights"])
    started = time.process_time()
    for _ in range(25):
        for task in tasks:
            scorer.score(task, "so 4")
    assert (time.process_time() - started) / (25 * len(tasks)) < 0.3e-3
    assert math.isfinite(scorer.score(tasks[0], "x"))
