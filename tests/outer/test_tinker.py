"""The Tinker trainer with the real SDK against a local server with real gradients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.tinker import MODEL, TinkerServer, tinker_server
from fakes.tinker.model import linear
from safetensors.numpy import load_file

import ai_trains_ai as ata
from ai_trains_ai.agent.rollout import segments
from ai_trains_ai.agent.tools import TOOLS
from ai_trains_ai.errors import BudgetExceeded, ConfigurationError, PolicyError
from ai_trains_ai.interfaces import OuterTrainer
from ai_trains_ai.outer.tinker import TinkerOuterTrainer
from ai_trains_ai.pico import model_folder
from ai_trains_ai.pico.model import Qwen3
from ai_trains_ai.records import Budget, Checkpoint, Episode, EpisodeGroup, Message, SamplingParams, Turn
from ai_trains_ai.testing import OuterTrainerContract
from ai_trains_ai.testing.fakes import run_context

QUICK = {"open": 60.0, "sample": 60.0, "train": 60.0, "save": 60.0, "close": 5.0}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with tinker_server(tmp_path_factory.mktemp("tinker")) as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local-key")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def trainer(server: TinkerServer, **options: Any) -> TinkerOuterTrainer:
    defaults: dict[str, Any] = {"model": MODEL, "renderer": "embedded", "lr": 1e-3, "deadlines": QUICK}
    return TinkerOuterTrainer(base_url=server.url, **{**defaults, **options})


class TestTinkerOuterTrainer(OuterTrainerContract):
    @pytest.fixture
    def trainer(self, shared: TinkerServer) -> OuterTrainer:
        return trainer(shared)

    @pytest.fixture
    def another(self, shared: TinkerServer) -> OuterTrainer:
        return trainer(shared)


# ---------------------------------------------------------------------------------------------- a trainer at work


@asynccontextmanager
async def begun(
    server: TinkerServer,
    folder: Path,
    checkpoint: Checkpoint | None = None,
    budget: Budget | None = None,
    **options: Any,
) -> AsyncIterator[TinkerOuterTrainer]:
    """A started trainer."""
    made = trainer(server, **options)
    with run_context(folder, budget=budget) as run:
        try:
            await made.start(run, checkpoint)
            yield made
        finally:
            await made.close()


OPENING = (Message("system", "You write training jobs for small models."), Message("user", "Task 1. Begin."))


async def talk(made: TinkerOuterTrainer, turns: int = 2, seed: int = 0) -> list[Turn]:
    policy, messages, said = await made.snapshot(), list(OPENING), []
    for number in range(turns):
        turn = await policy.act(messages, TOOLS, SamplingParams(max_tokens=24, seed=100 * seed + number))
        said.append(turn)
        messages += [Message("assistant", turn.text, turn), Message("tool", "ok")]
    return said


async def group(made: TinkerOuterTrainer, *advantages: float | None) -> EpisodeGroup:
    """Episodes of the newest version, with these advantages."""
    version = (await made.snapshot()).version
    episodes = []
    for number, advantage in enumerate(advantages):
        tokens = segments(await talk(made, seed=number))
        status: Any = "finished" if advantage is not None else "infrastructure"
        head = (f"episode-{number}", "group", "task", number, status, "turns", (), tokens, (version,))
        episodes.append(Episode(*head, attempts=0, valid_attempt=None))
    return EpisodeGroup("group", "task", tuple(episodes), advantages)


def first_logprobs(turns: Sequence[Turn]) -> list[float]:
    return [value for turn in turns for value in turn.logprobs]


async def test_before_any_update_sampler_and_trainer_agree(shared: TinkerServer, tmp_path: Path) -> None:
    async with begun(shared, tmp_path / "run") as made:
        metrics = (await made.train_step([await group(made, 1.0, -1.0)])).metrics
    assert abs(metrics["outer/kl"]) < 1e-4
    assert metrics["outer/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["outer/on_policy"] == 1.0
    assert metrics["outer/grad_norm"] > 0


async def test_what_is_rewarded_becomes_likelier(shared: TinkerServer, tmp_path: Path) -> None:
    """Three updates on one group: the tokens of the good episode gain, those of the bad one lose."""
    async with begun(shared, tmp_path / "run", lr=3e-3) as made:
        batch = await group(made, 1.0, -1.0)
        ratios = [(await made.train_step([batch])).metrics for _ in range(3)]
    losses = [metrics["outer/loss"] for metrics in ratios]
    assert losses[0] > losses[1] > losses[2]


async def test_a_step_of_an_older_version_is_clipped(tmp_path: Path) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run") as made:
            batch = await group(made, 1.0, -1.0)
            first, second = [(await made.train_step([batch])).metrics["outer/on_policy"] for _ in range(2)]
        assert (first, second) == (1.0, 0.0)
        assert server.losses == ["importance_sampling", "ppo"]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
async def test_one_loss_for_everything(tmp_path: Path, loss: Any) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run", loss=loss) as made:
            batch = await group(made, 1.0, -1.0)
            await made.train_step([batch])
            await made.train_step([batch])
        assert server.losses == [loss, loss]


async def test_a_resumed_run_is_the_same_run(shared: TinkerServer, tmp_path: Path) -> None:
    """Weights and optimizer come back: the third update is the one of a run that never stopped."""
    async with begun(shared, tmp_path / "one") as made:
        batches = [await group(made, 1.0, -1.0, 0.5) for _ in range(1)] * 3
        for batch in batches[:2]:
            await made.train_step([batch])
        checkpoint = await made.save("step-0001")
        uninterrupted = await made.train_step([batches[2]])
        through = first_logprobs(await talk(made))
    async with begun(shared, tmp_path / "two", checkpoint) as another:
        resumed = await another.train_step([batches[2]])
        again = first_logprobs(await talk(another))
    assert resumed.version == uninterrupted.version == 3
    assert resumed.metrics["outer/loss"] == pytest.approx(uninterrupted.metrics["outer/loss"], abs=1e-5)
    assert again == pytest.approx(through, abs=1e-4)


async def test_a_restarted_service_still_has_the_checkpoint(tmp_path: Path) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run") as made:
            await made.train_step([await group(made, 1.0, -1.0)])
            checkpoint, told = await made.save("step-0000"), first_logprobs(await talk(made))
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run", checkpoint) as made:
            assert first_logprobs(await talk(made)) == pytest.approx(told, abs=1e-5)


async def test_a_checkpoint_that_has_expired(tmp_path: Path) -> None:
    now = [1e9]
    with tinker_server(tmp_path / "tinker", clock=lambda: now[0]) as server:
        async with begun(server, tmp_path / "run", keep_days=1) as made:
            checkpoint = await made.save("step-0000")
        now[0] += 0.9 * 86_400
        async with begun(server, tmp_path / "run", checkpoint, keep_days=1):
            pass  # a start lets it live for another day
        now[0] += 0.9 * 86_400
        async with begun(server, tmp_path / "run", checkpoint, keep_days=1):
            pass
        now[0] += 1.1 * 86_400
        with pytest.raises(PolicyError, match="gone"):
            async with begun(server, tmp_path / "run", checkpoint):
                pass


async def test_an_expired_sampler_is_made_anew_from_the_state(tmp_path: Path) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run") as made:
            await made.train_step([await group(made, 1.0, -1.0)])
            checkpoint, told = await made.save("step-0000"), first_logprobs(await talk(made))
        for sampler in (tmp_path / "tinker").rglob(f"sampler_weights/{checkpoint.path.rpartition('/')[2]}"):
            sampler.unlink()
        async with begun(server, tmp_path / "run", checkpoint) as made:
            assert first_logprobs(await talk(made)) == pytest.approx(told, abs=1e-5)


async def test_a_warm_start_begins_with_other_weights(shared: TinkerServer, tmp_path: Path) -> None:
    async with begun(shared, tmp_path / "one", lr=1e-2) as made:
        await made.train_step([await group(made, 1.0, -1.0)])
        state, told = (await made.save("x")).path, first_logprobs(await talk(made))
    async with begun(shared, tmp_path / "two", start_from=state) as made:
        assert (await made.snapshot()).version == 0
        assert first_logprobs(await talk(made)) == pytest.approx(told, abs=1e-5)


async def test_an_export_is_an_adapter_that_gives_the_same_model(shared: TinkerServer, tmp_path: Path) -> None:
    async with begun(shared, tmp_path / "run", lr=1e-2) as made:
        await made.train_step([await group(made, 1.0, -1.0)])
        exported = await made.export(await made.save("step-0000"), tmp_path / "export")
        turns = await talk(made, turns=1)
    model = Qwen3.load(model_folder("outer"))
    config = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    factors = load_file(tmp_path / "export" / "adapter_model.safetensors")
    for name, tensor in linear(model).items():
        layer = "base_model.model." + name.removesuffix(".weight")
        a, b = factors[f"{layer}.lora_A.weight"], factors[f"{layer}.lora_B.weight"]
        tensor += config["lora_alpha"] / config["r"] * b @ a
    ids = np.array([*turns[0].prompt_ids, *turns[0].ids])
    hidden, _ = model.forward(ids[None, :1], np.zeros(1, np.int64), ids[None, None, 1:])
    logits = model.head(hidden[0, 0])[0].astype(np.float64)
    law = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    said = len(turns[0].ids)
    found = law[np.arange(len(ids) - 1), ids[1:]][-said:]
    assert exported.kind == "adapter"
    assert found.tolist() == pytest.approx(list(turns[0].logprobs), abs=1e-3)


async def test_what_was_read_before_is_booked_as_cached(tmp_path: Path) -> None:
    prices = {"prefill": 10.0, "cached": 1.0, "sampled": 100.0, "trained": 1_000.0}
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run", budget=Budget(usd=5.0), prices=prices) as made:
            turns = await talk(made, turns=3)
            read = len((await group(made, 1.0, -1.0)).episodes[0].segments[0].ids)
    assert [turn.usage.cached for turn in turns if turn.usage][1:] == [
        len(turn.prompt_ids) + len(turn.ids) for turn in turns[:-1]
    ], "a turn extends the one before it exactly, so that all of that is in the cache"
    assert read
    with run_context(tmp_path / "run") as run:
        booked = {charge.subject.partition(": ")[2]: charge for _, charge in run.store.charges()[:8]}
    assert {name: pytest.approx(charge.usd) for name, charge in booked.items()} == {
        name: charge.quantity * price / 1e6
        for name, charge, price in ((n, booked[n], prices[w]) for n, w in
            (("prefill", "prefill"), ("cached prefill", "cached"), ("sampled", "sampled")))
    }  # fmt: skip


async def test_training_is_booked_by_all_tokens_that_were_read(shared: TinkerServer, tmp_path: Path) -> None:
    prices = {"prefill": 0.0, "sampled": 0.0, "trained": 1e3}
    async with begun(shared, tmp_path / "run", budget=Budget(usd=50.0), prices=prices) as made:
        batch = await group(made, 1.0, -1.0)
        await made.train_step([batch])
    read = sum(len(segment.ids) - 1 for episode in batch.episodes for segment in episode.segments)
    with run_context(tmp_path / "run") as run:
        (charge,) = [charge for _, charge in run.store.charges() if charge.subject.endswith("trained")]
    assert (charge.quantity, charge.usd) == (read, pytest.approx(read * 1e-3))


async def test_the_budget_stops_before_it_is_passed(shared: TinkerServer, tmp_path: Path) -> None:
    prices = {"prefill": 0.0, "sampled": 0.0, "trained": 1e6}
    async with begun(shared, tmp_path / "run", budget=Budget(usd=1.0), prices=prices) as made:
        batch = await group(made, 1.0, -1.0)
        with pytest.raises(BudgetExceeded):
            await made.train_step([batch])


async def test_a_budget_needs_prices_at_another_service(shared: TinkerServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="prices"):
        async with begun(shared, tmp_path / "run", budget=Budget(usd=1.0)):
            pass


async def test_a_full_context_ends_the_episode(shared: TinkerServer, tmp_path: Path) -> None:
    async with begun(shared, tmp_path / "run", context=120) as made:
        policy = await made.snapshot()
        turn = await policy.act(OPENING, TOOLS, SamplingParams(max_tokens=500))
        assert turn.stop_reason in ("stop", "length")
        assert len(turn.prompt_ids) + len(turn.ids) <= 120
        told = [*OPENING, Message("assistant", turn.text, turn), Message("tool", "word " * 100)]
        assert (await policy.act(told, TOOLS, SamplingParams(max_tokens=500))).stop_reason == "context"


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_p": 0.9}])
def test_another_law_than_the_trainers_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="ratio"):
        TinkerOuterTrainer(**options)


async def test_another_temperature_is_refused_when_it_samples(shared: TinkerServer, tmp_path: Path) -> None:
    async with begun(shared, tmp_path / "run") as made:
        with pytest.raises(ConfigurationError, match="ratio"):
            await (await made.snapshot()).act(OPENING, TOOLS, SamplingParams(temperature=0.7))


@pytest.mark.parametrize(
    "options", [{"lora_rank": 6}, {"lr": 0.0}, {"loss": "dro"}, {"keep_days": 0.01}, {"prices": {"prefill": 1.0}}]
)
def test_arguments_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TinkerOuterTrainer(**options)


async def test_a_model_that_is_not_served(shared: TinkerServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"serves: {MODEL}"):
        async with begun(shared, tmp_path / "run", model="Qwen/Qwen3.6-35B-A3B"):
            pass


async def test_without_a_key(shared: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ConfigurationError, match="TINKER_API_KEY"):
        async with begun(shared, tmp_path / "run"):
            pass


async def test_sessions_are_closed(tmp_path: Path) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run") as made:
            await made.train_step([await group(made, 1.0, -1.0)])
            assert server.live
        assert not server.live
        assert server.keys == {"tml-local-key"}


@pytest.mark.slow
def test_both_loops_run_on_the_local_server(tmp_path: Path) -> None:
    """An experiment: the shipped tiny outer model on the server, the embedded inner loop, a probe in between."""
    with tinker_server(tmp_path / "tinker") as server:
        outer = ata.outer_trainer(
            "tinker", model=MODEL, renderer="embedded", base_url=server.url, lr=2e-3,
            prices={"prefill": 1.0, "cached": 0.1, "sampled": 2.0, "trained": 3.0},
        )  # fmt: skip
        experiment = ata.Experiment.embedded(
            outer=outer, groups_per_step=2, group_size=4, max_staleness=0, eval_items=32, probe_episodes=2,
            probe_every=1, budget=Budget(usd=5.0), seed=1,
        )  # fmt: skip
        run = experiment.run_sync(2, out=tmp_path / "run")
        assert not server.live
    assert [step["version"] for step in run.steps] == [1, 2]
    assert [step.get("outer/on_policy", 1.0) for step in run.steps] == [1.0, 1.0]
    assert all(step["outer/segment_breaks"] == 0 for step in run.steps)
    assert len(run.probes("probe")) == 2
    assert run.costs.kind["tokens"] == pytest.approx(run.costs.total)
    assert run.checkpoint is not None
    assert run.checkpoint[0].path.startswith("tinker://")
