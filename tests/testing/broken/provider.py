"""Providers with one fault each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ai_trains_ai.errors import ProviderError, Transient, TransportError
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.providers.local import LocalTransport
from ai_trains_ai.records import Money, Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.testing import FakeGPUProvider, GPUProviderContract


class Contract(GPUProviderContract):
    """The fixture returns an instance of ``broken``, whose transports are of ``shell`` where that is given."""

    fails: set[str] = set()
    broken: type[FakeGPUProvider] = FakeGPUProvider
    shell: Callable[[], Transport] | None = None

    @pytest.fixture
    def provider(self) -> GPUProvider:
        shell = type(self).shell
        if shell is None:
            return self.broken()

        class WithShell(self.broken):  # type: ignore[misc, name-defined]
            async def connect(self, pod: Pod) -> Transport:
                self.require_reachable(pod.id)
                return shell()

        return WithShell()


class TestWhole(Contract):
    """What the others break."""


# ------------------------------------------------------------------------------------------ offers


class TestNothingToRent(Contract):
    """It reads an empty request as a wish for no machine."""

    fails = {"test_there_are_offers_for_the_request"}  # with nothing to rent, the others are skipped

    class broken(FakeGPUProvider):
        async def offers(self, request: PodRequest) -> Sequence[Offer]:
            return []


class TestUnknownPrice(Contract):
    """The service doesn't tell a price, so the offer carries none."""

    fails = {"test_an_offer_has_a_price_per_hour", "test_a_pod_carries_the_price_that_is_charged"}

    @pytest.fixture
    def provider(self) -> GPUProvider:
        return FakeGPUProvider([Offer("spot", "H100", 1, float("nan"))])


class TestNoSlots(Contract):
    """It counts what is free now as slots."""

    fails = {"test_an_offer_has_a_slot"}

    @pytest.fixture
    def provider(self) -> GPUProvider:
        return FakeGPUProvider([Offer("h100", "H100", 1, 3.6, slots=0)])


class TestOneIdForAll(Contract):
    """The id of an offer is its data centre."""

    fails = {"test_offers_have_ids_of_their_own"}

    @pytest.fixture
    def provider(self) -> GPUProvider:
        return FakeGPUProvider([Offer("eu", "H100", 1, 3.6), Offer("eu", "A100", 1, 1.8)])


class TestOffersEverything(Contract):
    """It forgets to filter by type."""

    fails = {"test_offers_are_of_the_wanted_kind", "test_a_kind_that_nobody_has_gives_no_offers"}

    class broken(FakeGPUProvider):
        async def offers(self, request: PodRequest) -> Sequence[Offer]:
            return await super().offers(PodRequest())


class TestUnknownKindRaises(Contract):
    """It passes on the service's complaint about a type that it doesn't know."""

    fails = {"test_a_kind_that_nobody_has_gives_no_offers"}

    class broken(FakeGPUProvider):
        async def offers(self, request: PodRequest) -> Sequence[Offer]:
            if found := await super().offers(request):
                return found
            raise ProviderError("400: gpuTypeIds must be one of …")


# ------------------------------------------------------------------------------------------ pods


class TestIgnoresTheMarker(Contract):
    """The service names the pod."""

    fails = {
        "test_a_pod_carries_its_marker",
        "test_a_pod_is_listed_by_the_start_of_its_marker",
        "test_pods_are_made_at_once",
    }

    class broken(FakeGPUProvider):
        async def create(self, offer: Offer, spec: PodSpec) -> Pod:
            return await super().create(offer, PodSpec("brave-otter"))


class TestForgetsThePrice(Contract):
    """The pod is made up from the answer to create, which says nothing of money."""

    fails = {"test_a_pod_carries_the_price_that_is_charged"}

    class broken(FakeGPUProvider):
        async def create(self, offer: Offer, spec: PodSpec) -> Pod:
            return await super().create(evolve(offer, usd_per_hour=0.0), spec)


class TestKnowsNoNewPod(Contract):
    """It reads a cache that a create doesn't refresh."""

    fails = {"test_a_pod_is_found_by_its_id"}

    class broken(FakeGPUProvider):
        async def get(self, pod_id: str) -> Pod | None:
            return None


