"""Conversations to tokens and back, in the chat format of Qwen3.6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outer import qwen

from ai_trains_ai.agent.rollout import segments
from ai_trains_ai.agent.tools import TOOLS
from ai_trains_ai.errors import ConfigurationError, UnknownName
from ai_trains_ai.outer.rendering import EmbeddedRendering, ModelRendering, Rendering, rendering
from ai_trains_ai.records import Message, ToolCall, Turn

MODEL = "Qwen/Qwen3.6-35B-A3B"
OPENING = [Message("system", "You write training jobs."), Message("user", "Task 1. Begin.")]
WRITE = (
    "<tool_call>\n<function=write_file>\n<parameter=path>\nenvironment.py\n</parameter>\n<parameter=content>\n{}\n"
    "</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="session", params=["small", "real"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "small":
        return qwen.small(tmp_path_factory.mktemp("tokenizer"))
    if (found := qwen.real()) is None:
        pytest.skip("AI_TRAINS_AI_QWEN_TOKENIZER names no folder with Qwen's tokenizer")
    return found


@pytest.fixture(scope="session")
def qwen36(folder: Path) -> ModelRendering:
    made = rendering(MODEL, "auto", str(folder), {})
    assert isinstance(made, ModelRendering)
    return made


def encode(made: ModelRendering, text: str) -> list[int]:
    return list(made._tokenizer.encode(text, add_special_tokens=False))


def sampled(made: ModelRendering, conversation: list[Message], text: str) -> Turn:
    """A turn as if the model had said ``text``."""
    prompt, ids = made.prompt(conversation, TOOLS), encode(made, text + "<|im_end|>")
    said, calls = made.parse(prompt, ids, TOOLS)
    return Turn(said, calls, "stop", 0, tuple(prompt), tuple(ids), (-0.5,) * len(ids))


def test_the_prompt_tells_the_tools_and_opens_a_turn(qwen36: ModelRendering) -> None:
    text = qwen36._tokenizer.decode(qwen36.prompt(OPENING, TOOLS))
    assert all(f'"{tool["function"]["name"]}"' in text for tool in TOOLS)
    assert text.endswith("<|im_start|>assistant\n<think>\n")


def test_thinking_can_be_turned_off(folder: Path) -> None:
    made: Any = rendering(MODEL, "qwen3.6", str(folder), {"enable_thinking": False})
    assert made._tokenizer.decode(made.prompt(OPENING, TOOLS)).endswith("<think>\n\n</think>\n\n")


def test_a_call_is_parsed(qwen36: ModelRendering) -> None:
    source = "import x\n\ndef f(a):\n    return a < 3 and '</b>'"
    turn = sampled(qwen36, OPENING, f"Let me.\n</think>\n\n{WRITE.format(source)}")
    assert turn.calls == (ToolCall("write_file", {"path": "environment.py", "content": source}),)


@pytest.mark.parametrize("content", ["true", "3", "[1, 2]", '{"a": 1}', "null", ""])
def test_what_looks_like_json_stays_text(qwen36: ModelRendering, content: str) -> None:
    turn = sampled(qwen36, OPENING, f"</think>\n\n{WRITE.format(content)}")
    assert turn.calls[0].arguments["content"] == content


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("</think>\n<tool_call>\n<function=write_file>\n<parameter=path>\nenv", "unclosed_block"),
        ('</think>\n<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>', "malformed_structure"),
        ("</think>\n<tool_call>\n</tool_call>", "malformed_structure"),
    ],
)
def test_a_broken_call_is_named_and_fed_back(qwen36: ModelRendering, text: str, kind: str) -> None:
    (call,) = sampled(qwen36, OPENING, text).calls
    assert call.error.partition(": ")[0] == kind
    assert len(call.error.partition(": ")[2]) > 10


def test_prose_is_no_call(qwen36: ModelRendering) -> None:
    turn = sampled(qwen36, OPENING, "Hm.\n</think>\n\nI am done.")
    assert (turn.calls, turn.text.endswith("I am done.")) == ((), True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(
        st.tuples(st.text(max_size=30), st.text(max_size=60), st.lists(st.text(max_size=60), min_size=1, max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_an_episode_of_tool_calls_is_one_segment(
    qwen36: ModelRendering, turns: list[tuple[str, str, list[str]]]
) -> None:
    """Whatever is thought, written and answered: the sampled ids are extended exactly."""
    talk, said = list(OPENING), []
    for thought, content, answers in turns:
        turn = sampled(qwen36, talk, f"{thought}\n</think>\n\n{WRITE.format(content)}")
        said.append(turn)
        talk += [Message("assistant", turn.text, turn), *(Message("tool", answer) for answer in answers)]
    (segment,) = segments(said)
    assert [i for i, mine in zip(segment.ids, segment.mask, strict=True) if mine] == [i for t in said for i in t.ids]


def test_where_the_format_drops_the_history_a_new_segment_begins(qwen36: ModelRendering) -> None:
    """Qwen3.6 drops old thinking at a new question, which no bridge can undo."""
    first = sampled(qwen36, OPENING, "Long thought.\n</think>\n\nWhat exactly?")
    talk = [*OPENING, Message("assistant", first.text, first), Message("user", "That.")]
    second = sampled(qwen36, talk, "So.\n</think>\n\nDone.")
    assert "Long thought" not in qwen36._tokenizer.decode(list(second.prompt_ids))
    assert len(segments([first, second])) == 2


def test_the_embedded_format_is_the_shipped_models() -> None:
    made: Rendering = rendering("tiny/outer", "embedded", None, {})
    assert isinstance(made, EmbeddedRendering)
    prompt = made.prompt(OPENING, TOOLS)
    text = '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>'
    ids = [*made._tokenizer.encode(text), *made.stop_ids]
    assert made.parse(prompt, ids, TOOLS) == (text, (ToolCall("submit", {}),))


def test_a_renderer_that_nobody_knows(folder: Path) -> None:
    with pytest.raises(UnknownName, match=r"qwen3\.6"):
        rendering(MODEL, "qwen3.66", str(folder), {})


def test_a_model_that_no_renderer_is_known_for(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="renderer="):
        rendering("somebody/model", "auto", str(folder), {})


def test_an_option_that_the_renderer_does_not_have(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="enable_thinkin"):
        rendering(MODEL, "qwen3.6", str(folder), {"enable_thinkin": False})


def test_a_tokenizer_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigurationError, match="tokenizer="):
        rendering(MODEL, "qwen3.6", str(tmp_path), {})
