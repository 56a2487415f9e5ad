"""Token-in/token-out: conversations to token ids, and sampled ids to text and tool calls.

A sampled turn goes into the next prompt as the exact ids that were sampled. Where a chat format can't do that, the
prompt is rendered anew: the episode then has a new segment, which the loop counts as ``outer/segment_breaks``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ai_trains_ai.errors import ConfigurationError, MissingDependency, UnknownName
from ai_trains_ai.outer.chat import END, parse_calls, render
from ai_trains_ai.records import Message, ToolCall

EMBEDDED: Final = "embedded"
Tools = Sequence[Mapping[str, Any]]

_FAULTS: Final = {
    "invalid_json": "the arguments of the tool call are not JSON",
    "unclosed_block": "the tool call is not closed",
    "missing_name": "the tool call names no function",
    "malformed_structure": "the tool call does not have the form that the system prompt shows",
    "unknown_tool": "there is no tool of that name",
}
"""What the agent reads about a call that can't be parsed, by the parser's verdict."""


class Rendering(ABC):
    """A model's chat format over its tokenizer."""

    stop_ids: Sequence[int]
    """Tokens that end a turn."""

    @abstractmethod
    def prompt(self, conversation: Sequence[Message], tools: Tools) -> list[int]:
        """Token ids up to where the next turn begins; they extend the newest sampled turn exactly, if possible."""

    @abstractmethod
    def parse(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
        """What was sampled: its text and its tool calls. A broken call has ``error``, "<kind>: what is wrong"."""


class EmbeddedRendering(Rendering):
    """The format of the shipped tiny outer model; ``folder`` has its tokenizer. It is not told the tools' schemas."""

    def __init__(self, folder: Path) -> None:
        from ai_trains_ai.outer.embedded import OuterTokenizer

        self._tokenizer = OuterTokenizer(folder)
        self.stop_ids = (self._tokenizer.end_id,)

    def prompt(self, conversation: Sequence[Message], tools: Tools) -> list[int]:
        return render(conversation, self._tokenizer)

    def parse(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
        text = self._tokenizer.decode(ids).removesuffix(END)
        return text, parse_calls(text)


class ModelRendering(Rendering):
    """A format of the `renderers` package, for instance "qwen3.6" with its XML tool calls.

    Args:
        tokenizer: what `renderers.base.load_tokenizer` gives, or the like.
        name: the renderer's name in that package.
        options: fields of its config, for instance ``{"enable_thinking": False}``.
    """

    def __init__(self, tokenizer: Any, name: str, options: Mapping[str, Any] | None = None) -> None:
        try:
            from pydantic import ValidationError
            from renderers import base, configs
        except ImportError as error:
            raise MissingDependency.of("renderers", "tinker") from error
        kinds: Any = configs
        known = {kind.model_fields["name"].default: kind for kind in vars(kinds).values() if _is_config(kind, kinds)}
        if name not in known:
            raise UnknownName.of("renderer", name, {*known, EMBEDDED})
        try:
            self._renderer = base.create_renderer(tokenizer, known[name](**(options or {})))
        except ValidationError as error:
            raise ConfigurationError(f"The renderer {name!r} refuses its options {options!r}: {error}") from error
        self._tokenizer = tokenizer
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())

    def prompt(self, conversation: Sequence[Message], tools: Tools) -> list[int]:
        specs = [dict(tool["function"]) for tool in tools]
        newest = next((i for i in reversed(range(len(conversation))) if _sampled(conversation[i])), None)
        if newest is not None:
            turn = conversation[newest].turn
            assert turn is not None
            told = [self._plain(message, tools) for message in conversation[newest + 1 :]]
            bridge = self._renderer.bridge_to_next_turn(list(turn.prompt_ids), list(turn.ids), told, tools=specs)
            if bridge is not None:
                return list(bridge.token_ids)
        plain = [self._plain(message, tools) for message in conversation]
        return list(self._renderer.render_ids(plain, tools=specs, add_generation_prompt=True))

    def parse(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
        parsed = self._parsed(prompt_ids, ids, tools)
        return self._tokenizer.decode([i for i in ids if i not in self.stop_ids]), tuple(map(_call, parsed.tool_calls))

    def _parsed(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Tools) -> Any:
        specs = [dict(tool["function"]) for tool in tools]
        return self._renderer.parse_response(list(ids), prompt_ids=list(prompt_ids), tools=specs)

    def _plain(self, message: Message, tools: Tools) -> dict[str, Any]:
        """A message as the package takes it; a sampled turn by its parts, for where it is rendered anew."""
        if not _sampled(message):
            return {"role": message.role, "content": message.content}
        assert message.turn is not None
        parsed = self._parsed(message.turn.prompt_ids, message.turn.ids, tools)
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
            if call.status == "ok"
        ]
        thought = {"reasoning_content": parsed.reasoning_content} if parsed.reasoning_content else {}
        return {
            "role": "assistant",
            "content": parsed.content,
            **thought,
            **({"tool_calls": calls} if calls else {}),
        }


def rendering(model: str, name: str, tokenizer: str | None, options: Mapping[str, Any]) -> Rendering:
    """The rendering of a model. Blocks: it may load a tokenizer from the model hub.

    Args:
        model: its name, which "auto" goes by.
        name: "auto", "embedded", or a name of the `renderers` package.
        tokenizer: a folder, or a name on the model hub; default ``model``.
        options: fields of the renderer's config.

    Raises:
        ConfigurationError: there is no such renderer or tokenizer, or the two don't fit.
    """
    if name == EMBEDDED:
        from ai_trains_ai.pico import model_folder

        return EmbeddedRendering(Path(tokenizer) if tokenizer else model_folder("outer"))
    try:
        from renderers import base
    except ImportError as error:
        raise MissingDependency.of("renderers", "tinker") from error
    if name == "auto":
        found = base.MODEL_RENDERER_MAP.get(model.partition(":")[0])
        if found is None:
            raise ConfigurationError(
                f"No renderer is known for {model!r}. Pass renderer=…, for instance 'qwen3.6' or 'embedded'."
            )
        name = found
    try:
        loaded = base.load_tokenizer(tokenizer or model.partition(":")[0])
    except Exception as error:  # transformers, huggingface_hub and tokenizers each raise their own
        raise ConfigurationError(
            f"The tokenizer {tokenizer or model!r} can't be loaded ({type(error).__name__}: {error}). "
            "Pass tokenizer=…: a folder with tokenizer.json and tokenizer_config.json, or a name on the model hub."
        ) from error
    return ModelRendering(loaded, name, options)


def _is_config(kind: Any, kinds: Any) -> bool:
    """Whether it is the config of one renderer, which has a name."""
    if not (isinstance(kind, type) and issubclass(kind, kinds.BaseRendererConfig)):
        return False
    name = getattr(kind, "model_fields").get("name")  # noqa: B009 - the checker knows no pydantic
    return name is not None and isinstance(name.default, str)


def _sampled(message: Message) -> bool:
    return message.turn is not None and bool(message.turn.ids)


def _call(parsed: Any) -> ToolCall:
    if parsed.status == "ok" and isinstance(parsed.arguments, Mapping):
        return ToolCall(str(parsed.name), dict(parsed.arguments))
    kind = "invalid_json" if parsed.status == "ok" else str(parsed.status)
    return ToolCall(parsed.name or "", {}, f"{kind}: {_FAULTS.get(kind, 'the tool call can not be read')}")