class TestListsTheWholeMarkerAlone(Contract):
    """It asks the service for an exact name."""

    fails = {"test_a_pod_is_listed_by_the_start_of_its_marker", "test_pods_are_made_at_once"}

    class broken(FakeGPUProvider):
        async def list(self, marker: str) -> Sequence[Pod]:
            return [pod for pod in await super().list(marker) if pod.marker == marker]


class TestListsForeignPods(Contract):
    """It lists the account."""

    fails = {
        "test_a_pod_is_listed_by_the_start_of_its_marker",
        "test_a_list_leaves_out_foreign_pods",
        "test_a_terminated_pod_is_no_longer_listed",
        "test_pods_are_made_at_once",
    }

    class broken(FakeGPUProvider):
        async def list(self, marker: str) -> Sequence[Pod]:
            return await super().list("")


class TestReusesAPod(Contract):
    """A create that finds a pod gives that one."""

    fails = {"test_two_markers_are_two_pods", "test_pods_are_made_at_once"}

    class broken(FakeGPUProvider):
        async def create(self, offer: Offer, spec: PodSpec) -> Pod:
            for marker in self.alive:
                (found,) = await self.list(marker)
                self._rented[found.id].pod = evolve(found, marker=spec.marker)
                return evolve(found, marker=spec.marker)
            return await super().create(offer, spec)


class TestUnknownIdRaises(Contract):
    """It passes on the service's 404."""

    fails = {"test_an_id_that_never_was_is_none"}

    class broken(FakeGPUProvider):
        async def get(self, pod_id: str) -> Pod | None:
            if pod_id not in self._rented:
                raise ProviderError("404")
            return await super().get(pod_id)


class TestListsTheDead(Contract):
    """The service lists a terminated pod for a while, and so does it."""

    fails = {"test_a_terminated_pod_is_no_longer_listed"}

    class broken(FakeGPUProvider):
        async def list(self, marker: str) -> Sequence[Pod]:
            return [self._seen(rented) for rented in self._rented.values() if rented.pod.marker.startswith(marker)]


class TestTheDeadAreReady(Contract):
    """It shows the state that it saw last."""

    fails = {"test_a_terminated_pod_is_gone_or_says_so"}

    class broken(FakeGPUProvider):
        async def get(self, pod_id: str) -> Pod | None:
            found = await super().get(pod_id)
            rented = self._rented.get(pod_id)
            return evolve(rented.pod, status="ready") if found is None and rented is not None else found


class TestTerminatesOnce(Contract):
    """It passes on the service's 404 for a pod that is gone."""

    fails = {"test_terminating_twice_is_success", "test_terminating_at_once_is_success"}

    class broken(FakeGPUProvider):
        async def terminate(self, pod_id: str) -> None:
            if pod_id in self._rented and self._rented[pod_id].until is not None:
                raise ProviderError("404")
            await super().terminate(pod_id)


class TestTerminatesWhatItKnows(Contract):
    """It looks a pod up in what it made itself."""

    fails = {"test_terminating_what_never_was_is_success"}

    class broken(FakeGPUProvider):
        async def terminate(self, pod_id: str) -> None:
            _ = self._rented[pod_id]
            await super().terminate(pod_id)


class TestTerminatesInTurn(Contract):
    """Its connection takes one termination at a time."""

    fails = {"test_terminating_at_once_is_success"}

    class broken(FakeGPUProvider):
        busy = False

        async def terminate(self, pod_id: str) -> None:
            if self.busy:
                raise Transient("another request is in flight")
            self.busy = True
            await asyncio.sleep(0)
            self.busy = False
            await super().terminate(pod_id)


class TestCreatesInTurn(Contract):
    """Of several creates the newest wins."""

    fails = {"test_pods_are_made_at_once"}

    class broken(FakeGPUProvider):
        async def create(self, offer: Offer, spec: PodSpec) -> Pod:
            self._spec = spec
            await asyncio.sleep(0)
            return await super().create(offer, self._spec)


class TestLogsAreOneText(Contract):
    """It yields the log as the service sends it."""

    fails = {"test_logs_are_lines_of_text"}

    class broken(FakeGPUProvider):
        async def logs(self, pod_id: str) -> AsyncIterator[str]:
            yield "\n".join([line async for line in super().logs(pod_id)])


