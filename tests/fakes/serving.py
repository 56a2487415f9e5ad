"""The tiny outer model with a PEFT adapter behind a chat endpoint, as vLLM serves one with ``--lora-modules``."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from ai_trains_ai.outer.chat import call_text, parse_calls, render
from ai_trains_ai.outer.embedded import EmbeddedPolicy, OuterTokenizer
from ai_trains_ai.pico import model_folder
from ai_trains_ai.pico.model import Qwen3
from ai_trains_ai.records import Message, SamplingParams
from fakes.chat import Answer, call
from fakes.tinker.model import linear


def merged(adapter: Path) -> Qwen3:
    """The tiny outer model with an adapter's factors added to its weights."""
    model = Qwen3.load(model_folder("outer"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, tensor in linear(model).items():
        layer = "base_model.model." + name.removesuffix(".weight")
        a, b = factors.pop(f"{layer}.lora_A.weight"), factors.pop(f"{layer}.lora_B.weight")
        tensor += config["lora_alpha"] / config["r"] * b @ a
    assert not factors, f"the model has no layers for {sorted(factors)}"
    return model


def served(adapter: Path) -> Answer:
    """What the endpoint answers. Knows nothing of earlier requests: a conversation is rendered from its text."""
    model, tokenizer = merged(adapter), OuterTokenizer(model_folder("outer"))
    one_at_a_time = threading.Lock()

    def answer(body: Mapping[str, Any]) -> Mapping[str, Any]:
        ids = render([Message(m["role"], _text(m)) for m in body["messages"]], tokenizer)
        params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"])
        with one_at_a_time:
            turn = asyncio.run(EmbeddedPolicy(model, tokenizer, 0).complete(ids, params))
        calls = [call(c.name or "unreadable", c.arguments, f"c{n}") for n, c in enumerate(parse_calls(turn.text))]
        content, *_ = turn.text.partition("<tool_call>")
        said = {"content": content.removesuffix("<|im_end|>").strip() or None}
        return {**said, "finish_reason": turn.stop_reason} | ({"tool_calls": calls} if calls else {})

    return answer


def _text(message: Mapping[str, Any]) -> str:
    asked: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    calls = (call_text(c["function"]["name"], **json.loads(c["function"]["arguments"])) for c in asked)
    return "\n".join(filter(None, (message.get("content"), *calls)))
