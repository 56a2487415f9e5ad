"""What every provider of machines promises."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import pytest
import pytest_asyncio

from ai_trains_ai.errors import NoCapacity, Transient, TransportError
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.records import Money, Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.testing.expect import no_error, raises

HANG = 120.0  # seconds after which a call that should be over counts as hung

# accepts one connection on a free port, and writes the port's number where the test looks for it
SERVER = """
import os, socket, sys
with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    server.listen()
    with open(sys.argv[1] + ".partial", "w") as file:
        file.write(str(server.getsockname()[1]))
    os.replace(sys.argv[1] + ".partial", sys.argv[1])
    server.settimeout(60)
    with server.accept()[0] as connection:
        connection.sendall(b"reached")
"""


class Rented:
    """Rents for one test, under markers of its own, and ends what it rented."""

    def __init__(self, provider: GPUProvider, request: PodRequest, boot_seconds: float, poll_seconds: float) -> None:
        self._provider, self._request = provider, request
        self._boot_seconds, self._poll_seconds = boot_seconds, poll_seconds
        self.prefix = f"ata-contract-{uuid.uuid4().hex[:8]}"
        self._made: list[str] = []

    async def offers(self) -> Sequence[Offer]:
        return [offer for offer in await self._provider.offers(self._request) if offer.available]

    async def pod(self, marker: str = "") -> Pod:
        """A new pod of the first offer that has one; skips the test when nothing is free now."""
        for offer in await self.offers():
            with contextlib.suppress(NoCapacity):
                pod = await self._provider.create(offer, PodSpec(marker or self.prefix))
                self._made.append(pod.id)
                return pod
        pytest.skip(f"the provider has no machine free for {self._request}")

    async def ready(self) -> Pod:
        """A new pod that can be reached; fails when it doesn't boot in time."""
        pod = await self.pod()
        for _ in range(1 + math.ceil(self._boot_seconds / self._poll_seconds)):
            if pod.status == "ready":
                return pod
            await asyncio.sleep(self._poll_seconds)
            pod = await self._provider.get(pod.id) or pod
        pytest.fail(
            f"{pod.id} is {pod.status} after {self._boot_seconds:g} seconds: raise boot_seconds, or see its logs"
        )

    async def end(self) -> None:
        """Terminate what is left, each pod in a try of its own; never a foreign one, whatever the list says."""
        left: list[str] = []
        try:
            listed = [pod.id for pod in await self._provider.list(self.prefix) if pod.marker.startswith(self.prefix)]
        except Exception as error:
            listed, left = [], [f"whatever is named {self.prefix}… ({error!r})"]
        for pod_id in dict.fromkeys([*self._made, *listed]):
            try:
                pod = await self._provider.get(pod_id)
                if pod is not None and pod.status != "terminated":
                    await self._provider.terminate(pod_id)
            except Exception as error:
                left.append(f"{pod_id} ({error!r})")
        assert not left, f"these could not be terminated and may cost money, end them by hand: {', '.join(left)}"


