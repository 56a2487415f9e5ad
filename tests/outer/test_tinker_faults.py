"""What the service does wrong: no call hangs, no update is half done, no other episode is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from fakes.tinker import MODEL, Fault, TinkerServer, tinker_server
from outer.test_tinker import OPENING, begun, first_logprobs, group, talk

from ai_trains_ai.agent.tools import TOOLS
from ai_trains_ai.errors import AiTrainsAiError, Forbidden, OutOfFunds, PolicyError, Transient
from ai_trains_ai.outer.tinker import TinkerOuterTrainer
from ai_trains_ai.records import SamplingParams

SHORT = {"open": 20.0, "sample": 4.0, "train": 4.0, "save": 4.0, "download": 20.0, "close": 2.0}
BOUND = 90.0  # seconds in which every case must be over, whatever happens

pytestmark = pytest.mark.usefixtures("key")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local-key")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


# what meets an update -> tries before it went through; None: the SDK itself asks again, and it is no error
UPDATES: dict[str, tuple[Fault, int]] = {
    "a gradient that is refused": (Fault("forward_backward", status=400), 1),
    "an optimizer step that is refused": (Fault("optim_step", status=422), 1),
    "a gradient that the user is blamed for": (Fault("forward_backward", error="user"), 1),
    "a gradient that the server fails at": (Fault("forward_backward", error="server"), 1),
    "an optimizer step that fails": (Fault("optim_step", error="unknown"), 1),
    "a gradient that never ends": (Fault("forward_backward", hang=True), 1),
    "an optimizer step that never ends": (Fault("optim_step", hang=True), 1),
    "log-probabilities that are not finite": (Fault("forward_backward", nan=True), 1),
    "a state that can't be saved": (Fault("save_weights", error="server"), 1),
    "a sampler that can't be saved": (Fault("save_weights_for_sampler", status=400), 1),
    "a save that never ends": (Fault("save_weights_for_sampler", hang=True), 1),
    "a result that is gone": (Fault("retrieve_future", status=410), 1),
    "a service that is busy": (Fault("forward_backward", status=429), 0),
    "a service that is down for a moment": (Fault("optim_step", status=503), 0),
    "a connection that drops before": (Fault("forward_backward", drop="before"), 0),
    "a connection that drops after": (Fault("forward_backward", drop="after"), 0),
    "an answer to a save that is lost": (Fault("save_weights", drop="after"), 0),
    "two errors in a row": (Fault("forward_backward", status=400, times=2), 2),
}


@pytest.mark.parametrize("name", UPDATES)
async def test_an_update_goes_through_and_is_the_same(tmp_path: Path, name: str) -> None:
    """Thrown away, made anew from the last state, trained on the same batch: as if nothing had been."""
    fault, retries = UPDATES[name]
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run", deadlines=SHORT) as made:
            batch = await group(made, 1.0, -1.0)
            await made.train_step([batch])
            checkpoint = await made.save("step-0000")
            fault.times, server.faults = UPDATES[name][0].times, [fault]
            step = await asyncio.wait_for(made.train_step([batch]), BOUND)
            found = first_logprobs(await talk(made))
        async with begun(server, tmp_path / "other", checkpoint) as clean:
            await clean.train_step([batch])
            expected = first_logprobs(await talk(clean))
    assert (step.version, step.metrics["outer/retries"]) == (2, retries)
    assert found == pytest.approx(expected, abs=1e-4)


async def fails(made: TinkerOuterTrainer, batch: Any, kind: type[AiTrainsAiError]) -> None:
    before = await made.snapshot()
    with pytest.raises(kind):
        await asyncio.wait_for(made.train_step([batch]), BOUND)
    assert await made.snapshot() is before, "the policy is as it was"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("forward_backward", status=400, times=99), PolicyError),
        (Fault("forward_backward", error="server", times=99), Transient),
        (Fault("forward_backward", hang=True, times=99), Transient),
        (Fault("forward_backward", status=401, times=99), Forbidden),
    ],
    ids=["refused", "failing", "hanging", "key revoked"],
)
async def test_what_never_goes_through_leaves_the_policy_as_it_was(
    tmp_path: Path, fault: Fault, kind: type[AiTrainsAiError]
) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run", deadlines={**SHORT, "train": 2.0}) as made:
            batch = await group(made, 1.0, -1.0)
            server.faults = [fault]
            await fails(made, batch, kind)
            server.faults = []
            step = await asyncio.wait_for(made.train_step([batch]), BOUND)
    assert step.version == 1, "and once the service is well again, the next step is the next version"


async def test_an_account_that_is_empty_is_said_so(tmp_path: Path) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        server.faults = [Fault("create_model", status=402, times=99)]
        with pytest.raises((OutOfFunds, Transient)):
            await asyncio.wait_for(_start(server, tmp_path), BOUND)


async def _start(server: TinkerServer, folder: Path) -> None:
    async with begun(server, folder / "run", deadlines={**SHORT, "open": 5.0}):
        pass


# what meets a turn -> whether there is one in the end
TURNS: dict[str, tuple[list[Fault], bool]] = {
    "a refusal": ([Fault("asample", status=400)], False),
    "a service that is busy": ([Fault("asample", status=429, times=2)], True),
    "a dropped connection": ([Fault("asample", drop="before")], True),
    "a lost answer": ([Fault("asample", drop="after")], True),
    "a result that is gone": ([Fault("retrieve_future", status=410)], True),
    "a failed result": ([Fault("asample", error="server")], True),
    "two failed results": ([Fault("asample", error="server", times=2)], False),
    "a turn that never ends": ([Fault("asample", hang=True)], True),
    "turns that never end": ([Fault("asample", hang=True, times=9)], False),
    "log-probabilities that are not finite": ([Fault("asample", nan=True)], True),
    "a sampler that can't be made": ([Fault("create_sampling_session", status=500, times=1)], True),
}


@pytest.mark.parametrize("name", TURNS)
async def test_a_turn_is_sampled_or_the_episode_masked(tmp_path: Path, name: str) -> None:
    faults, sampled = TURNS[name]
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run", deadlines=SHORT) as made:
            policy = await made.snapshot()
            server.faults = list(faults)
            acting = policy.act(OPENING, TOOLS, SamplingParams(max_tokens=16, seed=3))
            if sampled:
                assert (await asyncio.wait_for(acting, BOUND)).ids
            else:
                with pytest.raises(PolicyError):
                    await asyncio.wait_for(acting, BOUND)
            server.faults = []
            assert (await asyncio.wait_for(talk(made, turns=1), BOUND))[0].ids, "and the next one is sampled"


async def test_one_failed_turn_leaves_the_others_alone(tmp_path: Path) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run", deadlines=SHORT) as made:
            server.faults = [Fault("asample", error="server", skip=2, times=1)]
            turns = await asyncio.wait_for(asyncio.gather(*(talk(made, 1, seed) for seed in range(6))), BOUND)
    assert all(turn.ids for (turn,) in turns)


async def test_sessions_that_the_service_lost_are_replaced(tmp_path: Path) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run", deadlines=SHORT) as made:
            batch = await group(made, 1.0, -1.0)
            server.lose()
            step = await asyncio.wait_for(made.train_step([batch]), BOUND)
            (turn,) = await asyncio.wait_for(talk(made, turns=1), BOUND)
    assert (step.version, turn.policy_version) == (1, 1)


async def test_a_refused_request_leaves_a_gap_behind_which_the_sdk_waits_for_ever(tmp_path: Path) -> None:
    """Why a training client is thrown away after any error: what the SDK itself does."""
    import tinker

    with tinker_server(tmp_path / "tinker") as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
        client = await service.create_lora_training_client(MODEL, rank=8, seed=0)
        server.faults = [Fault("optim_step", status=400)]
        with pytest.raises(tinker.BadRequestError):
            await client.optim_step(tinker.AdamParams())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.optim_step(tinker.AdamParams()).result_async(), 3)
        await asyncio.wait_for(service.close("errored"), 20)


async def test_closing_is_bounded_when_the_service_is_gone(tmp_path: Path) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run", deadlines=SHORT) as made:
            await talk(made, turns=1)
            server.stop()
            begin = time.monotonic()
            await made.close()
    assert time.monotonic() - begin < 20


async def test_a_cancelled_update_is_thrown_away(tmp_path: Path) -> None:
    with tinker_server(tmp_path / "tinker") as server:
        async with begun(server, tmp_path / "run", deadlines=SHORT) as made:
            batch = await group(made, 1.0, -1.0)
            server.faults = [Fault("forward_backward", hang=True)]
            training = asyncio.create_task(made.train_step([batch]))
            await asyncio.sleep(0.5)
            training.cancel()
            with pytest.raises(asyncio.CancelledError):
                await training
            step = await asyncio.wait_for(made.train_step([batch]), BOUND)
    assert (step.version, step.metrics["outer/retries"]) == (1, 0)