class TestTheBillIsABalance(Contract):
    """It takes the account's balance for the bill, and that falls."""

    fails = {"test_the_bill_is_money_or_unknown"}

    class broken(FakeGPUProvider):
        async def billed(self, since: datetime, pod_ids: Any = None) -> Money | None:
            return Money(-12.5)


class TestClosesOnce(Contract):
    """It drops its connection at close, and then misses it."""

    fails = {"test_closing_twice"}

    class broken(FakeGPUProvider):
        async def close(self) -> None:
            del self.stock


# ------------------------------------------------------------------------------------------ the way in


class TestOpensADoorToNowhere(Contract):
    """It connects at the first command only, and to whatever the pod was."""

    fails = {"test_nobody_gets_into_a_pod_that_is_gone"}

    class broken(FakeGPUProvider):
        async def connect(self, pod: Pod) -> Transport:
            return LocalTransport()


class Shell(LocalTransport):
    """Runs what `command` makes of argv, and gives what `result` makes of its end."""

    def command(self, argv: Sequence[str]) -> Sequence[str]:
        return argv

    def result(self, status: int | None, output: bytes) -> tuple[int | None, bytes]:
        return status, output

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> tuple[int | None, bytes]:
        return self.result(*await super().run(self.command(argv), stdin=stdin, timeout=timeout))


def _exists(path: str) -> bool:
    return Path(path).exists()


def _read(folder: str, path: str) -> bytes:
    return Path(folder, path).read_bytes() if Path(folder, path).exists() else b""


class TestStatusOfAShell(Contract):
    """It gives the status of the last thing that its own wrapper did."""

    fails = {"test_a_command_gives_its_exit_status"}

    class shell(Shell):
        def result(self, status: int | None, output: bytes) -> tuple[int | None, bytes]:
            return 0 if status not in (None, 127) else status, output


class TestDropsErrors(Contract):
    """It reads standard output alone."""

    fails = {"test_a_command_gives_both_of_its_streams"}

    class shell(Shell):
        def command(self, argv: Sequence[str]) -> Sequence[str]:
            return ("sh", "-c", 'exec "$@" 2>/dev/null', "sh", *argv)


class TestJoinsArguments(Contract):
    """It sends a line to the shell of the machine, unquoted."""

    fails = {
        "test_arguments_pass_no_shell",
        "test_a_command_gives_its_exit_status",
        "test_a_command_gives_both_of_its_streams",
        "test_commands_run_at_once",
    }

    class shell(Shell):
        def command(self, argv: Sequence[str]) -> Sequence[str]:
            return ("sh", "-c", " ".join(argv))


class TestMissingProgramRaises(Contract):
    """It lets the error of the operating system out."""

    fails = {"test_a_program_that_does_not_exist_is_status_127"}

    class shell(Shell):
        def result(self, status: int | None, output: bytes) -> tuple[int | None, bytes]:
            if status == 127:
                raise FileNotFoundError(output)
            return status, output


class TestLostIsSuccess(Contract):
    """A connection that ended without a status counts as exit 0."""

    fails = {"test_time_that_ran_out_is_no_status"}

    class shell(Shell):
        def result(self, status: int | None, output: bytes) -> tuple[int | None, bytes]:
            return status or 0, output


class TestInputIsText(Contract):
    """It encodes the input once more."""

    fails = {"test_the_command_reads_its_input"}

    class shell(LocalTransport):
        async def run(self, argv: Sequence[str], *, stdin: bytes = b"", **options: Any) -> tuple[int | None, bytes]:
            return await super().run(argv, stdin=stdin.decode("utf-8", "replace").encode(), **options)


class TestInputStaysOpen(Contract):
    """It never ends the input of a command that was given none."""

    fails = {"test_a_command_without_input_reads_its_end"}

    class shell(LocalTransport):
        async def run(self, argv: Sequence[str], *, stdin: bytes = b"", **options: Any) -> tuple[int | None, bytes]:
            if list(argv) == ["cat"] and not stdin:
                return None, b""  # what waiting for the timeout comes to
            return await super().run(argv, stdin=stdin, **options)


