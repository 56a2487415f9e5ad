"""Money that will be spent: dollars and hours with a range, and where each number comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from fleet.test_costs import books, busy
from hypothesis import given
from hypothesis import strategies as st

import ai_trains_ai as ata
from ai_trains_ai.errors import ConfigurationError, NoCapacity
from ai_trains_ai.fleet.forecast import Known, Machines, Plan, Span, forecast
from ai_trains_ai.records import Charge, Checkpoint, Offer, PodRequest, TrainStep
from ai_trains_ai.testing import FakeGPUProvider

H100, A40 = Offer("h100", "H100", 1, 3.6, slots=2), Offer("a40", "A40", 1, 0.6)
PLAN = Plan(steps=10, groups=30, episodes=240, in_flight=32, limit=20.0)
RENTED = Machines((H100, A40), max_pods=4)


def test_dollars_are_hours_of_jobs_at_the_price_of_a_slot() -> None:
    found = forecast(PLAN, Machines((A40,), 4), minutes_per_job=(10, 25, 60))
    assert found.usd.expected == pytest.approx(240 * 25 / 60 * 0.6)


def test_the_low_end_is_quick_and_cheap_and_the_high_end_slow_and_dear() -> None:
    found = forecast(PLAN, RENTED, minutes_per_job=(10, 25, 60), boot_limit=0)
    assert (found.usd.low, found.usd.high) == pytest.approx((240 * 10 / 60 * 0.6, 240 * 60 / 60 * 1.8))


def test_hours_are_shared_by_the_slots() -> None:
    found = forecast(PLAN, Machines((A40,), 4), minutes_per_job=25)
    assert found.hours.expected == pytest.approx(240 * 25 / 60 / 4)


def test_more_slots_than_episodes_in_flight_don_t_help() -> None:
    found = forecast(PLAN, Machines((A40,), 1000), minutes_per_job=25)
    assert found.hours.expected == pytest.approx(240 * 25 / 60 / 32)


def test_the_hourly_limit_keeps_pods_few() -> None:
    assert forecast(PLAN, Machines((A40,), 4), minutes_per_job=25, usd_per_hour=1.3).pods == 2


def test_the_hourly_limit_leaves_dear_offers_out() -> None:
    found = forecast(PLAN, RENTED, minutes_per_job=25, boot_limit=0, usd_per_hour=1.3)
    assert found.usd.high == pytest.approx(240 * 25 / 60 * 0.6)


def test_no_offer_within_the_hourly_limit_is_said() -> None:
    with pytest.raises(ConfigurationError, match=r"the cheapest costs 0\.60"):
        forecast(PLAN, RENTED, minutes_per_job=25, usd_per_hour=0.5)


def test_what_is_out_of_stock_sets_no_price() -> None:
    gone = Offer("gone", "H200", 1, 99.0, available=False)
    found = forecast(PLAN, Machines((A40, gone), 4), minutes_per_job=25, boot_limit=0)
    assert found.usd.high == pytest.approx(240 * 25 / 60 * 0.6)


def test_without_anything_known_the_time_limit_bounds_it() -> None:
    found = forecast(PLAN, Machines((A40,), 4), boot_limit=0)
    assert (found.usd.low, found.usd.high) == (0, pytest.approx(240 * 20 / 60 * 0.6))
    assert "time limit" in found.basis["minutes per job"]


def test_own_jobs_are_the_basis_once_there_are_enough() -> None:
    found = forecast(PLAN, Machines((A40,), 4), Known(minutes=[10.0] * 37))
    assert found.usd.expected == pytest.approx(240 * 10 / 60 * 0.6)
    assert found.basis["minutes per job"] == "this run's own 37 jobs (10 %, mean, 90 %)"


def test_few_own_jobs_teach_nothing_yet() -> None:
    assert "time limit" in forecast(PLAN, RENTED, Known(minutes=[1.0])).basis["minutes per job"]


def test_episodes_without_a_job_cost_nothing() -> None:
    assert forecast(PLAN, RENTED, Known(job_share=0.25), minutes_per_job=25).jobs == 60


def test_own_overhead_comes_on_top() -> None:
    found = forecast(PLAN, Machines((A40,), 4), Known(overhead=1.5), minutes_per_job=25)
    assert found.usd.expected == pytest.approx(1.5 * 240 * 25 / 60 * 0.6)


def test_tokens_are_0_and_said_to_be_left_out() -> None:
    assert any("tokens" in what for what in forecast(PLAN, RENTED, minutes_per_job=25).left_out)


@pytest.mark.parametrize(
    ("budget", "fits", "says"),
    [
        (None, None, "none is set"),
        (1000.0, True, "it fits"),
        (100.0, False, "the high end doesn't"),
        (10.0, False, "what is expected doesn't fit"),
    ],
)
def test_the_budget(budget: float | None, fits: bool | None, says: str) -> None:
    found = forecast(PLAN, RENTED, minutes_per_job=25, usd=budget)  # 60 expected, 183 at the high end
    assert found.fits is fits
    assert says in found.text()


def test_what_was_spent_is_no_longer_left() -> None:
    assert forecast(PLAN, RENTED, Known(spent=30.0), minutes_per_job=25, usd=100.0).left == 70.0


def test_without_rented_machines_it_costs_nothing_and_says_so() -> None:
    found = forecast(PLAN, Machines(slots=2), minutes_per_job=1)
    assert (found.usd, found.pods) == (Span(0, 0, 0), 0)
    assert "no machine is paid for" in found.text()


@pytest.mark.parametrize("wrong", ["soon", (1, 2), (3, 2, 1), (-1, 2, 3), float("nan"), float("inf")])
def test_minutes_that_are_none(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="minutes_per_job"):
        forecast(PLAN, RENTED, minutes_per_job=wrong)


offer = st.builds(
    Offer, st.uuids().map(str), st.just("H100"), st.just(1), st.floats(0, 50), st.integers(1, 8), st.booleans()
)
known = st.builds(
    Known,
    st.lists(st.floats(0, 600), max_size=20),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(1, 3),
    st.lists(st.floats(0, 15), max_size=4),
)


@given(st.lists(offer, max_size=5), st.integers(1, 20), known)
def test_what_is_expected_lies_within_its_range(offers: list[Offer], max_pods: int, known: Known) -> None:
    found = forecast(PLAN, Machines(offers, max_pods), known)
    for span in (found.usd, found.hours):
        assert 0 <= span.low <= span.expected * (1 + 1e-9)
        assert span.expected <= span.high * (1 + 1e-9)


# ---------------------------------------------------------------------------------------------- what the books teach


def test_the_books_teach_minutes_of_lease(tmp_path: Path) -> None:
    store = books(tmp_path / "run", [busy(0, 1.0), busy(0, 1.0), busy(1, 1.0)])
    assert Known.of(store).minutes == (2.0, 1.0)


def test_the_books_teach_boots(tmp_path: Path) -> None:
    store = books(tmp_path / "run", [Charge("boot", "pod-h", 120.0, "seconds", 0.1, "pod-h")])
    assert Known.of(store).boots == (2.0,)


def test_the_books_teach_overhead_once_there_are_enough_jobs(tmp_path: Path) -> None:
    charges = [busy(job, 1.0) for job in range(5)] + [Charge("idle", "pod-h", 1.0, "seconds", 2.5, "pod-h")]
    assert Known.of(books(tmp_path / "run", charges)).overhead == pytest.approx(1.5)


# ---------------------------------------------------------------------------------------------- of an experiment


def experiment(**changes: Any) -> ata.Experiment:
    return ata.Experiment.embedded(**({"probe_episodes": 4, "groups_per_step": 3, "group_size": 8} | changes))


async def test_the_plan_counts_training_and_both_probes() -> None:
    found = await experiment().forecast(10)
    assert (found.steps, found.groups, found.episodes) == (10, 32, 248)


async def test_the_runner_s_provider_is_asked_for_prices() -> None:
    inner = ata.job_runner("embedded", provider=FakeGPUProvider)
    found = await experiment(inner=inner).forecast(10, minutes_per_job=30)
    assert found.usd.expected == pytest.approx(248 * 0.5 * 1.8)
    assert found.pods == 1


async def test_a_forecast_rents_nothing() -> None:
    provider = FakeGPUProvider()
    await experiment(inner=ata.job_runner("embedded", provider=provider)).forecast(10)
    assert provider.calls == ["offers"]


async def test_prices_of_the_wanted_machines() -> None:
    inner = ata.job_runner("embedded", provider=FakeGPUProvider([H100, A40]))
    found = await experiment(inner=inner).forecast(10, minutes_per_job=30, request=PodRequest(("A40",)))
    assert found.usd.expected == pytest.approx(248 * 0.5 * 0.6)


async def test_machines_that_nobody_has() -> None:
    inner = ata.job_runner("embedded", provider=FakeGPUProvider())
    with pytest.raises(NoCapacity, match="Ask for another type"):
        await experiment(inner=inner).forecast(10, request=PodRequest(("H900",)))


async def test_the_slots_of_this_machine() -> None:
    one, four = [
        await experiment(inner=ata.job_runner("embedded", slots=slots)).forecast(10, minutes_per_job=1)
        for slots in (1, 4)
    ]
    assert one.hours.expected == pytest.approx(4 * four.hours.expected)


def test_it_blocks_for_scripts() -> None:
    assert experiment().forecast_sync(10).episodes == 248


async def test_a_resumed_run_forecasts_what_is_ahead_from_its_own_jobs(tmp_path: Path) -> None:
    begun = experiment(inner=ata.job_runner("embedded", slots=1))
    store = books(tmp_path / "run", [busy(job, 1.0) for job in range(6)])
    folder = tmp_path / "run"
    (folder / "config.toml").write_text(tomli_w.dumps(begun._config({"steps": 10})))
    store.save_step(0, TrainStep(1, {}), Checkpoint("step-0000", "", 1), 1.0, {})
    store.set_meta(steps=10)
    store.close()
    found = await ata.resume(folder, accept_plugins=True, budget=ata.Budget(usd=10.0)).forecast()
    assert (found.steps, found.left) == (9, 4.0)
    assert "own 6 jobs" in found.basis["minutes per job"]
