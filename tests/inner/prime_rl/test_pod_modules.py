"""The agent's code on the pod: stub, shim and harness around it, and the pre-flight that plays through them.

Env servers are real processes of the installed verifiers; one serves every single-turn case, one every conversation.
``AI_TRAINS_AI_VERIFIERS_030`` and ``…_031`` name Python interpreters that have those versions.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ai_trains_ai.inner.prime_rl.pod import preflight, replies
from ai_trains_ai.inner.prime_rl.shipment import POD, modules

pytest.importorskip("verifiers", reason="needs verifiers")

HANG = 120.0  # a guard alone
SINGLE = """
import asyncio, time
import verifiers.v1 as vf
__all__ = ["Rows"]
class Row(vf.TaskData):
    answer: str
    kind: str = "good"
class Check(vf.Task[Row]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        match self.data.kind:
            case "raises": raise KeyError("the agent's own mistake")
            case "hangs": await asyncio.sleep(1000)
            case "blocks": time.sleep(4)
            case "nan": return float("nan")
        return float(trace.last_reply == self.data.answer)
class Rows(vf.Taskset[Check, vf.TasksetConfig]):
    def load(self):
        raise RuntimeError("rows are frozen: nobody calls this here")
"""
MULTI = """
import helper
import verifiers.v1 as vf
__all__ = ["Rows", "Talk"]
class Row(vf.TaskData):
    turns: int
    limit: int = 99
class Check(vf.Task[Row]):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= self.data.limit
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns / len(trace.branches)
class Rows(vf.Taskset[Check, vf.TasksetConfig]):
    def load(self):
        raise RuntimeError("rows are frozen: nobody calls this here")
class Talk(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as chat:
            segment = await chat.turn() if task.data.prompt else await chat.turn(helper.GREETING)
            for number in range(2, task.data.turns + 1):
                if segment.terminated:
                    break
                segment = await chat.turn(f"turn {number}")
"""
SERVE = """
import json, sys
import verifiers.v1 as vf
from verifiers.v1.serve import env_config_data, serve_env
serve_env(
    max_workers=1, address=sys.argv[1], config_data=env_config_data(vf.resolve_env_config(json.loads(sys.argv[2])))
)
"""
ENV = {
    "taskset": {"id": "ata-job"},
    "agent": {
        "harness": {"id": "ata-harness"},
        "runtime": {"type": "subprocess"},
        "timeout": {"rollout": 60.0, "scoring": 1.0},
    },
}
Row = Mapping[str, Any]


class Model(replies.Server):
    """The stand-in for the model, in a thread here: keeps what it was asked, and answers what a test wants."""

    def __init__(self) -> None:
        super().__init__(0, "small")
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.asked: list[Mapping[str, Any]] = []
        self.say: str | None = None

    def completion(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        if self.say == "fail":
            raise ValueError("the model is broken")
        completion = super().completion(request)
        if self.say is not None:
            completion["choices"][0]["message"]["content"] = self.say
        return completion


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return int(probing.getsockname()[1])


def lay_out(folder: Path, files: Mapping[str, str]) -> Path:
    """A job's folder as it arrives on a pod: our modules and the agent's files."""
    shipped = {**modules(), **{f"submission/{name}": text.encode() for name, text in files.items()}}
    for name, data in shipped.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def env_server(folder: Path, port: int, python: str = sys.executable) -> subprocess.Popen[bytes]:
    with (folder / "env.log").open("wb") as log:
        return subprocess.Popen(
            [python, "-c", SERVE, f"tcp://127.0.0.1:{port}", json.dumps(ENV)],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(folder),
                "PYTHONPATH": str(folder / "modules" / "agent"),
                "ATA_SUBMISSION": str(folder / "submission"),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@contextmanager
def serving(folder: Path, files: Mapping[str, str], python: str = sys.executable) -> Iterator[str]:
    """The address of an env server for a submission."""
    port = free_port()
    server = env_server(lay_out(folder, files), port, python)
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(HANG)


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The engine's own side: its modules are on the path here, and its rows go to the folder."""
    folder = lay_out(tmp_path_factory.mktemp("trusted"), {})
    path = str(folder / "modules" / "trusted")
    sys.path.insert(0, path)
    yield folder
    sys.path.remove(path)
    sys.modules.pop("ata_job", None)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("single"), {"environment.py": SINGLE}) as address:
        yield address


@pytest.fixture(scope="module")
def multi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    files = {"environment.py": MULTI, "helper.py": "GREETING = 'Good morning.'"}
    with serving(tmp_path_factory.mktemp("multi"), files) as address:
        yield address


@pytest.fixture
def model() -> Iterator[Model]:
    with Model() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(HANG)


@pytest.fixture
def write(trusted: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Freeze rows as the engine's side finds them."""

    def freeze(rows: Sequence[Row]) -> Path:
        path = trusted / "rows.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        monkeypatch.setenv("ATA_ROWS", str(path))
        return path

    return freeze


@pytest.fixture
def play(write: Any, model: Model) -> Any:
    """Play rows through an env server, as the pre-flight does."""

    async def run(address: str, rows: Sequence[Row], **changes: Any) -> dict[str, Any]:
        write(rows)
        options = {
            "address": address,
            "base_url": model.url,
            "model": "small",
            "tasks": len(rows),
            "group": 1,
            "temperature": 0.7,
            "max_tokens": 64,
            "thinking": 0,
            "timeout": HANG,
        }
        return await preflight.play(argparse.Namespace(**{**options, **changes}))

    return run


def stub() -> Any:
    return import_module("ata_job")


def frozen() -> list[Any]:
    return list(stub().FrozenRows(stub().AnyConfig(id="ata-job")).load())


# ---------------------------------------------------------------------------------------------- the stub


def test_the_stub_gives_every_field_of_every_row_in_order(write: Any) -> None:
    rows = [{"idx": 3, "prompt": "a\u2028b", "mine": {"x": [1, None]}}, {"idx": 7, "prompt": None, "mine": 0.5}]
    write(rows)
    dumped = [task.data.model_dump(mode="json") for task in frozen()]
    assert [{name: data[name] for name in ("idx", "prompt", "mine")} for data in dumped] == rows


def test_the_stub_numbers_rows_that_have_no_number(write: Any) -> None:
    write([{"prompt": "a"}, {"prompt": "b"}])
    assert [task.data.idx for task in frozen()] == [0, 1]


def test_the_stubs_config_takes_any_table_and_writes_it_out_without_defaults(trusted: Path) -> None:
    table = {"id": "ata-job", "levels": {"easy": 0.5}, "task": {"scale": 2, "modes": [{"name": "strict"}]}}
    assert stub().AnyConfig.model_validate(table).model_dump(mode="json") == table


# ---------------------------------------------------------------------------------------------- one turn


async def test_a_good_environment_scores_every_rollout(single: str, play: Any, model: Model) -> None:
    model.say = "4"
    found = await play(single, [{"idx": n, "prompt": "two and two?", "answer": str(n)} for n in (3, 4)], group=2)
    assert found.pop("seconds") > 0
    assert found == {"rollouts": 4, "errors": 0, "error": "", "truncated": 0, "rewards": [[0.0, 0.0], [1.0, 1.0]]}


async def test_the_model_is_asked_what_the_row_says(single: str, play: Any, model: Model) -> None:
    await play(single, [{"prompt": "two and two?", "system_prompt": "Be brief.", "answer": ""}])
    assert [asked["messages"] for asked in model.asked] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two and two?"}]
    ]


async def test_a_prompt_of_messages_arrives_as_it_is(single: str, play: Any, model: Model) -> None:
    prompt = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    await play(single, [{"prompt": prompt, "answer": ""}])
    assert [asked["messages"] for asked in model.asked] == [prompt]


@pytest.mark.parametrize("thinking", [0, 1])
async def test_the_request_has_the_sampling_of_the_training(
    thinking: int, single: str, play: Any, model: Model
) -> None:
    await play(single, [{"prompt": "?", "answer": ""}], thinking=thinking)
    (asked,) = model.asked
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"]) == (0.7, 1.0, 64)
    assert asked["chat_template_kwargs"] == {"enable_thinking": bool(thinking)}


async def test_replies_that_are_cut_off_are_counted(single: str, play: Any) -> None:
    rows = [{"prompt": str(n), "answer": ""} for n in range(len(replies.REPLIES))]
    assert (await play(single, rows))["truncated"] == 1


async def test_tasks_are_taken_from_all_over_the_rows(single: str, play: Any, model: Model) -> None:
    await play(single, [{"prompt": str(n), "answer": ""} for n in range(10)], tasks=4)
    assert sorted(asked["messages"][0]["content"] for asked in model.asked) == ["0", "3", "6", "9"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [("raises", 'KeyError: "the agent\'s own mistake"'), ("hangs", "timeout"), ("nan", "reward is not finite")],
)
async def test_a_reward_that_fails_is_an_error_with_its_reason(kind: str, said: str, single: str, play: Any) -> None:
    found = await play(single, [{"prompt": "?", "answer": "", "kind": kind}], group=2)
    assert (found["errors"], found["rewards"]) == (2, [[None, None]])
    assert said in found["error"]


async def test_an_environment_that_stands_still_is_a_timeout(single: str, play: Any) -> None:
    found = await play(single, [{"prompt": "?", "answer": "", "kind": "blocks"}], timeout=2.0)
    assert (found["errors"], found["error"]) == (1, "timeout")


async def test_a_failure_of_the_model_is_told_by_its_own_words(single: str, play: Any, model: Model) -> None:
    model.say = "fail"
    found = await play(single, [{"prompt": "?", "answer": ""}])
    assert (found["errors"], len(model.asked)) == (1, 1)  # and nothing is tried again
    assert "the model is broken" in found["error"]


async def test_a_row_that_does_not_fit_the_agents_type_names_the_field(single: str, play: Any) -> None:
    found = await play(single, [{"prompt": "?"}])
    assert "answer" in found["error"]


async def test_a_server_that_is_not_there_is_unhealthy(play: Any) -> None:
    assert await play(f"tcp://127.0.0.1:{free_port()}", [{"prompt": "?"}], timeout=1.0) == {"unhealthy": True}


# ---------------------------------------------------------------------------------------------- conversations


async def test_a_conversation_is_resumed_with_all_that_was_said(multi: str, play: Any, model: Model) -> None:
    model.say = "go on"
    await play(multi, [{"prompt": "begin", "system_prompt": "Be brief.", "turns": 3}])
    assert [message["content"] for message in model.asked[-1]["messages"]] == [
        "Be brief.",
        "begin",
        "go on",
        "turn 2",
        "go on",
        "turn 3",
    ]


async def test_the_environment_may_speak_first(multi: str, play: Any, model: Model) -> None:
    await play(multi, [{"turns": 1}])
    assert model.asked[-1]["messages"] == [{"role": "user", "content": "Good morning."}]


async def test_every_kind_of_reply_leaves_one_unbroken_conversation(multi: str, play: Any) -> None:
    kinds = len(replies.REPLIES)
    found = await play(multi, [{"prompt": "begin", "turns": kinds}], max_tokens=9999)
    assert (found["error"], found["rewards"]) == ("", [[float(kinds)]])


async def test_a_stop_of_the_task_ends_the_conversation_without_an_error(multi: str, play: Any) -> None:
    found = await play(multi, [{"prompt": "begin", "turns": 5, "limit": 2}])
    assert (found["error"], found["rewards"]) == ("", [[2.0]])


# ---------------------------------------------------------------------------------------------- imports that fail

BAD = {
    "a module that is not there": ("import no_such_module", "No module named 'no_such_module' (environment.py:2)"),
    "an exit": ("raise SystemExit(0)", "SystemExit: 0 (environment.py:2)"),
    "a line that is no Python": ("x = (", "SyntaxError: '(' was never closed (environment.py:2)"),
    "no taskset": ("", "__all__ names 0 Tasksets, not one."),
}


@pytest.mark.parametrize(("code", "said"), BAD.values(), ids=BAD)
def test_the_shim_raises_one_kind_of_error_that_verifiers_lets_through(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path, {"environment.py": f"import verifiers.v1 as vf\n{code}\n"})
    monkeypatch.setenv("ATA_SUBMISSION", str(tmp_path / "submission"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "environment", ModuleType("environment"))
    source = (tmp_path / "modules" / "agent" / "ata_job.py").read_text()
    with pytest.raises(ImportError) as caught:
        exec(compile(source, "ata_job.py", "exec"), {"__name__": "ata_job"})
    assert caught.type is ImportError
    assert said in str(caught.value)


def test_the_reason_of_a_failed_import_is_the_last_line_of_the_env_servers_log(tmp_path: Path) -> None:
    lay_out(tmp_path, {"environment.py": "import verifiers.v1 as vf\nimport no_such_module\n"})
    server = env_server(tmp_path, free_port())
    assert server.wait(HANG) != 0
    assert (tmp_path / "env.log").read_text().splitlines()[-1] == (
        "ImportError: Failed to load environment 'environment.py': "
        "ModuleNotFoundError: No module named 'no_such_module' (environment.py:2)"
    )


# ---------------------------------------------------------------------------------------------- the stand-in model


def ask(url: str, **request: Any) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "one two"}], **request}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=HANG) as answer:
        return bytes(answer.read())


