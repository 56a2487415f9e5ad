"""A chat endpoint as the outer agent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import JOB, environment
from fakes.chat import ChatServer, call, chat_server

import ai_trains_ai as ata
from ai_trains_ai.agent.tools import TOOLS
from ai_trains_ai.errors import BudgetExceeded, ConfigurationError, PolicyError, SandboxError
from ai_trains_ai.interfaces import OuterPolicy, Sandbox
from ai_trains_ai.outer.frozen import FrozenOuterTrainer, chat_messages
from ai_trains_ai.records import Budget, Message, SamplingParams, ToolCall, Turn, Usage
from ai_trains_ai.report import leaderboard
from ai_trains_ai.testing import OuterPolicyContract
from ai_trains_ai.testing.fakes import run_context

PARAMS = SamplingParams(max_tokens=32)


def reads_a_file(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"content": "I look.", "tool_calls": [call("read_file", {"path": "TASK.md"})]}


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server(reads_a_file) as server:
        yield server


class TestFrozenOuterTrainer(OuterPolicyContract):
    @pytest.fixture
    def policy(self, server: ChatServer) -> OuterPolicy:
        return FrozenOuterTrainer("some-model", base_url=server.url)


async def act(folder: Path, trainer: FrozenOuterTrainer, *messages: Message, budget: Budget | None = None) -> Turn:
    with run_context(folder, budget=budget) as run:
        await trainer.start(run)
        try:
            talk = messages or (Message("system", "You write jobs."), Message("user", "Begin."))
            return await (await trainer.snapshot()).act(talk, TOOLS, PARAMS)
        finally:
            await trainer.close()


async def test_a_turn_has_the_calls_and_the_counted_tokens(server: ChatServer, tmp_path: Path) -> None:
    turn = await act(tmp_path / "run", FrozenOuterTrainer("some-model", base_url=server.url))
    assert (turn.text, turn.calls) == ("I look.", (ToolCall("read_file", {"path": "TASK.md"}),))
    assert turn.usage == Usage(5, 20, 2)


async def test_what_it_asks_for(server: ChatServer, tmp_path: Path) -> None:
    options = {"max_tokens": 17, "seed": None, "extra": 1}
    trainer = FrozenOuterTrainer("some-model", base_url=server.url, temperature=0.5, top_p=0.9, options=options)
    await act(tmp_path / "run", trainer)
    (body,) = server.asked
    asked = {name: body.get(name) for name in ("model", "temperature", "top_p", "max_tokens", "seed", "extra")}
    assert asked == {
        "model": "some-model",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 17,
        "seed": None,
        "extra": 1,
    }
    assert [tool["function"]["name"] for tool in body["tools"]] == [tool["function"]["name"] for tool in TOOLS]


@pytest.mark.parametrize("arguments", ["{not json", "[1]"])
async def test_a_broken_call_is_the_agents_to_repair(tmp_path: Path, arguments: str) -> None:
    with chat_server(lambda body: {"tool_calls": [call("submit", arguments)]}) as server:
        turn = await act(tmp_path / "run", FrozenOuterTrainer("m", base_url=server.url))
    assert [(broken.name, broken.error.partition(":")[0]) for broken in turn.calls] == [("submit", "invalid_json")]


async def test_a_turn_that_was_cut_has_no_calls(tmp_path: Path) -> None:
    cut = {"content": "and then", "finish_reason": "length", "tool_calls": [call("submit", "{")]}
    with chat_server(lambda body: cut) as server:
        turn = await act(tmp_path / "run", FrozenOuterTrainer("m", base_url=server.url))
    assert (turn.stop_reason, turn.calls) == ("length", ())


async def test_a_busy_service_is_asked_again(server: ChatServer, tmp_path: Path) -> None:
    server.refusals = [(429, "slow down"), (503, "overloaded")]
    assert (await act(tmp_path / "run", FrozenOuterTrainer("m", base_url=server.url))).calls
    assert len(server.asked) == 3


@pytest.mark.parametrize(("status", "said"), [(401, "refuses the key"), (400, "odd field"), (404, "no such")])
async def test_a_refusal_says_why(server: ChatServer, tmp_path: Path, status: int, said: str) -> None:
    server.refusals = [(status, said)]
    with pytest.raises(PolicyError, match=said):
        await act(tmp_path / "run", FrozenOuterTrainer("m", base_url=server.url))


async def test_openai_itself_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY"):
        await act(tmp_path / "run", FrozenOuterTrainer("m"))


async def test_the_key_is_sent_and_never_shown(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    trainer = FrozenOuterTrainer("m", base_url=server.url, key="SOME_KEY")
    await act(tmp_path / "run", trainer)
    assert server.keys == ["Bearer sk-secret"]
    assert "sk-secret" not in repr(trainer) + str(vars(trainer))


async def test_tokens_are_booked_by_their_price(server: ChatServer, tmp_path: Path) -> None:
    prices = {"prefill": 1.0, "cached": 0.1, "sampled": 10.0}
    await act(tmp_path / "run", FrozenOuterTrainer("m", base_url=server.url, prices=prices), budget=Budget(usd=1.0))
    with run_context(tmp_path / "run") as run:
        charges = [charge for _, charge in run.store.charges()]
    booked = {charge.subject: (charge.quantity, pytest.approx(charge.usd)) for charge in charges}
    assert booked == {"m: prefill": (3, 3e-6), "m: cached prefill": (2, 2e-7), "m: sampled": (20, 2e-4)}


async def test_a_budget_needs_prices(server: ChatServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="prices"):
        await act(tmp_path / "run", FrozenOuterTrainer("m", base_url=server.url), budget=Budget(usd=1.0))


async def test_nothing_is_asked_beyond_the_budget(server: ChatServer, tmp_path: Path) -> None:
    trainer = FrozenOuterTrainer("m", base_url=server.url, prices={"prefill": 0.0, "sampled": 1e6})
    with pytest.raises(BudgetExceeded):
        await act(tmp_path / "run", trainer, budget=Budget(usd=1.0))
    assert not server.asked


def test_answers_go_to_their_calls() -> None:
    calls = (ToolCall("list_files"), ToolCall("", {}, "malformed: no name"), ToolCall("read_file", {"path": "a"}))
    talk = [
        Message("user", "Begin."),
        Message("assistant", "So.", Turn("So.", calls, "stop", 0)),
        *(Message("tool", answer) for answer in ("files", "error", "text")),
    ]
    _, assistant, *answers = chat_messages(talk)
    assert [c["function"]["name"] for c in assistant["tool_calls"]] == ["list_files", "read_file"]
    ids = [c["id"] for c in assistant["tool_calls"]]
    assert [(a["role"], a.get("tool_call_id")) for a in answers] == [("tool", ids[0]), ("user", None), ("tool", ids[1])]


@pytest.mark.parametrize("options", [{"temperature": 3.0}, {"top_p": 0.0}, {"seconds": 0}, {"prices": {"prefil": 1}}])
def test_arguments_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        FrozenOuterTrainer("m", **options)


# ---------------------------------------------------------------------------------------------- an evaluation


def writes_a_job(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A small valid job for the task's family, a file a turn."""
    spoken = sum(message["role"] == "assistant" for message in body["messages"])
    told = " ".join(str(message["content"]) for message in body["messages"] if message["role"] == "user")
    family = next(name for name in ("multi-hop", "chained-arithmetic", "triage") if name in told)
    files = {"environment.py": environment(family), "job.toml": JOB}
    if spoken == len(files):
        return {"tool_calls": [call("submit", {})]}
    path = list(files)[spoken]
    return {"tool_calls": [call("write_file", {"path": path, "content": files[path]})]}


