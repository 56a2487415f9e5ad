"""The chat format of the embedded outer model: messages to token ids, sampled text to tool calls.

ChatML turns with Hermes tool calls, as Qwen3's template renders them: a call is ``<tool_call>`` around one JSON
object with ``name`` and ``arguments``, an answer is ``<tool_response>`` inside a user turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Protocol

from ai_trains_ai.records import Message, ToolCall

END = "<|im_end|>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def render(messages: Sequence[Message], tokenizer: Encoder) -> list[int]:
    """Token ids of a conversation, ending where the assistant's next turn begins.

    A sampled turn is put in as the exact ids that were sampled, so that the prompt of the next turn extends them.
    """
    ids: list[int] = []
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        if message.turn is not None and message.turn.ids:
            ids += [*message.turn.ids, *tokenizer.encode("\n")]
        else:
            ids += tokenizer.encode(_block(message))
        if message.role != "assistant" and (following is None or following.role == "assistant"):
            ids += tokenizer.encode("<|im_start|>assistant\n")
    return ids


def _block(message: Message) -> str:
    if message.role == "tool":
        return f"<|im_start|>user\n<tool_response>\n{message.content}\n</tool_response>{END}\n"
    return f"<|im_start|>{message.role}\n{message.content}{END}\n"


def parse_calls(text: str) -> tuple[ToolCall, ...]:
    """The tool calls in an assistant's text. A broken one becomes a call with ``error``, for the agent to repair."""
    calls = []
    for body in _CALL.findall(text):
        try:
            data = json.loads(body)
            call = ToolCall(str(data["name"]), dict(data.get("arguments") or {}))
        except (ValueError, KeyError, TypeError, RecursionError):
            call = ToolCall("", {}, "the tool call is not JSON with name and arguments")
        calls.append(call)
    if not calls and "<tool_call>" in text:
        calls.append(ToolCall("", {}, "the tool call is not closed"))
    return tuple(calls)


def call_text(name: str, **arguments: str) -> str:
    """A tool call as the model writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
