"""The one module that imports the Tinker SDK: sessions, training, sampling and checkpoints, each with a deadline.

What is known about the SDK (0.38) and decides the shape of this: no future of it has a deadline; a request that is
refused leaves a gap in a training client's sequence, behind which every later request waits for ever; a session's end
takes its clients with it. So training has a session of its own that is thrown away after any error, while samplers,
which live in another one, go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import numpy as np
import tinker
from attrs import field, frozen
from tinker.lib.retryable_exception import RetryableException

from ai_trains_ai.errors import (
    AiTrainsAiError,
    ConfigurationError,
    Forbidden,
    OutOfFunds,
    PolicyError,
    StorageError,
    Transient,
)
from ai_trains_ai.outer.tinker.batch import Example

logger = logging.getLogger(__name__)
T = TypeVar("T")

STATE, SAMPLER = "/weights/", "/sampler_weights/"


@frozen
class Deadlines:
    """Seconds that the service may take: to open a client, for a turn, an update, a save, a download and to close."""

    open: float = 900.0
    sample: float = 1_800.0
    train: float = 1_800.0
    save: float = 900.0
    download: float = 3_600.0
    close: float = 30.0


@frozen
class Place:
    """Where a service is and who asks: passed on to every client. ``key`` is shown nowhere."""

    base_url: str | None = None
    key: str = field(default="", repr=False)

    def options(self) -> dict[str, Any]:
        return {"base_url": self.base_url, "api_key": self.key}


@frozen(eq=False)
class Sampled:
    """One turn: token ids [n] with the stop token, log-probabilities [n], and prompt tokens read from a cache."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    cached: int


@frozen(eq=False)
class Updated:
    """What an update gave: log-probabilities [n] per example before it, and the service's own metrics."""

    logprobs: list[np.ndarray]
    loss: float
    metrics: Mapping[str, float]


class Session:
    """One session with the service, and what was made in it."""

    def __init__(self, place: Place, run: str, purpose: str, deadlines: Deadlines) -> None:
        self.purpose = purpose
        self._place, self._run, self._deadlines = place, run, deadlines
        self._client: Any = None
        self._samplers: dict[str, asyncio.Task[Any]] = {}

    async def _service(self) -> Any:
        if self._client is None:
            self._client = tinker.ServiceClient(
                user_metadata={"run": self._run, "purpose": self.purpose}, **self._place.options()
            )
        return self._client

    # ------------------------------------------------------------------------------------------ sampling

    async def sample(self, path: str, ids: Sequence[int], limit: int, stop: Sequence[int], seed: int) -> Sampled:
        """One turn of the weights at ``path``, at temperature 1 over the whole vocabulary."""
        if path not in self._samplers:
            self._samplers[path] = asyncio.create_task(self._sampler(path))
        client = await asyncio.shield(self._samplers[path])
        params = tinker.SamplingParams(
            max_tokens=limit, seed=seed, stop=list(stop), temperature=1.0, top_p=1.0, top_k=-1
        )
        prompt = tinker.ModelInput.from_ints(list(ids))
        answer = await answered(
            "a turn", lambda: client.sample(prompt, num_samples=1, sampling_params=params), self._deadlines.sample
        )
        (sequence,) = answer.sequences
        logprobs = tuple(float(value) for value in sequence.logprobs or ())
        if len(logprobs) != len(sequence.tokens) or not np.isfinite(logprobs).all():
            raise Transient("Tinker gave a turn whose log-probabilities are missing or not finite.")
        cached = int(getattr(answer, "prompt_cache_hit_tokens", None) or 0)
        return Sampled(tuple(sequence.tokens), logprobs, sequence.stop_reason == "stop", min(cached, len(ids)))

    async def _sampler(self, path: str) -> Any:
        try:
            service = await self._service()
            return await answered(
                f"a sampler of {path}", lambda: service.create_sampling_client(model_path=path), self._deadlines.open
            )
        except BaseException:
            self._samplers.pop(path, None)  # the next turn tries again
            raise

    # ------------------------------------------------------------------------------------------ training

    async def trainer(self, model: str, rank: int, seed: int, state: str = "") -> Training:
        """A training client: a new adapter, or the one of ``state`` with its optimizer."""
        service = await self._service()
        if state:
            what, make = f"the state {state}", lambda: service.create_training_client_from_state_with_optimizer(state)
        else:
            what, make = (
                f"an adapter of {model}",
                lambda: service.create_lora_training_client(model, rank=rank, seed=seed),
            )
        return Training(await answered(what, make, self._deadlines.open), self._deadlines)

    async def close(self, status: str = "success") -> None:
        """End the session with its clients; what was saved stays. Never raises: nobody could do anything about it."""
        for task in self._samplers.values():
            task.cancel()
        self._samplers = {}
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                await answered("the session's end", lambda: client.close(status), self._deadlines.close)