class GPUProviderContract:
    """Subclass it and give your provider.

    >>> class TestMyProvider(GPUProviderContract):
    ...     request = PodRequest(("RTX 4090",))
    ...     boot_seconds = 300.0
    ...
    ...     @pytest.fixture
    ...     def provider(self):
    ...         return MyProvider(key="…")

    Against a real service it rents machines for real, a few dozen for a minute each, and ends every one that it made,
    also when a test fails: run it against a stand-in of the service, and against the service once a release. Commands
    are those of any Linux machine.

    Attributes:
        request: the kind of machine to rent: the cheapest that you have.
        boot_seconds: longest time that a machine may take to become ready.
        poll_seconds: time between two looks at a booting machine.
        folder: a folder of the machine that commands may write into.
        python: a Python of the machine, which listens on a port for the test of `Transport.forward`; ``None`` leaves
            that test out.
    """

    request: ClassVar[PodRequest] = PodRequest()
    boot_seconds: ClassVar[float] = 600.0
    poll_seconds: ClassVar[float] = 0.05
    folder: ClassVar[str] = "/tmp"
    python: ClassVar[str | None] = "python3"

    @pytest.fixture
    def provider(self) -> GPUProvider:
        raise NotImplementedError("override the fixture 'provider' and return your GPUProvider")

    @pytest_asyncio.fixture
    async def rented(self, provider: GPUProvider) -> AsyncIterator[Rented]:
        """Rents for the test, and ends what it rented."""
        rented = Rented(provider, self.request, self.boot_seconds, self.poll_seconds)
        yield rented
        await rented.end()

    @pytest_asyncio.fixture
    async def machine(self, provider: GPUProvider, rented: Rented) -> AsyncIterator[Transport]:
        """A way into a ready pod."""
        transport = await provider.connect(await rented.ready())
        yield transport
        await transport.close()

    @pytest_asyncio.fixture
    async def place(self, machine: Transport) -> AsyncIterator[str]:
        """An empty folder on the machine, not made yet."""
        path = f"{self.folder}/ata-contract-{uuid.uuid4().hex[:8]}"
        yield path
        await machine.run(["rm", "-rf", path])

    # -------------------------------------------------------------------------------------- offers

    @pytest.mark.asyncio
    async def test_there_are_offers_for_the_request(self, provider: GPUProvider) -> None:
        assert await provider.offers(self.request), f"no offer for {self.request}: set 'request' to what you have"

    @pytest.mark.asyncio
    async def test_an_offer_has_a_price_per_hour(self, provider: GPUProvider) -> None:
        for offer in await provider.offers(self.request):
            assert _is_price(offer.usd_per_hour), f"{offer.id}: usd_per_hour is a finite number of dollars, 0 for free"

    @pytest.mark.asyncio
    async def test_an_offer_has_a_slot(self, provider: GPUProvider) -> None:
        for offer in await provider.offers(self.request):
            assert offer.slots >= 1, f"{offer.id}: an offer holds at least one job at a time"

    @pytest.mark.asyncio
    async def test_offers_have_ids_of_their_own(self, provider: GPUProvider) -> None:
        ids = [offer.id for offer in await provider.offers(self.request)]
        assert len(set(ids)) == len(ids), "two offers share an id, so a caller can't choose between them"

    @pytest.mark.asyncio
    async def test_offers_are_of_the_wanted_kind(self, provider: GPUProvider) -> None:
        for kind in {offer.gpu_type for offer in await provider.offers(self.request)}:
            wanted = PodRequest((kind,), self.request.count, self.request.cloud)
            kinds = {offer.gpu_type for offer in await provider.offers(wanted)}
            assert kinds <= {kind}, f"gpu_types=({kind!r},) asks for these and no others"

    @pytest.mark.asyncio
    async def test_a_kind_that_nobody_has_gives_no_offers(self, provider: GPUProvider) -> None:
        offers = await provider.offers(PodRequest(("no such GPU",)))
        assert not offers, "offers() is empty when there is none of the wanted kind; it neither raises nor substitutes"

    # -------------------------------------------------------------------------------------- pods

    @pytest.mark.asyncio
    async def test_a_pod_carries_its_marker(self, rented: Rented) -> None:
        pod = await rented.pod()
        assert pod.marker == rented.prefix, "PodSpec.marker becomes the pod's name: a lost create is found by it"

    @pytest.mark.asyncio
    async def test_a_pod_carries_the_price_that_is_charged(self, provider: GPUProvider, rented: Rented) -> None:
        free = all(offer.usd_per_hour == 0 for offer in await rented.offers())
        price = (await rented.pod()).offer.usd_per_hour
        assert _is_price(price), "Pod.offer.usd_per_hour is a finite number of dollars"
        assert free or price > 0, "Pod.offer carries the price that is really charged; this pod seems to be free"

    @pytest.mark.asyncio
    async def test_a_pod_is_found_by_its_id(self, provider: GPUProvider, rented: Rented) -> None:
        pod = await rented.pod()
        found = await provider.get(pod.id)
        assert found is not None, "get() doesn't know a pod that create() returned"
        assert (found.id, found.marker) == (pod.id, pod.marker), "get() returned another pod"

    @pytest.mark.asyncio
    async def test_a_pod_is_listed_by_the_start_of_its_marker(self, provider: GPUProvider, rented: Rented) -> None:
        pod = await rented.pod(f"{rented.prefix}-0")
        listed = [pod.id for pod in await provider.list(rented.prefix)]
        assert listed == [pod.id], "list(marker) gives every pod whose marker starts with it, each once"

    @pytest.mark.asyncio
    async def test_a_list_leaves_out_foreign_pods(self, provider: GPUProvider, rented: Rented) -> None:
        await rented.pod(f"{rented.prefix}-other")
        mine = f"{rented.prefix}-mine"
        pod = await rented.pod(f"{mine}-0")
        listed = [pod.id for pod in await provider.list(mine)]
        assert set(listed) <= {pod.id}, "list() gave a pod of another marker: the fleet would end somebody else's work"

    @pytest.mark.asyncio
    async def test_two_markers_are_two_pods(self, rented: Rented) -> None:
        one, other = await rented.pod(f"{rented.prefix}-0"), await rented.pod(f"{rented.prefix}-1")
        assert one.id != other.id, "each create() rents a machine with an id of its own"

    @pytest.mark.asyncio
    async def test_an_id_that_never_was_is_none(self, provider: GPUProvider) -> None:
        assert await provider.get("no-such-pod") is None, "get() gives None for a pod that never was"

    @pytest.mark.asyncio
    async def test_a_terminated_pod_is_no_longer_listed(self, provider: GPUProvider, rented: Rented) -> None:
        pod = await rented.pod()
        await provider.terminate(pod.id)
        assert not await provider.list(rented.prefix), "list() gives pods that still cost money, and this one was ended"

    @pytest.mark.asyncio
    async def test_a_terminated_pod_is_gone_or_says_so(self, provider: GPUProvider, rented: Rented) -> None:
        pod = await rented.pod()
        await provider.terminate(pod.id)
        found = await provider.get(pod.id)
        assert found is None or found.status == "terminated", "get() gives None, or the status 'terminated'"

    @pytest.mark.asyncio
    async def test_terminating_twice_is_success(self, provider: GPUProvider, rented: Rented) -> None:
        pod = await rented.pod()
        await provider.terminate(pod.id)
        with no_error("terminate() of a pod that is gone is success: the fleet calls it again after a lost answer"):
            await provider.terminate(pod.id)

    @pytest.mark.asyncio
    async def test_terminating_what_never_was_is_success(self, provider: GPUProvider) -> None:
        with no_error("terminate() of a pod that never was is success"):
            await provider.terminate("no-such-pod")

    @pytest.mark.asyncio
    async def test_terminating_at_once_is_success(self, provider: GPUProvider, rented: Rented) -> None:
        pod = await rented.pod()
        with no_error("calls may run at once; terminate() twice at the same time is success"):
            await asyncio.gather(*(provider.terminate(pod.id) for _ in range(3)))

    @pytest.mark.asyncio
    async def test_pods_are_made_at_once(self, provider: GPUProvider, rented: Rented) -> None:
        markers = [f"{rented.prefix}-{number}" for number in range(3)]
        made = await asyncio.gather(*(rented.pod(marker) for marker in markers), return_exceptions=True)
        for pod in made:
            if isinstance(pod, BaseException):
                raise pod
        listed = [pod.marker for pod in await provider.list(rented.prefix)]
        assert sorted(listed) == markers, "calls may run at once; of three pods made together some got lost"

    @pytest.mark.asyncio
    async def test_logs_are_lines_of_text(self, provider: GPUProvider, rented: Rented) -> None:
        pod = await rented.pod()

        async def read() -> list[str]:
            lines = []
            async for line in provider.logs(pod.id):
                lines.append(line)
                if len(lines) == 20:  # logs may go on for as long as the pod lives
                    break
            return lines

        lines: list[str] = []
        with contextlib.suppress(TimeoutError):
            lines = await asyncio.wait_for(read(), 10)
        odd = [line for line in lines if not isinstance(line, str) or "\n" in line]
        assert not odd, "logs() yields text line by line, without the ends of lines"

    @pytest.mark.asyncio
    async def test_the_bill_is_money_or_unknown(self, provider: GPUProvider) -> None:
        bill = await provider.billed(datetime.now(UTC) - timedelta(hours=1))
        if bill is not None:
            assert isinstance(bill, Money), "billed() gives Money, or None where the service has no bill"
            assert _is_price(bill.usd), "billed() is a finite number of dollars since a moment, never negative"

    @pytest.mark.asyncio
    async def test_closing_twice(self, provider: GPUProvider) -> None:
        await provider.close()
        with no_error("close() is idempotent"):
            await provider.close()

    # -------------------------------------------------------------------------------------- the way in

    @pytest.mark.asyncio
    async def test_nobody_gets_into_a_pod_that_is_gone(self, provider: GPUProvider, rented: Rented) -> None:
        pod = await rented.ready()
        await provider.terminate(pod.id)
        with raises(Transient, "connect() raises Transient when the pod can't be reached: this one was terminated"):
            await provider.connect(pod)

    @pytest.mark.asyncio
    async def test_a_command_gives_its_exit_status(self, machine: Transport) -> None:
        statuses = [(await machine.run(["sh", "-c", f"exit {status}"]))[0] for status in (0, 3)]
        assert statuses == [0, 3], "run() gives the command's own exit status"

    @pytest.mark.asyncio
    async def test_a_command_gives_both_of_its_streams(self, machine: Transport) -> None:
        _, output = await machine.run(["sh", "-c", "echo out; echo err >&2"])
        assert sorted(output.split()) == [b"err", b"out"], "run() gives standard output and standard error together"

    @pytest.mark.asyncio
    async def test_arguments_pass_no_shell(self, machine: Transport) -> None:
        odd = "a  b; echo $HOME 'quoted' \"twice\" `date` *\n\\n"
        _, output = await machine.run(["printf", "%s", odd])
        assert output == odd.encode(), "run() takes argv as it is: quote it where a shell is on the way"

    @pytest.mark.asyncio
    async def test_a_program_that_does_not_exist_is_status_127(self, machine: Transport) -> None:
        status, _ = await machine.run(["no-such-program"])
        assert status == 127, "run() gives 127 for a program that doesn't exist, as a shell does"

    @pytest.mark.asyncio
    async def test_time_that_ran_out_is_no_status(self, machine: Transport) -> None:
        status, _ = await asyncio.wait_for(machine.run(["sleep", "600"], timeout=0.1), HANG)
        assert status is None, "run() gives None when the timeout ran out: nobody knows how the command ends"

    @pytest.mark.asyncio
    async def test_the_command_reads_its_input(self, machine: Transport) -> None:
        data = bytes(range(256)) * 400
        _, output = await asyncio.wait_for(machine.run(["cat"], stdin=data), HANG)
        whole = output == data  # apart: in CI pytest would write out the difference, for minutes
        assert whole, f"run() gives the command all of stdin, byte by byte, and then its end; got {len(output)} bytes"

    @pytest.mark.asyncio
    async def test_a_command_without_input_reads_its_end(self, machine: Transport) -> None:
        status, output = await machine.run(["cat"], timeout=HANG)
        assert (status, output) == (0, b""), "a command that reads its input must not wait for ever when there is none"

    @pytest.mark.asyncio
    async def test_commands_run_at_once(self, machine: Transport, place: str) -> None:
        # each waits for the other's file: one after the other they would never end
        first = ["sh", "-c", f"mkdir -p {place}; touch {place}/a; until [ -e {place}/b ]; do sleep 0.05; done; echo a"]
        second = ["sh", "-c", f"mkdir -p {place}; touch {place}/b; until [ -e {place}/a ]; do sleep 0.05; done; echo b"]
        outputs = await asyncio.gather(machine.run(first, timeout=10), machine.run(second, timeout=10))
        assert outputs == [(0, b"a\n"), (0, b"b\n")], "several calls may run at once, each with its own output"

    @pytest.mark.asyncio
    async def test_files_come_back_as_they_were_put(self, machine: Transport, place: str) -> None:
        files = {"a.bin": bytes(range(256)), "deep/er/b.txt": "é\r\n".encode(), "empty": b""}
        await machine.put(files, place)
        found = {path: await machine.get(f"{place}/{path}", 256) for path in files}
        assert found == files, "put() makes the folders that it needs and keeps every byte; get() takes 'limit' bytes"

    @pytest.mark.asyncio
    async def test_put_replaces_a_file_whole(self, machine: Transport, place: str) -> None:
        await machine.put({"a.txt": b"long and old"}, place)
        await machine.put({"a.txt": b"new"}, place)
        assert await machine.get(f"{place}/a.txt", 100) == b"new", "put() replaces a file whole"

    @pytest.mark.asyncio
    async def test_put_leaves_other_files_alone(self, machine: Transport, place: str) -> None:
        await machine.put({"a.txt": b"a"}, place)
        await machine.put({"b.txt": b"b"}, place)
        _, output = await machine.run(["ls", place])
        assert output.split() == [b"a.txt", b"b.txt"], "put() writes the named files, and leaves nothing else behind"

    @pytest.mark.asyncio
    async def test_a_file_over_the_limit_is_refused(self, machine: Transport, place: str) -> None:
        await machine.put({"a.txt": b"12345"}, place)
        with raises(TransportError, "get() raises TransportError for a file larger than the limit, rather than cut it"):
            await machine.get(f"{place}/a.txt", 4)

    @pytest.mark.asyncio
    async def test_a_missing_file_is_refused(self, machine: Transport, place: str) -> None:
        with raises(TransportError, "get() raises TransportError for a file that isn't there: a retry would not help"):
            await machine.get(f"{place}/nothing", 4)

    @pytest.mark.asyncio
    async def test_a_tail_starts_at_its_offset(self, machine: Transport, place: str) -> None:
        await machine.put({"log": b"0123456789"}, place)
        assert await machine.tail(f"{place}/log", 4) == b"456789", "tail() gives the bytes from 'offset' on"

    @pytest.mark.asyncio
    async def test_a_tail_ends_at_its_limit(self, machine: Transport, place: str) -> None:
        await machine.put({"log": b"0123456789"}, place)
        assert await machine.tail(f"{place}/log", 4, 3) == b"456", "tail() gives the first 'limit' bytes from 'offset'"

    @pytest.mark.asyncio
    async def test_a_tail_is_empty_at_the_end(self, machine: Transport, place: str) -> None:
        await machine.put({"log": b"0123456789"}, place)
        found = [await machine.tail(f"{place}/log", offset) for offset in (10, 99)]
        assert found == [b"", b""], "tail() gives nothing at the end of the file and behind it"

    @pytest.mark.asyncio
    async def test_a_tail_is_empty_where_no_file_is_yet(self, machine: Transport, place: str) -> None:
        with no_error("tail() gives nothing where the file isn't there yet: a log appears when its program starts"):
            found = await machine.tail(f"{place}/nothing", 0)
        assert found == b"", "tail() gives nothing where the file isn't there yet"

    @pytest.mark.asyncio
    async def test_a_forwarded_port_leads_to_the_machine(self, machine: Transport, place: str) -> None:
        if self.python is None:
            pytest.skip("python is None: nothing listens on the machine")
        await machine.put({"server.py": SERVER.encode()}, place)
        command = [self.python, f"{place}/server.py", f"{place}/port"]
        serving = asyncio.create_task(machine.run(command, timeout=HANG))
        try:
            while not (port := await machine.tail(f"{place}/port", 0)):
                assert not serving.done(), f"the machine can't run the server: {serving.result()}; set 'python'"
                await asyncio.sleep(self.poll_seconds)
            async with machine.forward(int(port)) as here:
                reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", here), HANG)
                answer = await asyncio.wait_for(reader.read(), HANG)
                writer.close()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        assert answer == b"reached", "forward() gives a port on 127.0.0.1 here that leads to the machine's own"

    @pytest.mark.asyncio
    async def test_closing_a_transport_twice(self, machine: Transport) -> None:
        await machine.close()
        with no_error("Transport.close() is idempotent"):
            await machine.close()


def _is_price(usd: float) -> bool:
    return math.isfinite(usd) and usd >= 0
