from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ai_trains_ai.agent import open_workspace, opening, play
from ai_trains_ai.agent.rollout import MAX_TURNS, Rollout, segments
from ai_trains_ai.inner.embedded import EmbeddedJobRunner
from ai_trains_ai.interfaces import Policy, Sandbox
from ai_trains_ai.outer.chat import call_text, parse_calls
from ai_trains_ai.records import (
    Baseline,
    BaseModel,
    Evaluation,
    Finding,
    Item,
    Message,
    SamplingParams,
    SandboxResult,
    Submission,
    Task,
    Turn,
    ValidationReport,
)

EXAMPLE = Item("start 1 add 1 ->", "2", ("2",), "k")
TASK = Task("t", "chained-arithmetic", "Chained arithmetic", "Add.", {"low": 1, "high": 2}, (EXAMPLE,))
MODELS = [BaseModel("pico-s", 10, "small"), BaseModel("pico-m", 20, "larger")]
SURFACE = EmbeddedJobRunner().config_surface()
JOB = call_text("write_file", path="job.toml", content='base_model = "pico-m"\n')
ENVIRONMENT = call_text("write_file", path="environment.py", content="pass\n")
SUBMIT = call_text("submit")


class Script(Policy):
    version = 4

    def __init__(self, *texts: str, stop: str = "stop") -> None:
        self.texts, self.stop = list(texts), stop
        self.seeds: list[int] = []

    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        self.seeds.append(params.seed)
        text = self.texts.pop(0) if self.texts else call_text("list_files")
        return Turn(text, parse_calls(text), self.stop, self.version)  # type: ignore[arg-type]


class Scripts(Sandbox):
    """A sandbox that answers as it is told to."""

    def __init__(self, result: SandboxResult) -> None:
        self.result = result
        self.ran: list[tuple[str, bytes]] = []

    def preload(self, *targets: str) -> None: ...

    def another(self, preload: Sequence[str] = ()) -> Sandbox:
        return self

    async def start(self) -> None: ...

    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        self.ran.append((target, payload))
        return self.result

    async def close(self) -> None: ...


async def played(policy: Policy, *valid: bool, sandbox: Sandbox | None = None) -> Rollout:
    answers = list(valid)

    async def validate(submission: Submission) -> ValidationReport:
        ok = answers.pop(0)
        return ValidationReport(
            ok, () if ok else (Finding("bad-toml", "parse", "not TOML", "Fix it.", "job.toml"),), "parse"
        )

    workspace = open_workspace(TASK, MODELS, None, SURFACE)
    begin = opening(TASK, MODELS, None)
    nothing = sandbox or Scripts(SandboxResult("exited", 0))
    return await play("e", begin, workspace, policy, validate, nothing, SamplingParams(seed=100))


async def test_a_good_episode() -> None:
    rollout = await played(Script(ENVIRONMENT, JOB, SUBMIT), True)
    assert (rollout.end, len(rollout.reports)) == ("submitted", 1)
    assert rollout.submission is not None
    assert rollout.submission.files == {"environment.py": b"pass\n", "job.toml": b'base_model = "pico-m"\n'}
    assert [m.role for m in rollout.messages[2:]] == ["assistant", "tool"] * 3
    assert rollout.messages[-1].content == "valid"


async def test_a_refusal_is_answered_and_can_be_repaired() -> None:
    rollout = await played(Script(ENVIRONMENT, SUBMIT, JOB, SUBMIT), False, True)
    assert rollout.messages[5].content == "invalid\n[bad-toml] job.toml: not TOML Fix it."
    assert rollout.submission is not None
    assert rollout.submission.attempt == 2
    assert rollout.report is rollout.reports[1]


async def test_attempts_run_out() -> None:
    rollout = await played(Script(SUBMIT, SUBMIT, SUBMIT, SUBMIT), False, False, False)
    assert (rollout.end, rollout.submission, len(rollout.reports)) == ("attempts", None, 3)