class Training:
    """A training client. After an error of any call it must not be used any more."""

    def __init__(self, client: Any, deadlines: Deadlines) -> None:
        self._client, self._deadlines = client, deadlines

    async def update(
        self, batch: Sequence[Example], loss: str, config: Mapping[str, float], adam: Mapping[str, float]
    ) -> Updated:
        """Gradient and optimizer step, queued together so that both fall into one cycle of the service."""
        data = [_datum(example) for example in batch]
        params = tinker.AdamParams(**adam)

        def both() -> tuple[Any, Any]:
            return self._client.forward_backward(data, loss, dict(config) or None), self._client.optim_step(params)

        async def wait(futures: tuple[Any, Any]) -> tuple[Any, Any]:
            return await futures[0], await futures[1]

        gradient, step = await answered("an update", both, self._deadlines.train, wait)
        logprobs = [np.asarray(output["logprobs"].to_numpy(), np.float32) for output in gradient.loss_fn_outputs]
        metrics = {**gradient.metrics, **(step.metrics or {})}
        return Updated(logprobs, float(gradient.metrics.get("loss:sum", 0.0)), metrics)

    async def save(self, name: str, ttl: int | None) -> str:
        """Keep state and sampler under one name; the state's path. The sampler's follows from it."""
        state = await self._save("state", lambda: self._client.save_state(name, ttl_seconds=ttl))
        sampler = await self._save("sampler", lambda: self._client.save_weights_for_sampler(name, ttl_seconds=ttl))
        if sampler != sampler_of(state):
            raise ConfigurationError(f"Tinker keeps the sampler of {state} at {sampler}, where nobody expects it.")
        return state

    async def save_external(self, name: str, ttl: int) -> str:
        """Write the adapter as a PEFT folder that can be downloaded for ``ttl`` seconds."""
        return await self._save("export", lambda: self._client.save_weights_external(name, ttl_seconds=ttl))

    async def _save(self, what: str, make: Callable[[], Any]) -> str:
        path = (await answered(f"the {what}'s save", make, self._deadlines.save)).path
        if not path:
            raise Transient(f"Tinker saved the {what} and did not say where.")
        return str(path)


