"""The turn loop: one episode's conversation with the outer policy, up to a valid submission or its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from attrs import evolve, field, frozen

from ai_trains_ai.agent.tools import TOOLS, check_arguments, run_python, use_file_tool
from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.interfaces import Policy, Sandbox
from ai_trains_ai.records import Message, SamplingParams, Segment, Submission, ToolCall, Turn, ValidationReport
from ai_trains_ai.workspace import Workspace

MAX_TURNS = 16

Validate = Callable[[Submission], Awaitable[ValidationReport]]


@frozen
class Rollout:
    """What an episode's conversation came to. ``submission`` is the valid one, if any."""

    messages: tuple[Message, ...] = field(repr=False)
    end: str
    reports: tuple[ValidationReport, ...] = ()
    submission: Submission | None = None

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(message.turn for message in self.messages if message.turn is not None)

    @property
    def report(self) -> ValidationReport | None:
        """The verdict on the valid submission."""
        return self.reports[-1] if self.submission else None


class _Session:
    """The mutable state of one conversation."""

    def __init__(
        self, episode_id: str, workspace: Workspace, validate: Validate, sandbox: Sandbox, attempts: int
    ) -> None:
        self.episode_id, self.workspace = episode_id, workspace
        self.validate, self.sandbox, self.attempts = validate, sandbox, attempts
        self.reports: list[ValidationReport] = []
        self.submission: Submission | None = None

    async def use(self, call: ToolCall) -> str:
        """What the agent reads in answer to a call."""
        problem = f"error: {call.error}" if call.error else check_arguments(call.name, call.arguments)
        if problem:
            return problem
        if call.name == "submit":
            return await self._submit()
        if call.name == "run_python":
            self.workspace, text = await run_python(self.workspace, call.arguments["path"], self.sandbox)
        else:
            self.workspace, text = use_file_tool(self.workspace, call.name, call.arguments)
        return text

    async def _submit(self) -> str:
        submission = Submission.of(self.episode_id, len(self.reports) + 1, self.workspace.submission())
        report = await self.validate(submission)
        self.reports.append(report)
        if report.valid:
            self.submission = submission
        return report.text()

    def end(self, turn: Turn) -> str:
        """Why the conversation is over after ``turn``; empty while it goes on."""
        if self.submission:
            return "submitted"
        if len(self.reports) >= self.attempts:
            return "attempts"
        if turn.stop_reason != "stop":
            return "context"
        return "" if turn.calls else "prose"


async def play(
    episode_id: str,
    opening: Sequence[Message],
    workspace: Workspace,
    policy: Policy,
    validate: Validate,
    sandbox: Sandbox,
    params: SamplingParams,
    attempts: int = 3,
) -> Rollout:
    """Let ``policy`` work until it submits something valid, gives up, or runs out of attempts, turns or context.

    Raises what ``validate``, ``sandbox`` and ``policy`` raise: those are infrastructure, never the agent's doing.
    """
    session = _Session(episode_id, workspace, validate, sandbox, attempts)
    messages = list(opening)
    end = "turns"
    for number in range(MAX_TURNS):
        turn = await policy.act(messages, TOOLS, evolve(params, seed=params.seed + number))
        if not isinstance(turn, Turn):
            raise ConfigurationError(
                f"{type(policy).__name__}.act returned {turn!r}. Return an ai_trains_ai.records.Turn."
            )
        messages.append(Message("assistant", turn.text, turn))
        for call in turn.calls:
            messages.append(Message("tool", await session.use(call)))
            if session.end(turn):
                break
        if over := session.end(turn):
            end = over
            break
    return Rollout(tuple(messages), end, tuple(session.reports), session.submission)


def segments(turns: Sequence[Turn]) -> tuple[Segment, ...]:
    """Token sequences for training: one while prompts extend the last turn exactly, a new one after each break."""
    done: list[Segment] = []
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for turn in turns:
        prompt = list(turn.prompt_ids)
        if ids and prompt[: len(ids)] != ids:
            done.append(Segment(tuple(ids), tuple(mask), tuple(logprobs)))
            ids, mask, logprobs = [], [], []
        context = prompt[len(ids) :]
        ids += context + list(turn.ids)
        mask += [False] * len(context) + [True] * len(turn.ids)
        logprobs += [0.0] * len(context) + list(turn.logprobs)
    if any(mask):
        done.append(Segment(tuple(ids), tuple(mask), tuple(logprobs)))
    return tuple(done)