@pytest.mark.parametrize(
    ("policy", "end"),
    [(Script("I am done."), "prose"), (Script("x", stop="length"), "context"), (Script(), "turns")],
    ids=["prose", "context", "turns"],
)
async def test_other_ends(policy: Script, end: str) -> None:
    rollout = await played(policy)
    assert rollout.end == end
    assert len(rollout.turns) <= MAX_TURNS


async def test_every_turn_samples_with_a_seed_of_its_own() -> None:
    policy = Script(ENVIRONMENT, JOB, SUBMIT)
    await played(policy, True)
    assert policy.seeds == [100, 101, 102]


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (call_text("write_file", path="../x", content=""), "error: "),
        (call_text("write_file", path="TASK.md", content=""), "error: "),
        (call_text("write_file", path="a.py"), "error: write_file needs content"),
        (call_text("fly"), "error: no tool 'fly'"),
        (call_text("read_file", path="TASK.md"), "# Chained arithmetic"),
        (call_text("read_file", path="guide/reference/environment.py"), "import verifiers.v1 as vf"),
        (call_text("run_python", path="none.py"), "error: there is no file 'none.py'"),
        ("<tool_call>\n{\n</tool_call>", "error: the tool call is not JSON"),
        ('<tool_call>{"name": "read_file", "arguments": {"path": 3}}</tool_call>', "error: arguments of read_file"),
    ],
)
async def test_what_the_agent_reads(call: str, answer: str) -> None:
    rollout = await played(Script(call, "done"))
    assert rollout.messages[3].content.startswith(answer)


async def test_run_python_brings_back_what_the_script_wrote() -> None:
    frames = (("file", b'{"path": "notes.txt"}\nhi'), ("file", b"garbage"), ("file", b'{"path": "TASK.md"}\nforged'))
    sandbox = Scripts(SandboxResult("exited", 0, frames, b"printed"))
    calls = (call_text("write_file", path="try.py", content="x"), call_text("run_python", path="try.py"))
    reads = (call_text("read_file", path="notes.txt"), call_text("read_file", path="TASK.md"), "done")
    rollout = await played(Script(*calls, *reads), sandbox=sandbox)
    answers = [message.content for message in rollout.messages if message.role == "tool"]
    assert answers[1].splitlines()[:2] == ["printed", "[exit 0]"]
    assert "TASK.md: read-only" in answers[1]
    assert answers[2] == "hi"
    assert "forged" not in answers[3]


def test_the_reference_job_is_of_another_family() -> None:
    files = open_workspace(TASK, MODELS, None, SURFACE)
    assert "multi-hop" in files.read("guide/reference/environment.py")
    assert "chained-arithmetic" not in files.read("guide/reference/environment.py")
    assert all(key.path in files.read("guide/config.md") for key in SURFACE.keys)


def test_baselines_are_shown_or_withheld() -> None:
    known = [Baseline("pico-m", Evaluation("t", "pico-m", 512, 0.17, 0.02))]
    assert "0.17" in opening(TASK, MODELS, known)[1].content
    assert "0.17" not in opening(TASK, MODELS, None)[1].content


def turn(prompt: Sequence[int], ids: Sequence[int]) -> Turn:
    return Turn("", (), "stop", 0, tuple(prompt), tuple(ids), tuple(-0.1 * i for i in ids))


def test_one_segment_while_prompts_extend() -> None:
    (segment,) = segments([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6])])
    assert segment.ids == (1, 2, 3, 4, 5, 6)
    assert segment.mask == (False, False, True, True, False, True)
    assert segment.logprobs == pytest.approx((0, 0, -0.3, -0.4, 0, -0.6))


def test_a_break_starts_a_new_segment() -> None:
    first, second = segments([turn([1, 2], [3, 4]), turn([1, 9], [6])])
    assert (first.ids, second.ids) == ((1, 2, 3, 4), (1, 9, 6))


def test_a_turn_without_tokens_adds_none() -> None:
    assert segments([turn([1, 2], [])]) == ()
    (segment,) = segments([turn([1], [2]), turn([1, 2, 3], [])])
    assert segment.mask == (False, True, False)