class TestOneCommandAtATime(Contract):
    """It reads the answers of all commands off one connection, in the order in which they end."""

    fails = {"test_commands_run_at_once"}

    class shell(LocalTransport):
        def __init__(self) -> None:
            self.waiting: list[tuple[int | None, bytes]] = []

        async def run(self, *arguments: Any, **options: Any) -> tuple[int | None, bytes]:
            self.waiting.append(await super().run(*arguments, **options))
            await asyncio.sleep(0.2)  # long enough for the other to end
            return self.waiting.pop()


class TestTextFiles(Contract):
    """It writes files in text mode."""

    fails = {"test_files_come_back_as_they_were_put"}

    class shell(LocalTransport):
        async def put(self, files: Mapping[str, bytes], folder: str) -> None:
            await super().put({path: data.replace(b"\r\n", b"\n") for path, data in files.items()}, folder)


class TestOverwritesTheBeginning(Contract):
    """It opens a file without truncating it."""

    fails = {"test_put_replaces_a_file_whole"}

    class shell(LocalTransport):
        async def put(self, files: Mapping[str, bytes], folder: str) -> None:
            old = {path: _read(folder, path) for path in files}
            await super().put({path: data + old[path][len(data) :] for path, data in files.items()}, folder)


class TestReplacesTheFolder(Contract):
    """It unpacks an archive over a fresh folder."""

    fails = {"test_put_leaves_other_files_alone"}

    class shell(LocalTransport):
        async def put(self, files: Mapping[str, bytes], folder: str) -> None:
            await self.run(["rm", "-rf", folder])
            await super().put(files, folder)


class TestCutsFiles(Contract):
    """It cuts a file at the limit."""

    fails = {"test_a_file_over_the_limit_is_refused"}

    class shell(LocalTransport):
        async def get(self, path: str, limit: int) -> bytes:
            return (await super().get(path, 1 << 20))[:limit]


class TestMissingIsTransient(Contract):
    """It takes a missing file for a connection that will come back."""

    fails = {"test_a_missing_file_is_refused"}

    class shell(LocalTransport):
        async def get(self, path: str, limit: int) -> bytes:
            if not _exists(path):
                raise Transient(path)
            return await super().get(path, limit)


class TestTailsFromTheStart(Contract):
    """It sends the whole log every time."""

    fails = {"test_a_tail_starts_at_its_offset", "test_a_tail_ends_at_its_limit", "test_a_tail_is_empty_at_the_end"}

    class shell(LocalTransport):
        async def tail(self, path: str, offset: int, limit: int = 1 << 20) -> bytes:
            return await super().tail(path, 0, limit)


class TestTailsWithoutLimit(Contract):
    """It ignores the limit."""

    fails = {"test_a_tail_ends_at_its_limit"}

    class shell(LocalTransport):
        async def tail(self, path: str, offset: int, limit: int = 1 << 20) -> bytes:
            return await super().tail(path, offset)


class TestTailsFromTheEnd(Contract):
    """Behind the end it starts over, as for a log that was rotated."""

    fails = {"test_a_tail_is_empty_at_the_end"}

    class shell(LocalTransport):
        async def tail(self, path: str, offset: int, limit: int = 1 << 20) -> bytes:
            return await super().tail(path, offset, limit) or await super().tail(path, 0, limit)


class TestTailNeedsItsFile(Contract):
    """A log that isn't there yet is an error; so the forwarded server's port is never read either."""

    fails = {"test_a_tail_is_empty_where_no_file_is_yet", "test_a_forwarded_port_leads_to_the_machine"}

    class shell(LocalTransport):
        async def tail(self, path: str, offset: int, limit: int = 1 << 20) -> bytes:
            if not _exists(path):
                raise TransportError(f"{path} is not there.")
            return await super().tail(path, offset, limit)


class TestForwardsToNobody(Contract):
    """It forwards to a port of its own choice."""

    fails = {"test_a_forwarded_port_leads_to_the_machine"}

    class shell(LocalTransport):
        @contextlib.asynccontextmanager
        async def forward(self, port: int) -> AsyncIterator[int]:
            yield 1


class TestTransportClosesOnce(Contract):
    """It closes a connection that is gone."""

    fails = {"test_closing_a_transport_twice"}

    class shell(LocalTransport):
        closed = 0

        async def close(self) -> None:
            self.closed += 1
            if self.closed == 2:
                raise TransportError("closed already")
