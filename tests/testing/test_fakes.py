"""What the fakes do beyond their contracts."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ai_trains_ai.agent.rollout import segments
from ai_trains_ai.errors import (
    AmbiguousCreate,
    BudgetExceeded,
    ConfigurationError,
    Forbidden,
    NoCapacity,
    SandboxUnavailable,
    Transient,
)
from ai_trains_ai.evaluation import HiddenEvaluation
from ai_trains_ai.events import Charged, Event
from ai_trains_ai.families import load
from ai_trains_ai.fleet import Fleet
from ai_trains_ai.records import BaseModel, Budget, Charge, Message, Offer, Pod, PodRequest, PodSpec, SamplingParams
from ai_trains_ai.testing import FakeClock, FakeGPUProvider, ScriptedAgent, TinyRunner, run_context
from ai_trains_ai.testing.fakes import LOST_REPLY, Unlisted
from ai_trains_ai.testing.runner import training_job


async def rented(provider: FakeGPUProvider, marker: str = "mine") -> Pod:
    offers = [offer for offer in await provider.offers(PodRequest()) if offer.available]
    return await provider.create(offers[0], PodSpec(marker))


# ------------------------------------------------------------------------------------------ clock and context


async def test_a_clock_goes_on_when_it_is_told() -> None:
    clock = FakeClock(10.0)
    clock.advance(5.0)
    await clock.sleep(60.0)
    assert clock() == 75.0


def test_a_run_context_is_seeded_and_booked(tmp_path: Path) -> None:
    seen: list[Event] = []
    clock = FakeClock()
    with run_context(tmp_path / "run", seed=3, clock=clock, budget=Budget(2.0), on_event=seen.append) as run:
        assert run.rng.random() == random.Random(3).random()
        run.ledger.charge(Charge("busy", "job", 1.0, "seconds", 1.5))
        assert seen == [Charged(Charge("busy", "job", 1.0, "seconds", 1.5), time=clock())]
        with pytest.raises(BudgetExceeded):
            run.ledger.require(Charge("busy", "job", 1.0, "seconds", 1.0))


def test_a_run_context_of_the_same_folder_goes_on(tmp_path: Path) -> None:
    with run_context(tmp_path / "run") as run:
        run.ledger.charge(Charge("busy", "job", 1.0, "seconds", 1.5))
    with run_context(tmp_path / "run") as run:
        assert run.ledger.spent == 1.5


def test_a_run_context_lends_one_fleet_per_provider(tmp_path: Path) -> None:
    provider = FakeGPUProvider()
    with run_context(tmp_path / "run") as run:
        assert isinstance(run.fleet(provider), Fleet)
        assert run.fleet(provider) is run.fleet(provider)
        assert run.fleet(provider) is not run.fleet(FakeGPUProvider())


async def test_a_run_context_without_a_sandbox_says_so(tmp_path: Path) -> None:
    with run_context(tmp_path / "run") as run:
        await run.sandbox.start()
        with pytest.raises(SandboxUnavailable, match="has no sandbox; pass sandbox="):
            await run.sandbox.another().run("module:function", b"")


def test_a_run_context_reads_secrets_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "value")
    with run_context(tmp_path / "run") as run:
        assert run.secret("SOME_KEY") == "value"
        with pytest.raises(ConfigurationError, match="NO_SUCH_KEY"):
            run.secret("NO_SUCH_KEY")


# ------------------------------------------------------------------------------------------ machines


async def test_faults_happen_in_order_and_once() -> None:
    provider = FakeGPUProvider()
    provider.faults += [("create", NoCapacity("none")), ("get", Transient("503")), ("create", Forbidden("key"))]
    with pytest.raises(NoCapacity):
        await rented(provider)
    with pytest.raises(Forbidden):
        await rented(provider)
    pod = await rented(provider)
    with pytest.raises(Transient):
        await provider.get(pod.id)
    assert await provider.get(pod.id) == pod
    assert not provider.faults
    assert provider.alive == ["mine"]


async def test_a_lost_reply_leaves_a_pod_that_costs_money() -> None:
    provider = FakeGPUProvider()
    provider.faults.append(("create", LOST_REPLY))
    with pytest.raises(AmbiguousCreate, match="marker"):
        await rented(provider)
    assert [pod.marker for pod in await provider.list("mine")] == ["mine"]


async def test_a_lost_reply_to_terminate_has_ended_the_pod() -> None:
    provider = FakeGPUProvider()
    pod = await rented(provider)
    provider.faults.append(("terminate", LOST_REPLY))
    with pytest.raises(Transient):
        await provider.terminate(pod.id)
    assert provider.alive == []


async def test_a_new_pod_may_be_missing_from_lists() -> None:
    provider = FakeGPUProvider()
    provider.faults.append(("create", Unlisted(2)))
    pod = await rented(provider)
    assert [len(await provider.list("mine")) for _ in range(3)] == [0, 0, 1]
    assert await provider.get(pod.id) == pod


async def test_a_pod_boots_by_the_clock() -> None:
    clock = FakeClock()
    provider = FakeGPUProvider(clock=clock, boot_seconds=90.0)
    pod = await rented(provider)
    assert pod.status == "starting"
    with pytest.raises(Transient, match="starting"):
        await provider.connect(pod)
    clock.advance(90.0)
    found = await provider.get(pod.id)
    assert found is not None
    assert found.status == "ready"
    assert await (await provider.connect(pod)).run(["true"]) == (0, b"")


async def test_an_unreachable_pod_answers_nobody_and_costs_money() -> None:
    clock = FakeClock()
    provider = FakeGPUProvider(clock=clock)
    pod = await rented(provider)
    shell = await provider.connect(pod)
    provider.unreachable.add(pod.id)
    assert await shell.run(["true"]) == (None, b"")
    with pytest.raises(Transient, match="unreachable"):
        await shell.get("/etc/hostname", 100)
    clock.advance(3_600.0)
    assert [found.status for found in await provider.list("mine")] == ["unreachable"]
    assert provider.spent == pytest.approx(3.6)


async def test_a_machine_that_is_taken_away_costs_no_more() -> None:
    clock = FakeClock()
    provider = FakeGPUProvider(clock=clock)
    pod = await rented(provider)
    clock.advance(1_800.0)
    provider.lose(pod.id)
    clock.advance(1_800.0)
    assert await provider.get(pod.id) is None
    assert provider.spent == pytest.approx(1.8)


async def test_money_runs_from_create_to_terminate() -> None:
    clock = FakeClock()
    provider = FakeGPUProvider([Offer("x", "X", 1, 36.0)], clock=clock)
    pods = [await rented(provider, f"mine-{number}") for number in range(2)]
    clock.advance(100.0)
    await provider.terminate(pods[0].id)
    clock.advance(100.0)
    assert provider.spent == pytest.approx(3.0)
    bill = await provider.billed(datetime.fromtimestamp(clock() - 100.0, UTC))
    assert bill is not None
    assert bill.usd == pytest.approx(1.0)


async def test_stock_runs_out_and_comes_back() -> None:
    provider = FakeGPUProvider(stock={"h100": 1, "a100": 0})
    pod = await rented(provider)
    assert [offer.available for offer in await provider.offers(PodRequest())] == [False, False]
    with pytest.raises(NoCapacity, match="H100"):
        await provider.create(pod.offer, PodSpec("another"))
    await provider.terminate(pod.id)
    assert [offer.available for offer in await provider.offers(PodRequest())] == [True, False]


async def test_a_foreign_pod_is_seen_by_its_own_marker_alone_and_is_not_ours_to_pay() -> None:
    clock = FakeClock()
    provider = FakeGPUProvider(clock=clock)
    clock.advance(3_600.0)
    assert await provider.list("mine") == []
    assert [pod.id for pod in await provider.list("somebody")] == [provider.foreign.id]
    assert (provider.spent, provider.alive) == (0.0, [])


# ------------------------------------------------------------------------------------------ the outer agent


OPENING = [Message("system", "You write jobs."), Message("user", "Family triage. Write a job.")]


async def agent(folder: Path, *arguments: object) -> ScriptedAgent:
    made = ScriptedAgent(*arguments)  # type: ignore[arg-type]
    with run_context(folder) as run:
        await made.start(run)
    return made


async def test_the_default_script_writes_a_job_for_the_tasks_family_and_gives_up_every_fourth(tmp_path: Path) -> None:
    policy = await (await agent(tmp_path / "run")).snapshot()
    for number in range(1, 5):
        messages, turns = list(OPENING), []
        for _ in range(3):
            turn = await policy.act(messages, (), SamplingParams())
            turns.append(turn)
            messages += [Message("assistant", turn.text, turn), Message("tool", "done")]
        if number == 4:
            assert not turns[0].calls
        else:
            assert [turn.calls[0].name for turn in turns] == ["write_file", "write_file", "submit"]
            assert 'practice("triage", 2, 2)' in turns[0].calls[0].arguments["content"]
            assert len(segments(turns)) == 1


async def test_a_script_is_a_list_of_texts(tmp_path: Path) -> None:
    policy = await (await agent(tmp_path / "run", ["one", "two"])).snapshot()
    messages, said = list(OPENING), []
    for _ in range(3):
        turn = await policy.act(messages, (), SamplingParams())
        said.append(turn.text)
        messages += [Message("assistant", turn.text, turn), Message("user", "Go on.")]
    assert said == ["one", "two", "No."]


async def test_a_script_is_a_function_of_the_conversation_and_its_number(tmp_path: Path) -> None:
    policy = await (await agent(tmp_path / "run", lambda talk, number: f"{number}: {talk[-1].content}")).snapshot()
    first = await policy.act(OPENING, (), SamplingParams())
    second = await policy.act(OPENING, (), SamplingParams())
    again = [*OPENING, Message("assistant", first.text, first), Message("user", "Go on.")]
    assert (first.text[:2], second.text[:2]) == ("1:", "2:")
    assert (await policy.act(again, (), SamplingParams())).text == "1: Go on."


async def test_a_long_text_is_cut(tmp_path: Path) -> None:
    policy = await (await agent(tmp_path / "run", ["x" * 1_000])).snapshot()
    turn = await policy.act(OPENING, (), SamplingParams(max_tokens=4))
    assert (turn.stop_reason, len(turn.ids), turn.text) == ("length", 4, "x" * 64)


# ------------------------------------------------------------------------------------------ the inner jobs


async def test_training_lifts_a_model_by_what_it_says(tmp_path: Path) -> None:
    family = load("chained-arithmetic")
    task = family.tasks()[0]
    runner = TinyRunner()
    evaluation = HiddenEvaluation({family.name: family}, b"secret", n=256)
    with run_context(tmp_path / "run") as run:
        await runner.start(run)
        handle = await runner.submit(training_job(runner))
        await runner.wait(handle)
        small, larger = [b.evaluation.mean for b in await evaluation.baselines(task, runner, lambda baseline: None)]
        trained = (await evaluation.trained(task, runner, handle, "pico-s")).mean
        await runner.close()
    assert small == pytest.approx(runner.CHANCE["pico-s"], abs=0.08)
    assert larger == pytest.approx(runner.CHANCE["pico-m"], abs=0.08)
    assert trained == pytest.approx(runner.CHANCE["pico-s"] + runner.LIFT, abs=0.1)


async def test_every_built_in_family_is_answered(tmp_path: Path) -> None:
    with run_context(tmp_path / "run") as run:
        runner = TinyRunner()
        await runner.start(run)
        for name in ("chained-arithmetic", "multi-hop", "triage"):
            family = load(name)
            items = family.items(family.tasks()[0], random.Random(0), 400, hidden=False)
            async with runner.serve(BaseModel("pico-m", 1)) as served:
                replies = await served.sample([item.prompt for item in items], SamplingParams())
            right = sum(family.score(item, reply) for item, reply in zip(items, replies, strict=True))
            assert 120 <= right <= 200


async def test_a_job_is_paid_and_refused_without_money(tmp_path: Path) -> None:
    with run_context(tmp_path / "run", budget=Budget(1.5)) as run:
        runner = TinyRunner(usd_per_job=1.0)
        await runner.start(run)
        await runner.wait(await runner.submit(training_job(runner)))
        assert run.ledger.spent == 1.0
        with pytest.raises(BudgetExceeded):
            await runner.submit(training_job(runner, "second"))
        await runner.close()
