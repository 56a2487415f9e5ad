"""Money that was spent: the cost table of a run's books, and the books against the bill."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ai_trains_ai as ata
from ai_trains_ai.fleet.costs import reconcile
from ai_trains_ai.records import Charge, Episode, Money, Offer, Rental
from ai_trains_ai.report.costs import BREAKDOWNS, Costs, costs_of
from ai_trains_ai.store import RunFolder, Store

H100, A40 = Offer("h100", "H100", 1, 3.6, slots=2), Offer("a40", "A40", 1, 0.4)
FAMILIES = {"sums-2": "sums", "hops-3": "hops"}


def episode(number: int, group: str, task: str) -> Episode:
    return Episode(f"{group}e{number}", group, task, number, "finished", "", (), (), (), 1, 1, job_id=f"job-{number}")


def books(folder: Path, charges: Sequence[Charge], families: dict[str, str] | None = FAMILIES) -> Store:
    """A run whose jobs 0 and 1 are of step 0, 2 of step 1, and 3 of the first probe, on two pods."""
    place = RunFolder(folder)
    place.create({})
    store = Store.create(place.database)
    store.set_meta(steps=2, **({} if families is None else {"families": families}))
    for group, phase, step, task, jobs in (
        ("s0000g0", "train", 0, "sums-2", (0, 1)),
        ("s0001g0", "train", 1, "hops-3", (2,)),
        ("probe-before-0000g0", "probe-before", 0, "hops-3", (3,)),
    ):
        store.save_group(group, phase, step, 0, task)
        for job in jobs:
            store.save_episode(episode(job, group, task), "submitted" if job == 2 else "finished")
    store.save_rentals(
        Rental("pod-h", "Fake", H100, "ended", 0.0, 0.0, "h"), Rental("pod-a", "Fake", A40, "ended", 0.0, 0.0, "a")
    )
    store.save_charges([(0.0, charge) for charge in charges])
    return store


def busy(job: int, usd: float, pod: str = "pod-h") -> Charge:
    return Charge("busy", f"job-{job}", 60.0, "seconds", usd, pod)


CHARGES = [
    Charge("boot", "pod-h", 100.0, "seconds", 1.0, "pod-h"),
    busy(0, 2.0),
    busy(1, 3.0),
    busy(2, 4.0, "pod-a"),
    busy(3, 1.0),
    Charge("idle", "pod-a", 10.0, "seconds", 1.5, "pod-a"),
    Charge("tokens", "outer policy", 1000.0, "tokens", 0.5),
]


@pytest.fixture
def costs(tmp_path: Path) -> Costs:
    return costs_of(books(tmp_path / "run", CHARGES))


def test_by_kind(costs: Costs) -> None:
    assert costs.kind == {"boot": 1.0, "busy": 10.0, "idle": 1.5, "tokens": 0.5}


def test_by_step_with_what_belongs_to_no_job(costs: Costs) -> None:
    assert costs.step == {
        "step 0": 5.0,
        "step 1": 4.0,
        "probe-before": 1.0,
        "no job: boot": 1.0,
        "no job: idle": 1.5,
        "no job: tokens": 0.5,
    }


def test_by_family(costs: Costs) -> None:
    assert (costs.family["sums"], costs.family["hops"]) == (5.0, 5.0)


def test_a_run_that_did_not_keep_its_families_shows_tasks(tmp_path: Path) -> None:
    costs = costs_of(books(tmp_path / "run", CHARGES, families=None))
    assert (costs.family["sums-2"], costs.family["hops-3"]) == (5.0, 5.0)


def test_by_gpu_type_of_the_pod_that_was_rented(costs: Costs) -> None:
    assert costs.gpu == {"H100": 7.0, "A40": 5.5, "no pod: tokens": 0.5}


def test_overhead_is_spread_over_busy_dollars(costs: Costs) -> None:
    assert costs.all_in == pytest.approx({"job-0": 2.5, "job-1": 3.75, "job-2": 5.0, "job-3": 1.25})


def test_all_in_dollars_of_the_jobs_are_the_machines(costs: Costs) -> None:
    assert sum(costs.all_in.values()) == pytest.approx(costs.machines)


def test_dollars_per_job_are_all_in(costs: Costs) -> None:
    assert costs.usd_per_job == pytest.approx(12.5 / 4)


def test_a_run_that_spent_nothing(tmp_path: Path) -> None:
    costs = costs_of(books(tmp_path / "run", ()))
    assert (costs.total, costs.usd_per_job, costs.sentence()) == (0, None, "Nothing was spent.")


def test_a_job_tried_twice_is_one_job(tmp_path: Path) -> None:
    costs = costs_of(books(tmp_path / "run", [busy(0, 1.0), busy(0, 2.0, "pod-a")]))
    assert (costs.jobs, costs.job) == (1, {"job-0": 3.0})


charge = st.builds(
    Charge,
    st.sampled_from(["busy", "boot", "idle", "failed", "tokens", "storage"]),
    st.sampled_from(["job-0", "job-1", "job-2", "job-3", "job-unknown", "pod-h", "pod-a"]),
    st.just(1.0),
    st.just("seconds"),
    st.floats(0, 1e4),
    st.sampled_from(["", "pod-h", "pod-a", "pod-unknown"]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(charge, max_size=12))
def test_every_breakdown_adds_up_to_the_total(tmp_path_factory: pytest.TempPathFactory, charges: list[Charge]) -> None:
    store = books(tmp_path_factory.mktemp("books") / "run", charges)
    costs = costs_of(store)
    store.close()
    for what in BREAKDOWNS:
        assert sum(costs.by(what).values()) == pytest.approx(costs.total), what


def test_a_run_shows_its_costs(tmp_path: Path) -> None:
    books(tmp_path / "run", CHARGES).close()
    costs = ata.open_run(tmp_path / "run").costs
    assert repr(costs) == "Costs($13.00: boot $1.00, busy $10.00, idle $1.50, tokens $0.5000; 4 jobs)"


def test_a_notebook_gets_a_table_of_escaped_names(tmp_path: Path) -> None:
    store = books(tmp_path / "run", [busy(0, 1.0)], families={"sums-2": "<b>sums</b>"})
    html = costs_of(store)._repr_html_()
    assert "&lt;b&gt;sums" in html


# ---------------------------------------------------------------------------------------------- the bill

PODS = [Rental("p0", "Fake", H100, "ended", 0.0, 0.0, "h0"), Rental("p1", "Fake", H100, "ended", 0.0, 0.0, "h1")]


def test_a_provider_without_a_bill_gives_no_reconciliation() -> None:
    assert reconcile(1.0, None, PODS, 5.0) is None


def test_one_poll_interval_a_pod_may_be_missing() -> None:
    found = reconcile(1.0, Money(1.0), PODS, 50.0)
    assert found is not None
    assert found.tolerance == pytest.approx(2 * 3.6 * 50 / 3600)


def test_one_percent_of_the_bill_may_be_missing() -> None:
    found = reconcile(100.0, Money(100.0), PODS, 5.0)
    assert found is not None
    assert found.tolerance == pytest.approx(1.0)


def test_an_intent_that_led_to_no_pod_allows_for_nothing() -> None:
    found = reconcile(0.0, Money(0.0), [Rental("p0", "Fake", H100, "ended", 0.0, 0.0)], 50.0)
    assert found is not None
    assert found.tolerance == 0


@pytest.mark.parametrize(
    ("billed", "alarm", "says"),
    [(100.5, False, "agree"), (99.5, False, "agree"), (103.0, True, "more is billed"), (90.0, True, "lag by an hour")],
)
def test_the_alarm_says_what_to_think(billed: float, alarm: bool, says: str) -> None:
    found = reconcile(100.0, Money(billed), PODS, 5.0)
    assert found is not None
    assert found.alarm is alarm
    assert says in found.sentence()
