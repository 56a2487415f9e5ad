"""Scoring of single replies, fast enough for a training loop.

`vf.Task.score` costs about half a millisecond, most of it for the inspection of signatures, an event loop's gather and
the building of a trace, which are the same for every rollout of a job. `Scorer` does them once: rewards are resolved
per task class, traces are copies of a template, and a reward's coroutine is driven by hand, since it hardly ever
waits for anything. Whatever doesn't fit goes the full way through the seat, with the same result.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import verifiers.v1 as vf
from attrs import frozen
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import state_cls

from ai_trains_ai.environments.hooks import check_task
from ai_trains_ai.environments.loader import LoadedEnvironment
from ai_trains_ai.environments.seat import (
    Agent,
    Batcher,
    Conversation,
    Generation,
    checked,
    new_trace,
    opening_messages,
    play,
)

T = TypeVar("T")
MAX_TURNS = 8


class Scorer:
    """Scores replies of one environment. Not for use under a running event loop.

    Args:
        loaded: The environment. Raises `InvalidEnvironment` for one that can't be scored in process.

    Attributes:
        loaded: The environment.
        fast: Whether replies take the fast path; otherwise every score is an episode in the seat.
    """

    def __init__(self, loaded: LoadedEnvironment) -> None:
        task = loaded.example()
        check_task(task, loaded.env)
        self.loaded = loaded
        self._plan = _Plan.of(task) if loaded.env is None else None
        self._openings: dict[int, tuple[vf.Task, list[MessageNode]]] = {}
        self._runner: asyncio.Runner | None = None

    @property
    def fast(self) -> bool:
        return self._plan is not None

    def score(self, task: vf.Task, reply: str | Sequence[str]) -> float:
        """Reward of a reply; a list gives one reply per turn, the last one repeated. Raises `RewardError`."""
        return self.score_with_metrics(task, reply)[0]

    def score_with_metrics(self, task: vf.Task, reply: str | Sequence[str]) -> tuple[float, dict[str, float]]:
        """Reward and metrics of a reply."""
        if self._plan is not None and isinstance(reply, str):
            try:
                return self._fast(self._plan, task, reply)
            except _Waits:
                self._plan = None  # a reward that awaits needs an event loop
            except Exception:
                # An error must be verifiers' own: the full path raises it again, or shows that it wasn't one.
                return self._full(task, [reply])
        return self._full(task, [reply] if isinstance(reply, str) else reply)

    def run_async(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the scorer's own event loop."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(work)

    def close(self) -> None:
        """Release the event loop, if one was needed. Idempotent."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _fast(self, plan: _Plan, task: vf.Task, reply: str) -> tuple[float, dict[str, float]]:
        trace = plan.trace(task, self._opening(plan, task), reply)
        available = {"task": task.data, "trace": trace}
        for hook in plan.metrics:
            value = hook(task, available)
            trace.record_metrics(value if isinstance(value, Mapping) else {hook.name: value})
        for hook in plan.rewards:
            value = hook(task, available)
            for name, score in (value if isinstance(value, Mapping) else {hook.name: value}).items():
                trace.record_reward(name, score, hook.weight)
        return checked(trace.reward), {name: value for name, value in trace.metrics.items() if value is not None}

    def _opening(self, plan: _Plan, task: vf.Task) -> list[MessageNode]:
        known = self._openings.get(id(task))
        if known is None:
            messages = opening_messages(task)
            nodes = [MessageNode(parent=index - 1 if index else None, message=m) for index, m in enumerate(messages)]
            known = self._openings[id(task)] = (task, nodes)  # the task is kept, so that its id stays its own
        return known[1]

    def _full(self, task: vf.Task, replies: Sequence[str]) -> tuple[float, dict[str, float]]:
        def scripted(conversations: list[Conversation]) -> list[Generation]:
            (conversation,) = conversations
            turn = sum(message["role"] == "assistant" for message in conversation)
            return [Generation(replies[min(turn, len(replies) - 1)])]

        rollout = self.run_async(play(self.loaded, task, Agent(Batcher(scripted, 1), MAX_TURNS)))
        return rollout.reward, rollout.metrics


class _Waits(Exception):
    """A reward's coroutine suspended."""


@frozen
class _Hook:
    """A reward or metric: the plain function of the task class, and how to call it."""

    name: str
    weight: float
    function: Callable[..., Any]
    arguments: tuple[str, ...]

    def __call__(self, task: vf.Task, available: Mapping[str, Any]) -> Any:
        coroutine = self.function(task, **{name: available[name] for name in self.arguments})
        try:
            coroutine.send(None)
        except StopIteration as result:
            return result.value
        coroutine.close()
        raise _Waits


@frozen
class _Plan:
    """What all rollouts of a job share: hooks and templates."""

    metrics: tuple[_Hook, ...]
    rewards: tuple[_Hook, ...]
    template: vf.Trace
    reply: MessageNode
    state: type[vf.State]

    @classmethod
    def of(cls, task: vf.Task) -> _Plan | None:
        """The plan for a task's class; ``None`` when it needs the full path."""
        kind = type(task)
        changed = kind.score is not vf.Task.score or kind.hooks is not vf.Task.hooks or task.scoring_deferred
        if changed or task.hooks("stop"):
            return None
        hooks = {attr: [_resolve(task, hook) for hook in task.hooks(attr)] for attr in ("metric", "reward")}
        metrics = [hook for hook in hooks["metric"] if hook]
        rewards = [hook for hook in hooks["reward"] if hook]
        if len(metrics) + len(rewards) < sum(map(len, hooks.values())):
            return None
        template = new_trace(task)
        template.ok = template.is_completed = True
        template.stop("user_closed")
        reply = MessageNode(message=vf.AssistantMessage(content=""), sampled=True)
        return cls(tuple(metrics), tuple(rewards), template, reply, state_cls(kind))

    def trace(self, task: vf.Task, opening: list[MessageNode], reply: str) -> vf.Trace:
        """A finished single-turn trace of a reply."""
        message = self.reply.message.model_copy(update={"content": reply})
        node = self.reply.model_copy(update={"message": message, "parent": len(opening) - 1 if opening else None})
        fresh = {"nodes": [*opening, node], "state": self.state(), "rewards": {}, "metrics": {}, "info": {}}
        record = self.template.task.model_copy(update={"data": task.data})
        return self.template.model_copy(update={**fresh, "task": record, "calls": [], "errors": [], "extra_usage": []})


def _resolve(task: vf.Task, hook: Callable[..., Any]) -> _Hook | None:
    """The hook as a function of the task class, whatever its config says of its weight."""
    method = inspect.unwrap(hook)
    if not inspect.ismethod(method) or method.__self__ is not task:
        return None
    parameters = inspect.signature(hook).parameters
    arguments = tuple(name for name in ("task", "trace") if name in parameters)
    return _Hook(hook.__name__, float(getattr(hook, "_vf_weight", 1.0)), method.__func__, arguments)
