"""Machines and money on the command line. The provider is a fake that a run's configuration names by "module:attr"."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from attrs import evolve

import ai_trains_ai as ata
from ai_trains_ai import cli
from ai_trains_ai.cli import machines
from ai_trains_ai.configuration import describe
from ai_trains_ai.errors import Forbidden, Transient
from ai_trains_ai.fleet import upkeep
from ai_trains_ai.records import Charge, Lease, Offer, Pod, PodSpec, Rental
from ai_trains_ai.session import marker_of
from ai_trains_ai.store import RunFolder, Store
from ai_trains_ai.testing import FakeClock, FakeGPUProvider

SHOP = "shop_of_the_test:PROVIDER"
HOUR = 3600.0
H100 = Offer("h100", "H100", 1, 3.6, slots=2)

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def type_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Types a command, and gives its exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ai-trains-ai", *arguments])
        monkeypatch.setattr(upkeep, "PAUSE", 0.0)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out, err

    return run


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> FakeGPUProvider:
    """A shop whose clock a test sets back, so that pods are as old as it wants."""
    module = ModuleType("shop_of_the_test")
    shop = FakeGPUProvider([H100, Offer("a100", "A100", 1, 1.8)], clock=FakeClock(time.time()))
    module.PROVIDER = shop  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return shop


class Books:
    """A run folder and its store."""

    def __init__(self, path: Path, inner: object) -> None:
        self.folder = RunFolder(path)
        self.folder.create({"steps": 1, "parts": {"inner": describe(inner)}})
        self.store = Store.create(self.folder.database)
        self.marker = marker_of(self.store)

    def rent(self, shop: FakeGPUProvider, name: str = "0", hours: float = 1.0, state: str = "alive") -> Pod:
        """A pod that was rented so many hours ago, and is in the books."""
        begun = time.time() - hours * HOUR
        pod = rent(shop, f"{self.marker}-{name}", begun)
        self.store.save_rentals(Rental(pod.marker, "FakeGPUProvider", pod.offer, state, begun, begun, pod.id))  # type: ignore[arg-type]
        return pod


def rent(shop: FakeGPUProvider, marker: str, begun: float | None = None) -> Pod:
    """A pod that is in no book."""
    assert isinstance(shop.clock, FakeClock)
    shop.clock.now = time.time() if begun is None else begun
    pod = asyncio.run(shop.create(H100, PodSpec(marker)))
    shop.clock.now = time.time()
    return pod


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Books]:
    books = Books(tmp_path / "run", ata.job_runner("embedded", provider=SHOP))
    yield books
    books.store.close()


@pytest.mark.parametrize("verb", [("offers",), ("fleet", "status"), ("fleet", "reap"), ("fleet", "cost")])
def test_help(type_: Cli, verb: tuple[str, ...]) -> None:
    assert f"Example: ai-trains-ai {' '.join(verb)}" in type_(*verb, "--help")[1]


# ---------------------------------------------------------------------------------------------- offers


def test_offers_cheapest_first(type_: Cli, provider: FakeGPUProvider) -> None:
    code, out, _ = type_("offers", "--provider", SHOP, "--json")
    assert code == 0
    assert [(offer["id"], offer["usd_per_hour"]) for offer in json.loads(out)] == [("a100", 1.8), ("h100", 3.6)]


def test_offers_of_some_types(type_: Cli, provider: FakeGPUProvider) -> None:
    _, out, _ = type_("offers", "--provider", SHOP, "--gpu", "H100", "--gpu", "H200")
    assert "1 × H100" in out
    assert "A100" not in out


def test_no_such_offer(type_: Cli, provider: FakeGPUProvider) -> None:
    code, out, err = type_("offers", "--provider", SHOP, "--count", "8")
    assert (code, out) == (0, "")
    assert "Ask for other types" in err


def test_a_markup_in_a_name_is_text(type_: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("shop_of_the_test")
    module.PROVIDER = FakeGPUProvider([Offer("[red]x[/red]", "H100", 1, 1.0)])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "[red]x[/red]" in type_("offers", "--provider", SHOP)[1]


def test_offers_of_all_providers_name_those_that_can_t_be_asked(type_: Cli) -> None:
    code, out, err = type_("offers")
    assert code == 0
    assert "local-cpu" in out
    assert "ssh is left out" in err


def test_that_nobody_could_be_asked_is_not_that_there_is_none(type_: Cli) -> None:
    code, out, err = type_("offers", "--gpu", "NVIDIA A40")
    assert (code, out) == (1, "")
    assert "No provider that was asked has such a machine. ssh is left out" in err


def test_a_misspelt_provider(type_: Cli) -> None:
    code, _, err = type_("offers", "--provider", "lokal")
    assert code == 1
    assert "Did you mean 'local'?" in err


def test_a_missing_key(type_: Cli, provider: FakeGPUProvider) -> None:
    provider.faults.append(("offers", Forbidden("There is no key. Set THE_KEY.")))
    assert type_("offers", "--provider", SHOP) == (1, "", "error: There is no key. Set THE_KEY.\n")


# ---------------------------------------------------------------------------------------------- status


def test_status_shows_age_price_and_dollars(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    pod = run.rent(provider, hours=0.5)
    code, out, _ = type_("fleet", "status", str(run.folder.path), "--json")
    (shown,) = json.loads(out)
    assert code == 0
    assert (shown["pod"], shown["id"], shown["state"]) == (pod.marker, pod.id, "ready")
    assert shown["usd"] == pytest.approx(1.8, rel=0.01)
    assert shown["age_seconds"] == pytest.approx(1800, rel=0.01)


def test_status_never_shows_a_foreign_pod(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    run.rent(provider)
    rent(provider, f"{run.marker}beef-0")
    _, out, _ = type_("fleet", "status", str(run.folder.path))
    assert f"{run.marker}-0" in out
    assert "somebody-else" not in out
    assert "beef" not in out


def test_status_tells_jobs_on_a_pod(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    pod = run.rent(provider)
    run.store.save_charges([(0.0, Charge("busy", "job-1", 60.0, "seconds", 0.1, pod.marker))])
    run.store.save_lease(Lease("lease", pod, "job-2", begin=time.time(), seconds=60.0))
    _, out, _ = type_("fleet", "status", str(run.folder.path), "--json")
    (shown,) = json.loads(out)
    assert (shown["jobs_done"], shown["jobs_running"]) == (1, ["job-2"])


def test_status_tells_what_only_the_provider_knows(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    rent(provider, f"{run.marker}-late")
    assert "ready, not in the books" in type_("fleet", "status", str(run.folder.path))[1]


def test_status_tells_what_only_the_books_know(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    provider.lose(run.rent(provider).id)
    assert "not listed" in type_("fleet", "status", str(run.folder.path))[1]


def test_status_of_a_run_without_pods(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    _, out, _ = type_("fleet", "status", str(run.folder.path))
    assert out == "No pod of this run is there.\n0 pods ended, $0.00.\n"


def test_watching_is_plain_lines_without_a_terminal_and_ends_with_ctrl_c(
    type_: Cli, provider: FakeGPUProvider, run: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.rent(provider)
    looks = 0

    async def press(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(machines, "_pause", press)
    code, out, _ = type_("fleet", "status", str(run.folder.path), "--watch")
    assert code == 0
    assert out.count("ready") == 3
    assert "\x1b" not in out


def test_ctrl_c_of_a_watching_process(tmp_path: Path) -> None:
    run = Books(tmp_path / "local", ata.job_runner("embedded", provider="local"))
    run.store.close()
    command = [sys.executable, "-m", "ai_trains_ai.cli", "fleet", "status", str(run.folder.path), "--watch"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "No pod of this run is there.\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (0, "")


def test_a_service_that_fails_for_a_moment_is_watched_on(
    type_: Cli, provider: FakeGPUProvider, run: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.rent(provider)
    looks = 0

    async def press(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            provider.faults.append(("list", Transient("502")))
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(machines, "_pause", press)
    code, out, err = type_("fleet", "status", str(run.folder.path), "--watch")
    assert (code, out.count("ready")) == (0, 2)
    assert "502" in err


# ---------------------------------------------------------------------------------------------- reap


def test_reap_ends_every_pod_of_the_run_and_no_other(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    run.rent(provider, "0")
    run.rent(provider, "1", state="ended")
    rent(provider, f"{run.marker}-late")
    rent(provider, "ata-of-another-run-0")
    code, out, _ = type_("fleet", "reap", str(run.folder.path), "--yes")
    assert code == 0
    assert provider.alive == ["ata-of-another-run-0"]
    assert f"{run.marker}-late is ended" in out


def test_reap_books_what_the_pods_cost(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    run.rent(provider, hours=2.0)
    type_("fleet", "reap", str(run.folder.path), "--yes")
    booked = sum(charge.usd for _, charge in run.store.charges())
    assert booked == pytest.approx(provider.spent, abs=0.01)


def test_reap_books_a_lost_pod_to_when_it_was_last_seen(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    provider.lose(run.rent(provider, hours=2.0).id)
    (rental,) = run.store.rentals()
    run.store.save_rentals(evolve(rental, seen=rental.created + HOUR))
    type_("fleet", "reap", str(run.folder.path), "--yes")
    assert sum(charge.usd for _, charge in run.store.charges()) == pytest.approx(3.6)


def test_reap_books_a_job_that_was_running(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    pod = run.rent(provider, hours=1.0)
    run.store.save_lease(Lease("lease", pod, "job-1", begin=time.time() - HOUR / 2, seconds=60.0))
    type_("fleet", "reap", str(run.folder.path), "--yes")
    kinds = {charge.kind: charge.usd for _, charge in run.store.charges()}
    assert kinds == {"busy": pytest.approx(0.9, abs=0.01), "idle": pytest.approx(2.7, abs=0.01)}


def test_reap_twice_books_once(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    run.rent(provider)
    type_("fleet", "reap", str(run.folder.path), "--yes")
    before = run.store.charges()
    assert type_("fleet", "reap", str(run.folder.path), "--yes")[1] == "No pod of this run is there.\n"
    assert run.store.charges() == before


def test_reap_asks_first(
    type_: Cli, provider: FakeGPUProvider, run: Books, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run.rent(provider)
    answer = tmp_path / "answer"
    answer.write_text("n\n")
    with answer.open() as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        code, out, _ = type_("fleet", "reap", str(run.folder.path))
    assert code == 1
    assert "End this pod?" in out
    assert len(provider.alive) == 1


def test_reap_tries_again(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    run.rent(provider)
    provider.faults += [("terminate", Transient("503"))] * 3
    assert type_("fleet", "reap", str(run.folder.path), "--yes")[0] == 0
    assert not provider.alive


def test_reap_names_what_is_left(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    run.rent(provider, "0")
    run.rent(provider, "1")
    provider.faults += [("terminate", Transient("503"))] * 4
    code, out, err = type_("fleet", "reap", str(run.folder.path), "--yes")
    assert code == 1
    assert f"{run.marker}-0 (503)" in err
    assert f"{run.marker}-1 is ended" in out


def test_a_pod_that_would_not_end_stays_open_in_the_books(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    run.rent(provider)
    provider.faults += [("terminate", Transient("503"))] * 4
    type_("fleet", "reap", str(run.folder.path), "--yes")
    assert [rental.state for rental in run.store.rentals()] == ["alive"]


def test_reap_leaves_a_running_controller_alone_and_names_it(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    run.rent(provider)
    with run.folder.writer():
        code, _, err = type_("fleet", "reap", str(run.folder.path), "--yes")
    assert code == 1
    assert f"Process {os.getpid()} is running" in err or "Another process is running" in err
    assert len(provider.alive) == 1


def test_reap_leaves_pods_of_another_provider_in_the_books(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    run.store.save_rentals(
        Rental(f"{run.marker}-0", "OtherProvider", Offer("x", "H100", 1, 3.6), "alive", 0.0, 0.0, "x")
    )
    code, _, err = type_("fleet", "reap", str(run.folder.path), "--yes")
    assert code == 1
    assert "rented from OtherProvider" in err


# ---------------------------------------------------------------------------------------------- cost


def spent(run: Books, pod: Pod, usd: float = 3.0) -> None:
    run.store.save_charges([
        (0.0, Charge("busy", "job-1", 60.0, "seconds", usd, pod.marker)),
        (0.0, Charge("boot", pod.marker, 60.0, "seconds", 0.6, pod.marker)),
    ])  # fmt: skip


def test_cost_agrees_with_the_bill(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    spent(run, run.rent(provider))
    code, out, _ = type_("fleet", "cost", str(run.folder.path))
    assert code == 0
    assert "they agree" in out


def test_cost_raises_the_alarm(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    spent(run, run.rent(provider), 1.0)
    _, out, _ = type_("fleet", "cost", str(run.folder.path), "--json")
    bill = json.loads(out)["bill"]
    assert bill["alarm"] is True
    assert bill["difference"] == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(
    ("by", "costs"),
    [
        ("kind", {"busy": 3.0, "boot": 0.6}),
        ("job", {"job-1": 3.0, "no job: boot": 0.6}),
        ("step", {"unknown": 3.0, "no job: boot": 0.6}),
        ("family", {"unknown": 3.0, "no job: boot": 0.6}),
        ("gpu", {"H100": 3.6}),
    ],
)
def test_cost_by(type_: Cli, provider: FakeGPUProvider, run: Books, by: str, costs: dict[str, float]) -> None:
    spent(run, run.rent(provider))
    _, out, _ = type_("fleet", "cost", str(run.folder.path), "--by", by, "--json")
    assert json.loads(out)["costs"] == pytest.approx(costs)


def test_cost_by_job_shows_it_all_in(type_: Cli, provider: FakeGPUProvider, run: Books) -> None:
    spent(run, run.rent(provider))
    assert "$3.60" in type_("fleet", "cost", str(run.folder.path), "--by", "job")[1]


def test_cost_without_the_provider_says_why_there_is_no_bill(
    type_: Cli, provider: FakeGPUProvider, tmp_path: Path
) -> None:
    run = Books(tmp_path / "by-hand", ata.job_runner("embedded", provider=provider))
    spent(run, run.rent(provider))
    run.store.close()
    code, out, _ = type_("fleet", "cost", str(run.folder.path))
    assert code == 0
    assert "$3.60 for 1 job," in out
    assert "Not compared with a bill" in out


def test_cost_of_a_run_that_rented_nothing(type_: Cli, run: Books) -> None:
    _, out, _ = type_("fleet", "cost", str(run.folder.path))
    assert out == "Nothing was spent.\nNot compared with a bill: no machine was rented.\n"


# ---------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize("verb", ["status", "reap", "cost"])
def test_no_run_folder(type_: Cli, verb: str) -> None:
    code, _, err = type_("fleet", verb, "no/such/run")
    assert code == 1
    assert err.startswith("error: There is no folder no/such/run")


@pytest.mark.parametrize("verb", ["status", "reap"])
def test_a_provider_that_was_passed_by_hand(type_: Cli, provider: FakeGPUProvider, tmp_path: Path, verb: str) -> None:
    run = Books(tmp_path / "by-hand", ata.job_runner("embedded", provider=provider))
    run.store.close()
    code, _, err = type_("fleet", verb, str(run.folder.path))
    assert code == 1
    assert "passed by hand" in err
    assert "--provider" in err


def test_a_provider_that_was_passed_by_hand_can_be_named(type_: Cli, provider: FakeGPUProvider, tmp_path: Path) -> None:
    run = Books(tmp_path / "by-hand", ata.job_runner("embedded", provider=provider))
    run.rent(provider)
    run.store.close()
    assert type_("fleet", "reap", str(run.folder.path), "--yes", "--provider", SHOP)[0] == 0
    assert not provider.alive


def test_a_run_that_rents_no_machines(type_: Cli, tmp_path: Path) -> None:
    run = Books(tmp_path / "local", ata.job_runner("embedded"))
    run.store.close()
    code, _, err = type_("fleet", "status", str(run.folder.path))
    assert code == 1
    assert "names no provider" in err


def test_a_provider_whose_module_is_gone(type_: Cli, run: Books) -> None:
    code, _, err = type_("fleet", "status", str(run.folder.path))
    assert code == 1
    assert "there is no module 'shop_of_the_test'" in err
    assert "Traceback" not in err


def test_an_unknown_breakdown(type_: Cli, run: Books) -> None:
    assert type_("fleet", "cost", str(run.folder.path), "--by", "color")[0] == 2
