"""Any model behind an OpenAI-compatible chat endpoint as the outer agent, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ai_trains_ai.errors import ConfigurationError, MissingDependency, PolicyError
from ai_trains_ai.interfaces import OuterPolicy, Policy, RunContext
from ai_trains_ai.outer.endpoint import endpoint
from ai_trains_ai.outer.prices import Prices, TokenBooks
from ai_trains_ai.records import Checkpoint, Message, SamplingParams, ToolCall, Turn, Usage

_OVERFLOW: Final = ("context_length_exceeded", "maximum context length", "context window", "max_model_len")
_CHARACTERS_PER_TOKEN: Final = 3  # a cautious guess, for asking the budget before the service has counted


class FrozenPolicy(Policy):
    """The endpoint's model, always of version 0."""

    version = 0

    def __init__(self, trainer: FrozenOuterTrainer) -> None:
        self._trainer = trainer

    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        return await self._trainer._act(conversation, tools, params)


class FrozenOuterTrainer(OuterPolicy):
    """Plays the outer agent with a chat model that is not trained, so that models can be compared as trainers.

    Also for an adapter that was trained and exported: serve it with any compatible server (vLLM, SGLang) and name it
    here.

    Args:
        model: name of the model at the endpoint.
        base_url: the endpoint, up to and without ``/chat/completions``; default OpenAI's.
        key: environment variable that holds the key; default OPENAI_API_KEY, and none at a ``base_url``.
        temperature: of sampling.
        top_p: of sampling.
        prices: USD per million tokens by "prefill", "cached" and "sampled"; needed when the run has a budget.
        options: further fields of a request's body; ``None`` takes one away, for instance ``{"max_tokens": None,
            "max_completion_tokens": 8192}``.
        seconds: deadline of one request.
        retries: of a request that the service is too busy for.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        key: str | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        prices: Prices | Mapping[str, float] | None = None,
        options: Mapping[str, Any] | None = None,
        seconds: float = 600.0,
        retries: int = 5,
    ) -> None:
        if not 0 <= temperature <= 2 or not 0 < top_p <= 1:
            raise ConfigurationError(f"temperature={temperature} must be in [0, 2] and top_p={top_p} in (0, 1].")
        if seconds <= 0 or retries < 0:
            raise ConfigurationError(f"seconds={seconds} must be above 0 and retries={retries} not below.")
        self._model, self._base_url = model, endpoint(base_url)
        self._key = key or ("" if base_url else "OPENAI_API_KEY")
        self._sampling = {"temperature": temperature, "top_p": top_p}
        self._prices = None if prices is None else Prices.of(prices)
        self._options, self._seconds, self._retries = dict(options or {}), seconds, retries
        self._client: Any = None

    async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
        openai = _openai()
        key = run.secret(self._key) if self._key else "none"
        self._books = TokenBooks(run.ledger, self._model, self._prices)
        self._client = openai.AsyncOpenAI(
            api_key=key, base_url=self._base_url, timeout=self._seconds, max_retries=self._retries
        )
        self._policy = FrozenPolicy(self)

    async def snapshot(self) -> Policy:
        return self._policy

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        openai = _openai()
        messages = chat_messages(conversation)
        body = {"max_tokens": params.max_tokens, "seed": params.seed, **self._sampling, **self._options}
        written = sum(len(json.dumps(message)) for message in [*messages, *tools])
        self._books.before_turn(written // _CHARACTERS_PER_TOKEN, params.max_tokens)
        try:
            answer = await self._client.chat.completions.create(
                model=self._model,
                messages=messages,
                tools=[dict(tool) for tool in tools],
                extra_body={name: value for name, value in body.items() if value is not None},
            )
        except openai.BadRequestError as error:
            if any(sign in str(error) for sign in _OVERFLOW):
                return Turn("", (), "context", 0)
            raise PolicyError(f"{self._model} refuses the request: {_said(error)}") from error
        except openai.AuthenticationError as error:
            raise PolicyError(
                f"{self._model} refuses the key{f' in {self._key}' if self._key else ': pass key= and set it'}."
            ) from error
        except openai.OpenAIError as error:
            raise PolicyError(f"{self._model} can't be asked: {_said(error)}") from error
        return self._turn(answer)

    def _turn(self, answer: Any) -> Turn:
        if not answer.choices:
            raise PolicyError(f"{self._model} gave an answer without a choice.")
        choice = answer.choices[0]
        usage = _usage(answer.usage)
        if usage is not None:
            self._books.turn(usage)
        cut = choice.finish_reason == "length"
        calls = () if cut else tuple(_call(call) for call in choice.message.tool_calls or ())
        return Turn(choice.message.content or "", calls, "length" if cut else "stop", 0, usage=usage)


def chat_messages(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as chat APIs take it. The answer to a call without a name goes into a user message."""
    messages: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for number, message in enumerate(conversation):
        if message.role == "assistant":
            named = [call for call in (message.turn.calls if message.turn else ()) if call.name]
            ids = [f"call_{number}_{position}" for position in range(len(named))]
            calls = [
                {
                    "id": id_,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for id_, call in zip(ids, named, strict=True)
            ]
            # one answer a call, in order; what has no name got no id
            remaining = iter(ids)
            open_calls = [next(remaining) if call.name else "" for call in (message.turn.calls if message.turn else ())]
            messages.append(
                {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}
            )
        elif message.role == "tool":
            id_ = open_calls.pop(0) if open_calls else ""
            answer = {"role": "tool", "tool_call_id": id_} if id_ else {"role": "user"}
            messages.append({**answer, "content": message.content})
        else:
            messages.append({"role": message.role, "content": message.content})
    return messages


def _call(call: Any) -> ToolCall:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        return ToolCall(call.function.name, {}, "invalid_json: the arguments of the tool call are not JSON")
    if not isinstance(arguments, dict):
        return ToolCall(call.function.name, {}, "invalid_json: the arguments of the tool call are no JSON object")
    return ToolCall(call.function.name, arguments)


def _usage(usage: Any) -> Usage | None:
    if usage is None:
        return None
    details = getattr(usage, "prompt_tokens_details", None)
    cached = getattr(details, "cached_tokens", None) or 0
    return Usage(usage.prompt_tokens, usage.completion_tokens, min(cached, usage.prompt_tokens))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise MissingDependency.of("openai", "frozen") from error
    return openai
