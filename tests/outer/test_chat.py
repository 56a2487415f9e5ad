from __future__ import annotations

import json

from ai_trains_ai.outer.chat import call_text, parse_calls, render
from ai_trains_ai.records import Message, Turn


class Characters:
    """A tokenizer whose ids are code points: what is rendered can be read back."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def text(messages: list[Message]) -> str:
    return "".join(map(chr, render(messages, Characters())))


def sampled(words: str, messages: list[Message]) -> Message:
    prompt = tuple(render(messages, Characters()))
    ids = tuple(Characters().encode(words + "<|im_end|>"))
    return Message("assistant", words, Turn(words, (), "stop", 0, prompt, ids, (0.0,) * len(ids)))


def test_the_prompt_ends_where_the_assistant_begins() -> None:
    assert text([Message("system", "S"), Message("user", "U")]) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_next_prompt_extends_the_sampled_ids_exactly() -> None:
    messages = [Message("system", "S"), Message("user", "U")]
    for number in range(3):
        turn = sampled(f"turn {number}", messages)
        assert turn.turn is not None
        before = [*turn.turn.prompt_ids, *turn.turn.ids]
        messages += [turn, Message("tool", "ok"), Message("tool", "fine")]
        assert render(messages, Characters())[: len(before)] == before


def test_equal_messages_are_not_mixed_up() -> None:
    ok = Message("tool", "ok")
    messages = [Message("user", "U"), ok, ok]
    assert text(messages).count("<tool_response>") == 2
    assert text(messages).count("<|im_start|>assistant") == 1


def test_calls_come_back_as_they_were_written() -> None:
    body = 'a = "x"\n\tb = 1\n'
    (call,) = parse_calls("Now. " + call_text("write_file", path="job.toml", content=body))
    assert (call.name, call.arguments, call.error) == ("write_file", {"path": "job.toml", "content": body}, "")


def test_broken_calls_are_classified() -> None:
    assert parse_calls("no call at all") == ()
    assert "not JSON" in parse_calls("<tool_call>\n{oops}\n</tool_call>")[0].error
    assert "not JSON" in parse_calls("<tool_call>\n[1]\n</tool_call>")[0].error
    assert "not JSON" in parse_calls('<tool_call>\n{"name": "x", "arguments": [1]}\n</tool_call>')[0].error
    assert "not closed" in parse_calls('<tool_call>\n{"name": "submit"')[0].error
    assert parse_calls("<tool_call>" + json.dumps({"name": "submit"}) + "</tool_call>")[0].arguments == {}
