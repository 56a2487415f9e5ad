"""The in-process seat: runs a verifiers environment against a batched ``generate``, without HTTP, harness or runtime.

`vf.Env.run(task, agents)` only needs ``agents.agent.run(task)`` and ``agents.agent.interaction(task)``; the classes
here supply them. All episodes of a call advance together, and their requests are coalesced into batches.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import verifiers.v1 as vf
from attrs import field, frozen
from verifiers.v1.episode import EnvInfo, Episode
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import state_cls

from ai_trains_ai.environments.loader import LoadedEnvironment, place_of
from ai_trains_ai.errors import RewardError

if TYPE_CHECKING:
    from ai_trains_ai.environments.scoring import Scorer

Conversation = list[dict[str, str]]


@frozen
class Generation:
    """One sampled reply. ``prompt_ids`` is everything before it, ``ids`` what was sampled, ``logprobs`` natural log."""

    text: str
    prompt_ids: Sequence[int] = field(default=(), repr=False)
    ids: Sequence[int] = field(default=(), repr=False)
    logprobs: Sequence[float] = field(default=(), repr=False)


Generate = Callable[[list[Conversation]], Sequence[Generation]]


@frozen
class Rollout:
    """One finished episode. With an ``error`` the reward is 0 and the rollout should be masked from training."""

    reward: float
    metrics: dict[str, float]
    turns: tuple[Generation, ...]
    error: str = ""


def run_episodes(
    scorer: Scorer, tasks: Sequence[vf.Task], generate: Generate, *, max_turns: int = 8, max_batch: int = 256
) -> list[Rollout]:
    """Play one episode per task, in order; repeat a task for a group.

    Args:
        scorer: Of the environment that the tasks belong to.
        tasks: From `LoadedEnvironment.tasks_from_rows`.
        generate: Samples one reply for each of at most ``max_batch`` conversations. What it raises ends the call.
        max_turns: Turns after which an episode of an own environment ends.
        max_batch: Most conversations in one call of ``generate``.
    """
    if not scorer.fast:
        batcher = Batcher(generate, max_batch)
        return scorer.run_async(_play_all(scorer.loaded, tasks, batcher, max_turns))
    rollouts: list[Rollout] = []
    for start in range(0, len(tasks), max_batch):
        batch = tasks[start : start + max_batch]
        for task, generation in zip(batch, generate([opening(task) for task in batch]), strict=True):
            try:
                reward, metrics = scorer.score_with_metrics(task, generation.text)
                rollouts.append(Rollout(reward, metrics, (generation,)))
            except RewardError as error:
                rollouts.append(Rollout(0.0, {}, (generation,), str(error)))
    return rollouts


def opening(task: vf.Task) -> Conversation:
    """The messages that a task starts with."""
    return [{"role": message.role, "content": vf_text(message)} for message in opening_messages(task)]


def opening_messages(task: vf.Task) -> list[Any]:
    """The same as verifiers messages."""
    data = task.data
    messages: list[Any] = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*messages, vf.UserMessage(content=data.prompt)]
    return [*messages, *(data.prompt or ())]


def vf_text(message: Any) -> str:
    """A message's text."""
    content = message.content
    return content if isinstance(content, str) else "".join(getattr(part, "text", "") for part in content or ())


async def _play_all(
    loaded: LoadedEnvironment, tasks: Sequence[vf.Task], batcher: Batcher, max_turns: int
) -> list[Rollout]:
    agents = [Agent(batcher, max_turns) for _ in tasks]
    results = await asyncio.gather(
        *(play(loaded, task, agent) for task, agent in zip(tasks, agents, strict=True)), return_exceptions=True
    )
    rollouts: list[Rollout] = []
    for result, agent in zip(results, agents, strict=True):
        if isinstance(result, RewardError):
            result = Rollout(0.0, {}, tuple(agent.turns), f"{result} ({result.place})")
        elif isinstance(result, _GenerateError):
            assert result.__cause__ is not None
            raise result.__cause__
        elif isinstance(result, BaseException):
            raise result
        rollouts.append(result)
    return rollouts


async def play(loaded: LoadedEnvironment, task: vf.Task, agent: Agent) -> Rollout:
    """One episode. Raises `RewardError` for whatever the environment's own code does wrong."""
    try:
        traces = await (_single_turn(task, agent) if loaded.env is None else _own_env(loaded.env, task, agent))
        if len(traces) != 1:
            raise RewardError(f"Env.run runs its agent {len(traces)} times, not once.", code="agent-runs")
        (trace,) = traces
        reward = checked(trace.reward)
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    except (RewardError, _GenerateError):
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, vf.TaskError) and error.__cause__ else error
        raise RewardError(f"{type(cause).__name__}: {str(cause)[:160]}", place_of(cause)) from error
    return Rollout(reward, metrics, tuple(agent.turns))