def test_the_stand_in_repeats_its_replies_in_order_with_their_usage(model: Model) -> None:
    url = f"{model.url}/chat/completions"
    first, again = ([json.loads(ask(url)) for _ in replies.REPLIES] for _ in range(2))
    assert [one["choices"] for one in first] == [one["choices"] for one in again]
    assert all(one["usage"]["total_tokens"] > one["usage"]["prompt_tokens"] > 0 for one in first)


def test_the_stand_in_streams_the_same(model: Model) -> None:
    url = f"{model.url}/chat/completions"
    plain = [json.loads(ask(url))["choices"][0]["message"]["content"] for _ in replies.REPLIES]
    streamed = []
    for _ in replies.REPLIES:
        events = [line[len("data: ") :] for line in ask(url, stream=True).decode().split("\n") if line]
        assert events.pop() == "[DONE]"
        deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        streamed.append("".join(delta.get("content", "") for delta in deltas))
    assert streamed == plain


def test_the_stand_in_is_a_program_that_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    port = free_port()
    argv = [sys.executable, "-m", f"{POD}.replies", "--port", str(port), "--model", "small"]
    server = subprocess.Popen(argv)
    try:
        models = json.loads(_get(f"http://127.0.0.1:{port}/v1/models"))
        assert (_get(f"http://127.0.0.1:{port}/health"), models["data"][0]["id"]) == (b"", "small")
        server.send_signal(signal.SIGTERM)
        assert server.wait(HANG) == 0
    finally:
        server.kill()
        server.wait(HANG)