class Rest:
    """What needs no session: the models, and checkpoints by their paths."""

    def __init__(self, place: Place, deadlines: Deadlines) -> None:
        self._place, self._deadlines = place, deadlines
        self._rest: Any = None

    async def _client(self) -> Any:
        if self._rest is None:
            self._rest = await asyncio.to_thread(tinker.RestClient, **self._place.options())
        return self._rest

    async def context(self, model: str) -> int:
        """Longest sequence of a model, in tokens.

        Raises:
            ConfigurationError: the service does not train it.
        """
        rest = await self._client()
        answer = await answered("the models", rest.get_server_capabilities, self._deadlines.open)
        models = {entry.model_name: entry for entry in answer.supported_models}
        if model not in models:
            listed = ", ".join(sorted(str(name) for name in models)) or "none"
            raise ConfigurationError(f"Tinker does not serve {model!r}. It serves: {listed}.")
        if getattr(models[model], "trainable", True) is False:
            raise ConfigurationError(f"Tinker serves {model!r} but does not train it.")
        return int(models[model].max_context_length)

    async def keep(self, path: str, ttl: int | None) -> bool:
        """Let a checkpoint live for ``ttl`` seconds from now on (``None``: for ever). Whether it is still there."""
        rest = await self._client()
        try:
            await answered(
                f"the life of {path}",
                lambda: rest.set_checkpoint_ttl_from_tinker_path(path, ttl),
                self._deadlines.save,
            )
        except Gone:
            return False
        return True

    async def download(self, path: str, folder: Path) -> None:
        """Fetch an exported adapter. A file that is half there at the end is no file: each is renamed when whole."""
        rest = await self._client()
        answer = await answered(
            f"the files of {path}", lambda: rest.get_external_weights_urls(path), self._deadlines.save
        )
        async with asyncio.timeout(self._deadlines.download), httpx.AsyncClient(follow_redirects=True) as client:
            for name, url in answer.urls.items():
                await _download(client, url, _inside(folder, name))

    async def close(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None and hasattr(rest, "close"):
            with contextlib.suppress(Exception):
                await answered("the end", rest.close, self._deadlines.close)


class Gone(PolicyError):
    """A checkpoint or model that the service does not have (any more)."""


def sampler_of(state: str) -> str:
    """The path of the sampler that was saved with a state."""
    if not state.startswith("tinker://") or state.count(STATE) != 1:
        raise ConfigurationError(f"{state!r} is no state of Tinker: tinker://<run>/weights/<name>.")
    return state.replace(STATE, SAMPLER)


async def answered(
    what: str,
    make: Callable[[], Any],
    seconds: float,
    wait: Callable[[Any], Awaitable[T]] | None = None,
) -> Any:
    """The answer of the service to what ``make`` asks for, or one of our errors after at most ``seconds``.

    ``make`` runs in a thread: the SDK opens its session and packs data before it gives a future.
    """
    try:
        async with asyncio.timeout(seconds):
            asked = await asyncio.to_thread(make)
            if wait is not None:
                return await wait(asked)
            return await asked if hasattr(asked, "__await__") else asked
    except TimeoutError as error:
        raise Transient(f"Tinker did not answer in {seconds:g} s: {what}.") from error
    except Exception as error:
        raise _ours(what, error) from error


_KINDS: Final[tuple[tuple[type[Exception], type[AiTrainsAiError], str], ...]] = (
    (tinker.AuthenticationError, Forbidden, "Check TINKER_API_KEY."),
    (tinker.PermissionDeniedError, Forbidden, "The key lacks the right."),
    (tinker.BillingError, OutOfFunds, "Top up the account and resume the run."),
    (tinker.NotFoundError, Gone, "It has expired, or another account owns it."),
    (tinker.BadRequestError, PolicyError, "The request itself is refused."),
    (tinker.UnprocessableEntityError, PolicyError, "The request itself is refused."),
    (tinker.TinkerError, Transient, ""),
    (RetryableException, Transient, ""),
)


def _ours(what: str, error: Exception) -> AiTrainsAiError:
    if isinstance(error, AiTrainsAiError):
        return error
    kind, remedy = next(((k, r) for known, k, r in _KINDS if isinstance(error, known)), (Transient, ""))
    if isinstance(error, tinker.RequestFailedError) and str(error.category).lower().endswith("user"):
        kind, remedy = PolicyError, "The request itself is refused."
    key = os.environ.get("TINKER_API_KEY") or "\0"
    said = str(error).replace(key, "…")[:500]
    return kind(f"Tinker failed at {what}: {type(error).__name__}: {said} {remedy}".rstrip())


def _datum(example: Example) -> Any:
    inputs = {"target_tokens": example.targets, "logprobs": example.logprobs, "advantages": example.advantages}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(example.inputs.tolist()), loss_fn_inputs=inputs)


def _inside(folder: Path, name: str) -> Path:
    target = (folder / name).resolve()
    if not target.is_relative_to(folder.resolve()):
        raise PolicyError(f"Tinker names a file outside of the export: {name!r}")
    return target


async def _download(client: httpx.AsyncClient, url: str, target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        async with client.stream("GET", url) as answer:
            answer.raise_for_status()
            with partial.open("wb") as file:
                async for chunk in answer.aiter_bytes():
                    file.write(chunk)
        os.replace(partial, target)
    except OSError as error:
        raise StorageError(f"Can't write {target}: {error.strerror}. Free space and export again.") from error
    except httpx.HTTPError as error:
        # the address is signed: whoever has it can fetch the weights
        raise Transient(f"{target.name} can't be downloaded ({type(error).__name__}). Export again.") from None
