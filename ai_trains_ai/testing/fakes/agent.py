"""An outer agent that says what a script says."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ai_trains_ai.errors import (
    PolicyError,
)
from ai_trains_ai.interfaces import (
    OuterTrainer,
    Policy,
    RunContext,
)
from ai_trains_ai.outer.chat import call_text, parse_calls
from ai_trains_ai.records import (
    Checkpoint,
    EpisodeGroup,
    Exported,
    Message,
    SamplingParams,
    TrainStep,
    Turn,
)
from ai_trains_ai.store import attempt_write
from ai_trains_ai.testing.fakes.context import NO_TENSORS

ENVIRONMENT = """\
import verifiers.v1 as vf
from ai_trains_ai.families.practice import practice

__all__ = ["Rows"]

class Row(vf.TaskData):
    answer: str
    steps: list[str]

class Worked(vf.Task[Row]):
    @vf.reward
    async def worth(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split("so")[-1].strip() == self.data.answer)

class Rows(vf.Taskset[Worked, vf.TasksetConfig]):
    def load(self):
        for row in practice("{family}", {low}, {high}):
            yield Worked(Row(**row), self.config.task)
"""
JOB = 'base_model = "pico-m"\n\n[prime_rl]\nmax_steps = 3\nbatch_size = 24\noptim.lr = 1e-3\n'


def environment(family: str = "chained-arithmetic", low: int = 2, high: int = 3) -> str:
    """A small valid environment.py for a built-in family, for items of ``low`` to ``high`` steps."""
    return ENVIRONMENT.replace("{family}", family).replace("{low}", str(low)).replace("{high}", str(high))


Script = Sequence[str] | Callable[[Sequence[Message], int], str]
"""The texts of a conversation's turns, or a function of the conversation and its number (from 1) that gives the next.

Numbers count the conversations that one snapshot began.
"""


def write_a_job(conversation: Sequence[Message], number: int) -> str:
    """The default script: writes a small valid job for the task's family and submits it; every fourth gives up."""
    from ai_trains_ai.families import BUILT_IN, load

    spoken = sum(message.role == "assistant" for message in conversation)
    if number % 4 == 0 or spoken > 2:
        return "No."
    told = " ".join(message.content for message in conversation if message.role == "user")
    family = load(next((name for name in BUILT_IN if f"Family {name}" in told), next(iter(BUILT_IN))))
    source = environment(family.name, max(2, family.shallowest), min(3, family.deepest))
    return (
        call_text("write_file", path="environment.py", content=source),
        call_text("write_file", path="job.toml", content=JOB),
        call_text("submit"),
    )[spoken]


class ScriptedPolicy(Policy):
    """Says what its script says; the text counts as tokens of `PIECE` characters.

    The number of a conversation travels as the first token of its prompts.
    """

    PIECE = 16
    CONTEXT = 8_192
    STOP = 0

    def __init__(self, version: int, script: Script = write_a_job) -> None:
        self.version = version
        self.conversations = 0
        self._script = script

    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        prompt = self.prompt(conversation)
        await asyncio.sleep(0)
        room = min(params.max_tokens, self.CONTEXT - len(prompt))
        if room < 1:
            return Turn("", (), "context", self.version, prompt)
        text = self._text(conversation, prompt[0])
        ids = (*self.encode(text), self.STOP)
        if len(ids) <= room:
            return Turn(text, parse_calls(text), "stop", self.version, prompt, ids, (-0.1,) * len(ids))
        return Turn(text[: room * self.PIECE], (), "length", self.version, prompt, ids[:room], (-0.1,) * room)

    def prompt(self, conversation: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of everything before the next turn; what was sampled goes in as it was."""
        sampled = [number for number, message in enumerate(conversation) if message.turn and message.turn.ids]
        if sampled:
            last = conversation[sampled[-1]].turn
            assert last is not None
            known, rest = (*last.prompt_ids, *last.ids), conversation[sampled[-1] + 1 :]
        else:
            self.conversations += 1
            known, rest = (self.conversations,), conversation
        return (*known, *(token for message in rest for token in self.encode(f"{message.role}\n{message.content}")))

    def encode(self, text: str) -> list[int]:
        pieces = (text[start : start + self.PIECE] for start in range(0, len(text), self.PIECE))
        return [1 + zlib.crc32(piece.encode("utf-8", "backslashreplace")) % 30_000 for piece in pieces]

    def _text(self, conversation: Sequence[Message], number: int) -> str:
        if callable(self._script):
            return self._script(conversation, number)
        spoken = sum(message.role == "assistant" for message in conversation)
        return self._script[spoken] if spoken < len(self._script) else "No."


class ScriptedAgent(OuterTrainer):
    """An outer trainer that plays a script and learns nothing, but keeps every contract.

    >>> ScriptedAgent(["I give up."]).version
    0

    Attributes:
        version: rises with every `train_step`.
        trained: the groups that it was given, one list a step.
    """

    def __init__(self, script: Script = write_a_job) -> None:
        self._script = script
        self.version = 0
        self.trained: list[list[EpisodeGroup]] = []

    async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
        self._folder = run.folder
        self.version = self._read(checkpoint) if checkpoint else 0
        self.policy = ScriptedPolicy(self.version, self._script)

    async def snapshot(self) -> Policy:
        return self.policy

    async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
        paired = [pair for group in groups for pair in zip(group.episodes, group.advantages, strict=True)]
        if any(advantage is not None and not abs(advantage) < float("inf") for _, advantage in paired):
            raise PolicyError("An advantage is not finite; nothing changed.")
        self.trained.append(list(groups))
        self.version += 1
        self.policy = ScriptedPolicy(self.version, self._script)
        tokens = sum(sum(segment.mask) for episode, advantage in paired if advantage for segment in episode.segments)
        return TrainStep(self.version, {"outer/kl": 0.0}, tokens)

    async def save(self, name: str) -> Checkpoint:
        checkpoint = Checkpoint(name, f"checkpoints/{name}", self.version)
        attempt_write(self._folder / checkpoint.path / "agent.json", json.dumps({"version": self.version}).encode())
        return checkpoint

    async def export(self, checkpoint: Checkpoint, folder: Path) -> Exported:
        config = json.dumps({"model_type": "scripted", "version": self._read(checkpoint)})
        attempt_write(folder / "config.json", config.encode())
        attempt_write(folder / "model.safetensors", NO_TENSORS)
        return Exported(str(folder), "weights")

    def _read(self, checkpoint: Checkpoint) -> int:
        path = self._folder / checkpoint.path / "agent.json"
        try:
            return int(json.loads(path.read_bytes())["version"])
        except OSError as error:
            raise PolicyError(f"{path} can't be read: {error.strerror}. Resume from another checkpoint.") from error