def _get(url: str) -> bytes:
    until = time.monotonic() + HANG
    while True:
        try:
            with urllib.request.urlopen(url, timeout=HANG) as answer:
                return bytes(answer.read())
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


# ---------------------------------------------------------------------------------------------- the program


def pre_fly(python: str, folder: Path, address: str, model: Model, rows: Path) -> dict[str, Any]:
    """The pre-flight as the supervisor runs it: its output and its errors in one file."""
    arguments = {
        "address": address,
        "base-url": model.url,
        "model": "small",
        "tasks": 2,
        "group": 2,
        "temperature": 1.0,
        "max-tokens": 64,
        "thinking": 0,
        "timeout": HANG,
    }
    repository = Path(__file__).parents[3]
    done = subprocess.run(
        [python, "-m", f"{POD}.preflight", *(f"--{name}={value}" for name, value in arguments.items())],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": f"{folder / 'modules' / 'trusted'}:{shipped_library(folder, repository)}",
            "ATA_ROWS": str(rows),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=2 * HANG,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def shipped_library(folder: Path, repository: Path) -> Path:
    """Our code as it lies on a pod, where the library's own packages are not."""
    target = folder / "lib" / POD.replace(".", "/")
    target.mkdir(parents=True)
    for name in ("__init__", "preflight"):
        (target / f"{name}.py").write_bytes((repository / POD.replace(".", "/") / f"{name}.py").read_bytes())
    return folder / "lib"


def test_the_preflight_prints_one_line_last(single: str, model: Model, write: Any, tmp_path: Path) -> None:
    model.say = "4"
    rows = write([{"prompt": "two and two?", "answer": answer} for answer in "34"])
    found = pre_fly(sys.executable, lay_out(tmp_path, {}), single, model, rows)
    assert (found["rollouts"], found["errors"], found["rewards"]) == (4, 0, [[0.0, 0.0], [1.0, 1.0]])


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["AI_TRAINS_AI_VERIFIERS_030", "AI_TRAINS_AI_VERIFIERS_031"])
@pytest.mark.parametrize("kind", ["good", "raises", "hangs", "nan", "talk"])
def test_other_versions_of_verifiers_play_the_same(
    variable: str, kind: str, model: Model, write: Any, tmp_path: Path
) -> None:
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python with that version of verifiers")
    files = {"environment.py": MULTI if kind == "talk" else SINGLE, "helper.py": "GREETING = 'Good morning.'"}
    rows = write([{"prompt": str(n), "answer": "", "kind": kind, "turns": 5} for n in range(2)])
    with serving(tmp_path, files, python) as address:
        model.say = None if kind == "talk" else "4"
        found = pre_fly(python, tmp_path, address, model, rows)
    expected = {"good": [0.0, 0.0], "talk": [5.0, 5.0]}.get(kind, [None, None])
    said = {"raises": "KeyError", "hangs": "tim", "nan": "reward is not finite"}.get(kind, "")
    assert found["rewards"] == [expected, expected]
    assert said in found["error"]