async def _single_turn(task: vf.Task, agent: Agent) -> list[vf.Trace]:
    await agent.run(task)
    return agent.traces


async def _own_env(env: vf.Env, task: vf.Task, agent: Agent) -> list[vf.Trace]:
    """The order of `vf.Env.run_episode`: setup, run, finalize over one episode."""
    record = vf.TraceTask(type=type(task).__name__, data=task.data)
    episode = Episode(env=EnvInfo(id=env.config.env_id), task=record)
    agents = SimpleNamespace(agent=agent)
    await env.setup(agents)
    await env.run(task, agents)
    episode.traces.extend(agent.traces)
    episode.ok = True
    await env.finalize(task, episode)
    return episode.traces


class _GenerateError(Exception):
    """``generate`` raised; its exception is the cause."""


class Batcher:
    """Coalesces concurrent requests: calls ``generate`` when a whole tick of the event loop brings no new one."""

    def __init__(self, generate: Generate, max_batch: int) -> None:
        self._generate = generate
        self._max_batch = max_batch
        self._queue: list[tuple[Conversation, asyncio.Future[Generation]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def __call__(self, conversation: Conversation) -> Generation:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._queue.append(([*conversation], future))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        return await future

    async def _flush(self) -> None:
        seen = -1
        while seen != len(self._queue) < self._max_batch:
            seen = len(self._queue)
            await asyncio.sleep(0)
        while self._queue:
            batch, self._queue = self._queue[: self._max_batch], self._queue[self._max_batch :]
            try:
                replies = self._generate([conversation for conversation, _ in batch])
                for (_, future), reply in zip(batch, replies, strict=True):
                    future.set_result(reply)
            except BaseException as error:
                failure = _GenerateError(str(error))
                failure.__cause__ = error
                for _, future in batch:
                    if not future.done():
                        future.set_exception(failure)


class Agent:
    """The one agent of an episode: satisfies the slice of `vf.Agent` that an environment uses."""

    def __init__(self, batcher: Batcher, max_turns: int) -> None:
        self.batcher = batcher
        self.max_turns = max_turns
        self.trainable = True
        self.traces: list[vf.Trace] = []
        self.turns: list[Generation] = []

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **_: Any) -> AsyncIterator[_Interaction]:
        chat = _Interaction(self, task)
        yield chat
        chat.trace.ok = chat.trace.is_completed = True
        chat.trace.stop("user_closed")
        await task.score(chat.trace)
        self.traces.append(chat.trace)

    async def run(self, task: vf.Task, **_: Any) -> vf.Trace:
        async with self.interaction(task) as chat:
            await chat.turn()
        return chat.trace


class _Interaction:
    """One rollout, turn by turn: the slice of `vf.Interaction` that an environment uses."""

    def __init__(self, agent: Agent, task: vf.Task) -> None:
        self.trace = new_trace(task)
        self._agent = agent
        self._task = task
        self._stops = task.hooks("stop")
        self._conversation: Conversation = []
        self._opened = False

    async def turn(self, message: str | None = None) -> vf.Segment:
        """Send a user message (or let a prompted task speak first) and sample the reply."""
        trace = self.trace
        if not self._opened:
            self._opened = True
            for opener in opening_messages(self._task):
                self._push(opener)
        if message is not None:
            self._push(vf.UserMessage(content=message))
        if trace.num_turns >= self._agent.max_turns:
            trace.stop("max_turns")
        for stop in self._stops:
            if trace.stop_condition is None and await stop(trace):
                trace.stop(stop.__name__)
        if trace.stop_condition is not None:
            return vf.Segment(messages=[], terminated=True)
        generation = await self._agent.batcher(self._conversation)
        self._agent.turns.append(generation)
        reply = vf.AssistantMessage(content=generation.text)
        self._push(reply, sampled=True)
        return vf.Segment(messages=[reply])

    def _push(self, message: Any, sampled: bool = False) -> None:
        nodes = self.trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))
        self._conversation.append({"role": message.role, "content": vf_text(message)})


def new_trace(task: vf.Task) -> vf.Trace:
    """An empty trace of a task."""
    config = vf.AgentConfig(model="inner", runtime=vf.SubprocessConfig())
    record = vf.TraceTask(type=type(task).__name__, data=task.data)
    return vf.Trace(task=record, state=state_cls(type(task))(), agent=vf.AgentInfo(config=config))


def checked(reward: float) -> float:
    """The reward as a finite float; `RewardError` otherwise."""
    if not math.isfinite(reward):
        raise RewardError(f"The reward is {reward}, not a finite number.", code="reward-not-finite")
    return float(reward)
