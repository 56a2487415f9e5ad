"""The Tinker outer trainer: a large model with a LoRA adapter, sampled and trained by importance-sampling GRPO."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from ai_trains_ai.errors import (
    AiTrainsAiError,
    ConfigurationError,
    Forbidden,
    MissingDependency,
    OutOfFunds,
    PolicyError,
    Transient,
)
from ai_trains_ai.interfaces import OuterTrainer, Policy, RunContext
from ai_trains_ai.outer.endpoint import endpoint
from ai_trains_ai.outer.prices import Prices, TokenBooks, fetch_tinker
from ai_trains_ai.outer.rendering import rendering
from ai_trains_ai.outer.tinker.batch import Example, diagnostics, examples
from ai_trains_ai.records import (
    Checkpoint,
    EpisodeGroup,
    Exported,
    Message,
    SamplingParams,
    TrainStep,
    Turn,
    Usage,
)

if TYPE_CHECKING:
    from ai_trains_ai.outer.tinker.service import Deadlines, Session, Training

logger = logging.getLogger(__name__)

Loss = Literal["auto", "importance_sampling", "ppo", "cispo"]
ATTEMPTS: Final = 3
EXPORT_SECONDS: Final = 3_600  # the service's shortest life of a checkpoint
DAY: Final = 86_400


class TinkerPolicy(Policy):
    """A published version: a named sampler of the service. Valid until its trainer is closed."""

    def __init__(self, trainer: TinkerOuterTrainer, state: str, version: int) -> None:
        self.version = version
        self.state = state
        self._trainer = trainer

    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        return await self._trainer._act(self, conversation, tools, params)


class TinkerOuterTrainer(OuterTrainer):
    """Trains a LoRA adapter on Tinker.

    The loss is chosen by how old the episodes of a batch are. With the loop's default ``max_staleness=1`` and jobs of
    10 to 60 minutes most batches are sampled by the version before, and such a batch is trained with ``ppo`` (ratios
    clipped to 0.8 and 1.2); plain importance sampling is unstable there. An on-policy batch is trained with
    ``importance_sampling``. ``max_staleness=0`` makes every batch on-policy: the published loop, which waits for the
    jobs of a step before it samples the next.

    Sampling is at temperature 1 over the whole vocabulary, always: a trainer knows no temperature, so that any other
    law makes every ratio wrong.

    Args:
        model: name of a model that the service trains.
        lora_rank: rank of the adapter, a power of two; 8 as published.
        lr: Adam's learning rate.
        max_norm: the gradient is clipped to this norm; 0 leaves it. It is that of the mean over tokens.
        loss: "auto" as said, or one loss for every batch.
        clip: bounds of the ratio for "ppo".
        cispo_clip: bounds of the ratio for "cispo".
        seed: of the adapter's initialisation.
        renderer: chat format: "auto" by the model's name, a name of the `renderers` package, or "embedded".
        renderer_options: fields of the renderer's config, for instance ``{"enable_thinking": False}``.
        tokenizer: a folder or a name on the model hub; default the model's.
        context: longest sequence in tokens; default (and at most) what the service says of the model.
        prices: USD per million tokens by "prefill", "cached", "sampled" and "trained"; default Tinker's table.
        keep_days: how long a checkpoint lives on the service; ``None`` for ever. The newest is renewed at a start.
        base_url: a compatible server; default Tinker, or ``TINKER_BASE_URL``.
        deadlines: seconds by what the service is asked for.
        start_from: a state (``tinker://…/weights/…``) to begin from instead of a new adapter.
        temperature: must be 1, see above.
        top_p: must be 1, see above.
    """

    def __init__(
        self,
        model: str = "Qwen/Qwen3.6-35B-A3B",
        lora_rank: int = 8,
        lr: float = 4e-5,
        max_norm: float = 1.0,
        loss: Loss = "auto",
        clip: tuple[float, float] = (0.8, 1.2),
        cispo_clip: tuple[float, float] = (0.0, 2.0),
        seed: int = 0,
        renderer: str = "auto",
        renderer_options: Mapping[str, Any] | None = None,
        tokenizer: str | None = None,
        context: int | None = None,
        prices: Prices | Mapping[str, float] | None = None,
        keep_days: float | None = 30.0,
        base_url: str | None = None,
        deadlines: Mapping[str, float] | None = None,
        start_from: str = "",
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> None:
        _check_law(temperature, top_p)
        if loss not in get_args(Loss):
            raise ConfigurationError(f"loss is {loss!r}; choose from {', '.join(get_args(Loss))}.")
        if lora_rank < 1 or lora_rank & (lora_rank - 1):
            raise ConfigurationError(f"lora_rank is {lora_rank}; Tinker takes powers of two.")
        if not 0 < lr < 1 or max_norm < 0:
            raise ConfigurationError(f"lr={lr} must be in (0, 1), and max_norm={max_norm} not below 0.")
        if keep_days is not None and keep_days * DAY < EXPORT_SECONDS:
            raise ConfigurationError(f"keep_days is {keep_days}; Tinker keeps a checkpoint for an hour at least.")
        self._model, self._rank, self._seed = model, lora_rank, seed
        self._adam = {"learning_rate": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_clip_norm": max_norm}
        self._loss: Loss = loss
        self._clip, self._cispo_clip = clip, cispo_clip
        self._rendering_of = (model, renderer, tokenizer, dict(renderer_options or {}))
        self._longest = context
        self._prices = None if prices is None else Prices.of(prices)
        self._ttl = None if keep_days is None else int(keep_days * DAY)
        self._base_url, self._start_from = endpoint(base_url), start_from
        self._given_deadlines = dict(deadlines or {})
        self._sessions: list[Session] = []
        self._published: TinkerPolicy | None = None
        self._training: Training | None = None

    # ------------------------------------------------------------------------------------------ beginning and end

    async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
        service = await asyncio.to_thread(_service_module)
        try:
            self._deadlines: Deadlines = service.Deadlines(**self._given_deadlines)
        except TypeError as error:
            raise ConfigurationError(
                f"deadlines: {error}. Known: open, sample, train, save, download, close."
            ) from None
        key = run.secret("TINKER_API_KEY")
        self._run, self._service = run, service
        self._place = service.Place(self._base_url, key)
        self._rest = service.Rest(self._place, self._deadlines)
        self._sampling = self._session("sampling")
        self._rendering = await asyncio.to_thread(rendering, *self._rendering_of)
        served = await self._rest.context(self._model)
        self._context = min(self._longest or served, served)
        self._books = TokenBooks(run.ledger, self._model, await self._known_prices())
        await self._begin(checkpoint)

    async def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Publish the version to begin with, from a state that is there and stays there."""
        state = checkpoint.path if checkpoint else self._start_from
        version = checkpoint.version if checkpoint else 0
        if state and not await self._kept(state):
            raise PolicyError(
                f"The state {state} is gone: a checkpoint lives for keep_days, or until somebody deletes it. "
                "Resume from another checkpoint, or begin a new run with start_from=…."
            )
        if checkpoint and await self._rest.keep(self._service.sampler_of(state), self._ttl):
            self._publish(state, version)
            return
        # a new adapter, a warm start, or a resume whose sampler has expired: its own copy, under its own name
        self._training = await self._open(state)
        self._publish(await self._save_version(version), version)

    async def _kept(self, state: str) -> bool:
        self._service.sampler_of(state)  # whether it is the path of a state at all
        return bool(await self._rest.keep(state, self._ttl))

    async def _known_prices(self) -> Prices | None:
        if self._prices is not None or self._base_url is not None:
            return self._prices
        try:
            return await asyncio.to_thread(fetch_tinker, self._model.partition(":")[0])
        except Transient as error:
            if self._run.budget.usd is not None:
                raise ConfigurationError(f"The run has a budget, and {error}") from error
            logger.warning("Tokens are booked at no cost: %s", error)
            return None

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            await session.close()
        self._training = None
        if rest := getattr(self, "_rest", None):
            await rest.close()

    def _session(self, purpose: str) -> Session:
        session: Session = self._service.Session(self._place, self._run.folder.name, purpose, self._deadlines)
        self._sessions.append(session)
        return session

    # ------------------------------------------------------------------------------------------ acting

    async def snapshot(self) -> Policy:
        assert self._published is not None, "start() comes first"
        return self._published

    async def _act(
        self,
        policy: TinkerPolicy,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        params: SamplingParams,
    ) -> Turn:
        _check_law(params.temperature)
        prompt = self._rendering.prompt(conversation, tools)
        limit = min(params.max_tokens, self._context - len(prompt))
        if limit < 1:
            return Turn("", (), "context", policy.version, tuple(prompt))
        self._books.before_turn(len(prompt), limit)
        sampled = await self._sample(policy, prompt, limit, params.seed)
        usage = Usage(len(prompt), len(sampled.ids), sampled.cached)
        self._books.turn(usage)
        text, calls = self._rendering.parse(prompt, sampled.ids, tools)
        return Turn(
            text,
            calls if sampled.stopped else (),
            "stop" if sampled.stopped else "length",
            policy.version,
            tuple(prompt),
            sampled.ids,
            sampled.logprobs,
            usage,
        )

    async def _sample(self, policy: TinkerPolicy, prompt: Sequence[int], limit: int, seed: int) -> Any:
        """One turn; in a new session if the one in use has failed, since a session may end under its samplers."""
        path, stop = self._service.sampler_of(policy.state), self._rendering.stop_ids
        used = self._sampling
        try:
            return await used.sample(path, prompt, limit, stop, seed)
        except Transient as error:
            logger.warning("A turn is sampled once more, in a new session: %s", error)
        if self._sampling is used:
            self._sampling = self._session("sampling")  # turns under way stay with the old one, which ends with the run
        try:
            return await self._sampling.sample(path, prompt, limit, stop, seed)
        except Transient as error:
            raise PolicyError(str(error)) from error

    # ------------------------------------------------------------------------------------------ training

    async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
        """See `OuterTrainer.train_step`.

        Raises:
            PolicyError: the batch is refused, three times by a fresh client.
            Transient, Forbidden, OutOfFunds: the service can't train now. The run ends; resumed, it trains on the same
                episodes.
        """
        assert self._published is not None, "start() comes first"
        version = self._published.version + 1
        batch = examples(groups)
        if not batch:
            self._publish(self._published.state, version)
            return TrainStep(version, {})
        on_policy = all(min(e.policy_versions, default=0) == version - 1 for group in groups for e in group.episodes)
        read = sum(len(example.inputs) for example in batch)
        self._books.before_training(read)
        updated, state, retries = await self._until_done(batch, version, *self._law(on_policy))
        self._books.training(read)
        metrics = {
            **diagnostics(batch, updated.logprobs),
            "outer/loss": updated.loss,
            "outer/on_policy": float(on_policy),
            "outer/retries": float(retries),
            **_named(updated.metrics),
        }
        self._publish(state, version)
        return TrainStep(version, metrics, int(sum(example.mask.sum() for example in batch)))

    def _law(self, on_policy: bool) -> tuple[str, dict[str, float]]:
        """Loss and its configuration."""
        loss = self._loss if self._loss != "auto" else "importance_sampling" if on_policy else "ppo"
        bounds = {"ppo": self._clip, "cispo": self._cispo_clip}.get(loss)
        if bounds is None:
            return loss, {}
        return loss, {"clip_low_threshold": bounds[0], "clip_high_threshold": bounds[1]}

    async def _until_done(
        self, batch: Sequence[Example], version: int, loss: str, config: Mapping[str, float]
    ) -> tuple[Any, str, int]:
        """The update, checked and saved, and how often it was tried before.

        After an error nobody knows what the client's adapter is: it is thrown away, and the same batch is trained on
        from the last state that was saved.
        """
        for attempt in range(ATTEMPTS):
            try:
                if self._training is None:
                    self._training = await self._open(self._published.state if self._published else "")
                updated = await self._training.update(batch, loss, config, self._adam)
                diagnostics(batch, updated.logprobs)
                return updated, await self._save_version(version), attempt
            except BaseException as error:
                await self._discard()
                hopeless = not isinstance(error, AiTrainsAiError) or isinstance(error, Forbidden | OutOfFunds)
                if hopeless or attempt == ATTEMPTS - 1:
                    raise
                logger.warning("Update %d is tried again, from the last saved state: %s", version, error)
        raise AssertionError("the last attempt returns or raises")

    async def _open(self, state: str) -> Training:
        session = self._session("training")
        try:
            return await session.trainer(self._model, self._rank, self._seed, state)
        except BaseException:
            await self._end(session)
            raise

    async def _discard(self) -> None:
        """End the session of training. That of sampling goes on."""
        self._training = None
        for session in [session for session in self._sessions if session.purpose == "training"]:
            await self._end(session)

    async def _end(self, session: Session) -> None:
        with contextlib.suppress(ValueError):
            self._sessions.remove(session)
        await session.close("errored")

    async def _save_version(self, version: int) -> str:
        """Keep state and sampler of a version under a name that no other attempt has."""
        assert self._training is not None
        return await self._training.save(f"{version:05d}-{uuid.uuid4().hex[:8]}", self._ttl)

    def _publish(self, state: str, version: int) -> None:
        self._published = TinkerPolicy(self, state, version)

    # ------------------------------------------------------------------------------------------ checkpoints

    async def save(self, name: str) -> Checkpoint:
        """The state of the newest version, which was kept when it was made."""
        assert self._published is not None, "start() comes first"
        return Checkpoint(name, self._published.state, self._published.version)

    async def export(self, checkpoint: Checkpoint, folder: Path) -> Exported:
        try:
            self._service.sampler_of(checkpoint.path)
        except ConfigurationError as error:
            raise PolicyError(f"Checkpoint {checkpoint.name} can't be exported: {error}") from error
        session = self._session("export")
        try:
            training = await session.trainer(self._model, self._rank, self._seed, checkpoint.path)
            path = await training.save_external(f"export-{uuid.uuid4().hex[:8]}", EXPORT_SECONDS)
            await self._rest.download(path, folder)
        finally:
            await self._end(session)
        return Exported(str(folder), "adapter")


def _check_law(temperature: float, top_p: float = 1.0) -> None:
    if temperature != 1.0 or top_p != 1.0:
        raise ConfigurationError(
            f"temperature={temperature}, top_p={top_p}: training needs 1 and 1. Log-probabilities are those of the law "
            "that was sampled from, the trainer's those of temperature 1, and their ratio would be wrong everywhere. "
            "FrozenOuterTrainer takes others."
        )


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """The service's own metrics by slash-named keys; the gradient's norm under ours."""
    named = {}
    for key, value in metrics.items():
        name = key.replace(":", "/").rpartition(".")[2] if "." in key else key.replace(":", "/")
        named["outer/grad_norm" if "grad_norm" in name else f"tinker/{name}"] = float(value)
    return named


def _service_module() -> Any:
    """The module that imports the SDK, which takes seconds."""
    try:
        from ai_trains_ai.outer.tinker import service
    except ImportError as error:
        raise MissingDependency.of("tinker", "tinker") from error
    return service