@pytest.mark.slow
def test_an_evaluated_agent_is_a_row_of_the_leaderboard(tmp_path: Path) -> None:
    with chat_server(writes_a_job, context=1 << 20) as server:
        outer = ata.outer_trainer(
            "frozen", model="writer", base_url=server.url, prices={"prefill": 1.0, "sampled": 2.0}
        )
        experiment = ata.Experiment.embedded(
            outer=outer, families=["chained-arithmetic"], held_out=[], eval_items=32, max_tokens=256,
            budget=Budget(usd=5.0),
        )  # fmt: skip
        run = experiment.evaluate_sync(2, out=tmp_path / "run")
    row = leaderboard.row(run)
    tasks = len(row.tasks)
    assert (row.agent, row.episodes, row.masked, row.valid, row.tampered) == ("writer", 2 * tasks, 0, 1.0, 0.0)
    assert row.low <= row.reward <= row.high
    assert row.outer_usd == pytest.approx(row.usd)
    assert row.outer_usd > 0
    leaderboard.append(tmp_path / "board.jsonl", row)
    assert leaderboard.read(tmp_path / "board.jsonl") == [row]
    with pytest.raises(ConfigurationError, match="evaluation"):
        ata.resume(run.path).run_sync(3)
    again = ata.resume(run.path, outer=outer).evaluate_sync()  # everything is there already
    assert leaderboard.row(again).reward == row.reward


async def test_an_endpoint_that_is_not_there_yet(tmp_path: Path, sandbox: Sandbox) -> None:
    """Nothing was played: it is an error, and the evaluation is played when the endpoint is there."""
    plan: dict[str, Any] = {"families": ["multi-hop"], "held_out": [], "eval_items": 16, "max_tokens": 256}
    absent = ata.outer_trainer("frozen", model="writer", base_url="http://127.0.0.1:9/v1", retries=0)
    experiment = ata.Experiment.embedded(outer=absent, sandbox=sandbox, **plan)
    with pytest.raises(SandboxError, match=r"all \d+ episodes of the evaluation .* writer can't be asked"):
        await experiment.evaluate(1, out=tmp_path / "run")
    with chat_server(writes_a_job, context=1 << 20) as server:
        outer = ata.outer_trainer("frozen", model="writer", base_url=server.url)
        run = await ata.resume(tmp_path / "run", outer=outer, sandbox=sandbox).evaluate()
    assert leaderboard.row(run).masked == 0


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:8000/v1", "http://", "http://x:port/v1", 5])
def test_an_address_that_is_none(address: Any) -> None:
    with pytest.raises(ConfigurationError, match="Write it like http://"):
        FrozenOuterTrainer("writer", base_url=address)


def test_a_line_that_is_no_row(tmp_path: Path) -> None:
    board = tmp_path / "board.jsonl"
    board.write_text(json.dumps({"agent": "x"}) + "\n")
    with pytest.raises(ConfigurationError, match="line 1"):
        leaderboard.read(board)
