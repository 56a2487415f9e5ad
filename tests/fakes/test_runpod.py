"""The local Runpod behaves as the real one was seen or is documented to; plain HTTP requests, no library in between."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ai_trains_ai.transport.ssh import Host, SSHTransport
from fakes.pods import alive, marked, variant
from fakes.runpod import CAPACITY, Fault, LocalRunpod
from fakes.sshd import QUICK, SSHD, new_key

A40 = "NVIDIA A40"
GUARD = 20.0  # real seconds after which something hangs
POD = {  # what a Pod of REST v2 must have
    *("id", "name", "status", "actions", "image", "args", "disk", "mounts", "ports", "env", "registry", "cloud"),
    *("dataCenterId", "cudaVersion", "ssh", "template", "cost", "locked", "runtime", "createdAt", "startedAt"),
    "globalNetworking",
}
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(unfit, reason=f"no {kind} machines here"))
    for kind, unfit in (("namespace", variant() != "namespace"), ("process", not SSHD), ("asyncssh", False))
]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalRunpod]:
    with LocalRunpod(tmp_path / "cloud", speed=300.0, requests_per_minute=600) as cloud:
        yield cloud


@pytest.fixture
def api(cloud: LocalRunpod) -> Iterator[httpx.Client]:
    with client(cloud) as api:
        yield api


def client(cloud: LocalRunpod, **headers: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {cloud.key}", **headers}
    return httpx.Client(base_url=cloud.url, headers=headers, timeout=GUARD, verify=False)  # no time for certificates


def body(**changes: Any) -> dict[str, Any]:
    return {"name": "pod", "image": "runpod/base", "gpu": {"id": A40, "count": 1}, "ports": ["22/tcp"], **changes}


def create(api: httpx.Client, **changes: Any) -> str:
    reply = api.post("/pods", json=body(**changes))
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


def until(met: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + GUARD
    while not (value := met()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return value


def running(api: httpx.Client, pod: str) -> dict[str, Any]:
    """The pod once its SSH address is known."""

    def ready() -> Any:
        found = api.get(f"/pods/{pod}").json()
        return found if found["ssh"]["direct"] else None

    found: dict[str, Any] = until(ready)
    return found


def detail(reply: httpx.Response) -> tuple[int, str]:
    assert reply.headers["content-type"].startswith("application/problem+json")
    assert reply.json()["status"] == reply.status_code
    return reply.status_code, reply.json()["detail"]


# ---------------------------------------------------------------------------------------------- life of a pod


def test_a_new_pod_is_being_provisioned_and_has_every_field(api: httpx.Client) -> None:
    reply = api.post("/pods", json=body())
    assert (reply.status_code, reply.json()["status"], POD - set(reply.json())) == (201, "PROVISIONING", set())


def test_a_pod_goes_through_its_states_in_order(api: httpx.Client, cloud: LocalRunpod) -> None:
    pod, seen = create(api), []

    def booted() -> bool:
        seen.append(cloud.pods[pod].status)
        return seen[-1] == "RUNNING"

    until(booted)
    assert list(dict.fromkeys(seen)) == ["PROVISIONING", "STARTING", "RUNNING"]


def test_the_price_is_that_of_the_cloud_and_the_count(api: httpx.Client) -> None:
    pod = create(api, cloud="COMMUNITY", gpu={"id": A40, "count": 2})
    assert api.get(f"/pods/{pod}").json()["cost"] == 0.70


def test_a_terminated_pod_is_gone_from_the_list_and_deleting_it_again_is_404(api: httpx.Client) -> None:
    pod = create(api)
    replies = [api.delete(f"/pods/{pod}").status_code, api.delete(f"/pods/{pod}").status_code]
    assert (replies, api.get("/pods").json()["pods"]) == ([204, 404], [])


def test_a_stopped_pod_stays_listed_and_costs_its_disk(api: httpx.Client, cloud: LocalRunpod) -> None:
    pod = create(api)
    running(api, pod)
    api.post(f"/pods/{pod}/action", json={"action": "stop"})
    listed = api.get("/pods").json()["pods"][0]
    assert (listed["status"], listed["cost"], cloud.alive) == ("EXITED", 0.0, ["pod"])
    before = cloud.spent
    until(lambda: cloud.spent > before)


def test_an_action_that_the_status_forbids_is_409(api: httpx.Client) -> None:
    assert api.post(f"/pods/{create(api)}/action", json={"action": "start"}).status_code == 409


def test_two_pods_may_have_one_name(api: httpx.Client) -> None:
    assert create(api) != create(api)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"bogus": 1}, "$: additional properties 'bogus' not allowed"),
        ({"gpu": {"id": A40, "count": 1, "kind": "x"}}, "$.gpu: additional properties 'kind' not allowed"),
        ({"name": ""}, "$.name: must not be empty"),
        ({"gpu": {"id": A40, "count": 0}}, "$.gpu.count: not a valid int"),
        ({"env": {"A": 1}}, "$.env: values must be strings"),
        ({"cloud": "ALL"}, "$.cloud: value must be one of 'SECURE', 'COMMUNITY'"),
    ],
)
def test_a_body_outside_the_schema_is_422_and_says_where(
    api: httpx.Client, changes: dict[str, Any], error: str
) -> None:
    reply = api.post("/pods", json=body(**changes))
    assert (reply.status_code, reply.json()["errors"]) == (422, [error])


def test_a_missing_gpu_count_is_answered_as_if_there_were_no_stock(api: httpx.Client) -> None:
    assert detail(api.post("/pods", json=body(gpu={"id": A40}))) == (400, "no instances available")


def test_stock_is_taken_and_given_back(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.stock = {(A40, "SECURE", "US-KS-2"): 1}
    pod = create(api)
    assert detail(api.post("/pods", json=body())) == (400, CAPACITY)
    api.delete(f"/pods/{pod}")
    create(api)


def test_a_pod_is_placed_where_it_may_be(api: httpx.Client) -> None:
    assert api.get(f"/pods/{create(api, dataCenterIds=['EU-RO-1'])}").json()["dataCenterId"] == "EU-RO-1"


def test_less_than_an_hour_of_credit_is_402(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.balance = 0.40
    assert api.post("/pods", json=body()).status_code == 402


def test_an_empty_balance_ends_every_pod(tmp_path: Path) -> None:
    with LocalRunpod(tmp_path, speed=3000.0, balance=0.5) as cloud, client(cloud) as api:
        create(api)
        cloud.balance = 0.01
        until(lambda: not cloud.alive)


@pytest.mark.parametrize("agent", ["", "Python-urllib/3.11"])
def test_a_client_without_a_name_gets_a_page_instead_of_an_answer(cloud: LocalRunpod, agent: str) -> None:
    with client(cloud, **{"User-Agent": agent}) as api:
        reply = api.get("/pods")
    assert (reply.status_code, "error code: 1010" in reply.text) == (403, True)


def test_a_wrong_key_is_401(cloud: LocalRunpod) -> None:
    with client(cloud, Authorization="Bearer rpa_WRONG") as api:
        assert detail(api.get("/pods"))[0] == 401


def test_every_reply_tells_the_limits(api: httpx.Client) -> None:
    assert api.get("/pods").headers["RateLimit-Policy"] == '"minute";q=600;w=60'


def test_too_many_requests_are_429_until_the_minute_allows_more(tmp_path: Path) -> None:
    with LocalRunpod(tmp_path, speed=1.0, requests_per_minute=2) as cloud, client(cloud) as api:
        replies = [api.get("/pods") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert (replies[2].headers["Retry-After"], replies[2].headers["RateLimit"][:12]) == ("30", '"minute";r=0')


# ---------------------------------------------------------------------------------------------- faults of requests


@pytest.mark.parametrize(
    ("do", "status"),
    [("capacity", 400), ("402", 402), ("403", 403), ("422", 422), ("429", 429), ("500", 500), ("html", 502)],
)
def test_a_refused_create_makes_no_pod_and_the_next_one_works(
    api: httpx.Client, cloud: LocalRunpod, do: str, status: int
) -> None:
    cloud.faults.append(Fault("create", do))
    assert (api.post("/pods", json=body()).status_code, cloud.alive) == (status, [])
    create(api)


@pytest.mark.parametrize(("do", "left"), [("lost_after", ["pod"]), ("lost_before", [])])
def test_a_lost_reply_leaves_a_pod_only_when_it_was_lost_after_the_create(
    api: httpx.Client, cloud: LocalRunpod, do: str, left: list[str]
) -> None:
    cloud.faults.append(Fault("create", do))
    with pytest.raises(httpx.TransportError):
        api.post("/pods", json=body())
    assert cloud.alive == left


def test_a_create_may_fail_with_500_and_still_have_made_a_pod(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("create", "500_after"))
    assert (api.post("/pods", json=body()).status_code, cloud.alive) == (500, ["pod"])


def test_a_duplicated_create_makes_a_second_pod_that_nobody_was_told_of(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("create", "duplicate"))
    create(api)
    assert cloud.alive == ["pod", "pod"]


def test_a_new_pod_may_be_hidden_for_a_while(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("create", "lag", seconds=120))
    pod = create(api)
    assert (api.get("/pods").json()["pods"], api.get(f"/pods/{pod}").status_code) == ([], 404)
    until(lambda: api.get("/pods").json()["pods"])


def test_a_slow_reply_comes_after_the_clients_deadline(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("list", "slow", seconds=5))
    with pytest.raises(httpx.ReadTimeout):
        api.get("/pods", timeout=0.2)


def test_a_fault_waits_for_the_request_that_it_is_for(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("delete", "500"))
    pod = create(api)
    assert [api.delete(f"/pods/{pod}").status_code for _ in range(2)] == [500, 204]


# ---------------------------------------------------------------------------------------------- faults of boots


def test_a_stuck_pod_starts_for_ever(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("boot", "stuck"))
    pod, start = create(api), cloud.clock()
    until(lambda: cloud.clock() > start + 120)
    assert cloud.pods[pod].status == "STARTING"


def test_a_pod_that_can_not_start_says_why_in_its_system_log(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("boot", "error"))
    pod = create(api)
    until(lambda: cloud.pods[pod].status == "ERROR")
    lines = read_log(api, pod, "OCI runtime create failed", source="system")
    assert {line["source"] for line in lines} == {"system"}


def test_a_pod_may_run_and_have_no_address(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("boot", "no_direct"))
    pod = create(api)
    until(lambda: cloud.pods[pod].host_port)
    assert api.get(f"/pods/{pod}").json()["ssh"]["direct"] is None


def test_a_pod_may_end_by_itself(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("boot", "end", at=5))
    create(api)
    until(lambda: not cloud.alive)


def test_a_host_may_be_lost_by_itself(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("boot", "die", at=5))
    pod = create(api)
    until(lambda: cloud.pods[pod].status == "EXITED")


def test_a_port_may_change_by_itself(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.faults.append(Fault("boot", "remap", at=60))
    pod = create(api)
    before = running(api, pod)["ssh"]["direct"]["port"]
    until(lambda: api.get(f"/pods/{pod}").json()["ssh"]["direct"]["port"] != before)


def test_the_log_says_when_the_pod_is_ready(api: httpx.Client) -> None:
    assert (
        "SSH host keys"
        in read_log(api, create(api, env={"PUBLIC_KEY": "ssh-ed25519 AAAA"}), "ready to use")[-2]["line"]
    )


def read_log(api: httpx.Client, pod: str, last: str, **query: str) -> list[dict[str, str]]:
    """The lines of the stream up to the one that holds `last`."""
    lines: list[dict[str, str]] = []
    with api.stream("GET", f"/pods/{pod}/logs", params=query) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                lines.append(json.loads(line.removeprefix("data: ")))
                if last in lines[-1]["line"]:
                    break
    return lines


# ---------------------------------------------------------------------------------------------- catalog and money


def test_the_catalog_knows_stock_and_prices(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.stock = {(A40, "SECURE", "US-KS-2"): 3}
    gpus = api.get("/catalog/gpus", params={"include": "AVAILABILITY", "cloud": "SECURE"}).json()["gpus"]
    found = {gpu["id"]: (gpu["availability"], gpu["price"]["secure"]) for gpu in gpus}
    assert (found[A40], found["NVIDIA RTX A5000"][0]) == (("LOW", 0.49), "NONE")


def test_the_data_centers_know_their_stock(api: httpx.Client, cloud: LocalRunpod) -> None:
    cloud.stock = {(A40, "SECURE", "EU-RO-1"): 7}
    places = api.get("/catalog/datacenters", params={"include": "GPU_AVAILABILITY"}).json()["dataCenters"]
    found = {place["id"]: {gpu["id"]: gpu["availability"] for gpu in place["gpuAvailability"]} for place in places}
    assert (found["EU-RO-1"][A40], found["US-KS-2"][A40]) == ("MEDIUM", "NONE")


def test_a_pod_costs_its_price_from_create_to_end(api: httpx.Client, cloud: LocalRunpod) -> None:
    pod = create(api)
    until(lambda: cloud.pods[pod].status == "RUNNING")
    api.delete(f"/pods/{pod}")
    state = cloud.pods[pod]
    assert state.ended is not None
    assert cloud.spent == pytest.approx((state.ended - state.created) * 0.49 / 3600)


def test_the_bill_of_a_pod_comes_by_the_hour_and_adds_up(tmp_path: Path) -> None:
    with LocalRunpod(tmp_path, speed=20000.0) as cloud, client(cloud) as api:
        pod, start = create(api), cloud.clock()
        create(api, name="other")
        until(lambda: cloud.clock() > start + 2 * 3600)
        api.delete(f"/pods/{pod}")
        bill = api.get("/billing/pods", params={"podId": pod, "bucketSize": "hour"}).json()
        mine = cloud.pods[pod].spent("gpu", 0, cloud.clock())
    assert {record["podId"] for record in bill["records"]} == {pod}
    assert (len(bill["records"]) >= 3, bill["metadata"]["totals"]["totalAmount"]) == (True, pytest.approx(mine))


def test_the_check_at_the_end_finds_a_pod_that_is_left(api: httpx.Client, cloud: LocalRunpod) -> None:
    create(api)
    with pytest.raises(AssertionError, match="still cost money"):
        cloud.assert_clean(cloud.spent)


def test_the_check_at_the_end_finds_wrong_books(api: httpx.Client, cloud: LocalRunpod) -> None:
    api.delete(f"/pods/{create(api)}")
    with pytest.raises(AssertionError, match="booked"):
        cloud.assert_clean(cloud.spent + 0.1)


def test_the_check_at_the_end_finds_a_touched_foreign_pod(api: httpx.Client, cloud: LocalRunpod) -> None:
    foreign = cloud.add_foreign("somebody-elses")
    cloud.assert_clean(0.0)
    api.delete(f"/pods/{foreign}")
    with pytest.raises(AssertionError, match="somebody else"):
        cloud.assert_clean(0.0)


# ---------------------------------------------------------------------------------------------- machines


class Rented:
    """One booted pod, and a way to run commands on it."""

    def __init__(self, cloud: LocalRunpod, api: httpx.Client, key: Path, **changes: Any) -> None:
        self.cloud, self.api, self.key = cloud, api, key
        public = key.with_name("key.pub").read_text()
        self.id = create(api, env={"PUBLIC_KEY": public, "SECRET": "s3cret"}, **changes)
        self.address = running(api, self.id)["ssh"]["direct"]

    def shell(self) -> SSHTransport:
        direct = running(self.api, self.id)["ssh"]["direct"]
        return SSHTransport(Host(direct["host"], direct["port"], getpass.getuser(), str(self.key)), QUICK)

    async def run(self, command: str) -> str:
        shell = self.shell()
        try:
            status, output = await asyncio.wait_for(shell.run(["sh", "-c", command], timeout=GUARD), GUARD)
            assert status == 0, output
            return output.decode().strip()
        finally:
            await shell.close()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture(params=KINDS)
async def rented(request: pytest.FixtureRequest, tmp_path: Path, key: Path) -> AsyncIterator[Rented]:
    with LocalRunpod(tmp_path / "cloud", speed=300.0, kind=request.param, requests_per_minute=600) as cloud:
        with client(cloud) as api:
            yield Rented(cloud, api, key)


JOB = "setsid sh -c 'while :; do sleep 0.05; done' >/dev/null 2>&1 </dev/null & echo $!"


async def test_a_pods_end_ends_its_detached_jobs(rented: Rented) -> None:
    await rented.run(JOB)
    assert marked(rented.id)
    rented.api.delete(f"/pods/{rented.id}")
    assert (rented.cloud.processes, marked(rented.id)) == ([], [])


async def test_a_lost_host_breaks_what_runs_on_it(rented: Rented) -> None:
    shell = rented.shell()
    waiting = asyncio.ensure_future(shell.run(["sh", "-c", 'echo yes >"$HOME/started"; sleep 100'], timeout=GUARD))
    await rented.run('while [ ! -f "$HOME/started" ]; do sleep 0.05; done')
    rented.cloud.kill(rented.id)
    assert (await asyncio.wait_for(waiting, GUARD))[0] is None
    await shell.close()


async def test_a_frozen_pod_is_silent_and_goes_on_when_thawed(rented: Rented) -> None:
    shell = rented.shell()
    assert (await shell.run(["true"], timeout=GUARD))[0] == 0
    rented.cloud.freeze(rented.id)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(shell.run(["true"]), 0.5)
    rented.cloud.thaw(rented.id)
    await shell.close()
    assert await rented.run("echo back") == "back"


async def test_a_remapped_pod_keeps_its_jobs_and_has_another_port(rented: Rented) -> None:
    job, before = await rented.run(JOB), rented.address["port"]
    rented.cloud.remap(rented.id)
    assert rented.cloud.pods[rented.id].host_port != before
    assert await rented.run(f"kill -0 {job} && echo alive") == "alive"


async def test_sessions_know_the_root_for_jobs_and_nothing_of_the_pods_environment(rented: Rented) -> None:
    told = await rented.run('mkdir -p "$AITA_WORKDIR" && echo "$AITA_WORKDIR$SECRET$RUNPOD_API_KEY"')
    assert told == rented.cloud.root(rented.id)
    assert (rented.cloud.pods[rented.id].workspace / "ai-trains-ai").is_dir()


async def test_the_pods_environment_lies_in_a_file_beside_the_root(rented: Rented) -> None:
    told = await rented.run('. "$(dirname "$AITA_WORKDIR")/rp_environment"; echo "$RUNPOD_POD_ID $SECRET"')
    assert told == f"{rented.id} s3cret"


async def test_the_pods_own_key_may_end_the_pod_and_nothing_else(cloud: LocalRunpod, api: httpx.Client) -> None:
    mine, other = create(api), create(api)
    with client(cloud, Authorization=f"Bearer {cloud.pod_key(cloud.pods[mine])}") as own:
        replies = [own.get("/pods"), own.delete(f"/pods/{other}"), own.delete(f"/pods/{mine}")]
    assert [reply.status_code for reply in replies] == [403, 403, 204]


async def test_the_canary_sees_the_rented_gpus(cloud: LocalRunpod, api: httpx.Client, key: Path) -> None:
    pod = Rented(cloud, api, key, gpu={"id": A40, "count": 2})
    assert [line.split(":")[0] for line in (await pod.run("nvidia-smi -L")).splitlines()] == ["GPU 0", "GPU 1"]


async def test_the_canary_answers_queries(cloud: LocalRunpod, api: httpx.Client, key: Path) -> None:
    fields = "driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    told = await Rented(cloud, api, key).run(f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits")
    assert told == "570.124.06, 49152, 1, 0"


async def test_a_fault_gives_fewer_gpus_than_were_rented(cloud: LocalRunpod, api: httpx.Client, key: Path) -> None:
    cloud.faults.append(Fault("boot", "gpus", count=1))
    pod = Rented(cloud, api, key, gpu={"id": A40, "count": 2})
    assert len((await pod.run("nvidia-smi -L")).splitlines()) == 1


@pytest.mark.parametrize("changes", [{"fault": True}, {"args": "sleep infinity"}])
async def test_ssh_may_be_refused_by_a_pod_that_runs(
    cloud: LocalRunpod, api: httpx.Client, key: Path, changes: dict[str, Any]
) -> None:
    if changes.pop("fault", False):
        cloud.faults.append(Fault("boot", "refuse"))
    pod = Rented(cloud, api, key, **changes)
    port = until(lambda: cloud.pods[pod.id].host_port)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


# ---------------------------------------------------------------------------------------------- the SDK's side


def ask(cloud: LocalRunpod, query: str) -> Any:
    headers = {"Authorization": f"Bearer {cloud.key}"}
    return httpx.post(f"{cloud.graphql_url}/graphql", json={"query": query}, headers=headers, verify=False).json()


DEPLOY = """mutation { podFindAndDeployOnDemand(input: { name: "pod", imageName: "i", cloudType: ALL, startSsh: true,
gpuTypeId: "NVIDIA A40", gpuCount: 1, dataCenterId: null, dockerArgs: "", env: [{ key: "A", value: "%s" }] })
{ id imageName env machineId machine { podHostId } } }"""


def test_the_sdks_create_answers_what_was_asked_and_no_price(cloud: LocalRunpod) -> None:
    pod = ask(cloud, DEPLOY % "1")["data"]["podFindAndDeployOnDemand"]
    assert (set(pod), pod["env"]) == ({"id", "imageName", "env", "machineId", "machine"}, ["A=1"])


def test_the_sdk_sees_a_pod_without_runtime_until_it_runs(cloud: LocalRunpod) -> None:
    pod = ask(cloud, DEPLOY % "1")["data"]["podFindAndDeployOnDemand"]["id"]
    told = ask(
        cloud, f'query pod {{ pod(input: {{podId: "{pod}"}}) {{ desiredStatus runtime {{ ports {{ ip }} }} }} }}'
    )
    assert told["data"]["pod"] == {"desiredStatus": "RUNNING", "runtime": None}


def test_a_quote_in_a_value_breaks_the_sdks_document(cloud: LocalRunpod) -> None:
    assert ask(cloud, DEPLOY % 'a"b')["errors"][0]["message"].startswith("Something went wrong")


def test_a_second_terminate_is_refused_by_name(cloud: LocalRunpod, api: httpx.Client) -> None:
    query = f'mutation {{ podTerminate(input: {{ podId: "{create(api)}" }}) }}'
    assert ask(cloud, query)["data"] == {"podTerminate": None}
    assert ask(cloud, query)["errors"][0]["message"] == "pod not found to terminate"


def test_the_balance_is_known_to_graphql_only(cloud: LocalRunpod) -> None:
    assert ask(cloud, "query { myself { clientBalance } }")["data"]["myself"]["clientBalance"] == 50.0


# ---------------------------------------------------------------------------------------------- a process of its own


class Served:
    """A cloud in a process of its own, a child of a shell, with one pod."""

    def __init__(self, folder: Path, key: Path) -> None:
        ready, root = folder / "ready.json", Path(__file__).parents[2]
        command = [sys.executable, "-m", "fakes.runpod", "--folder", str(folder / "cloud"), "--speed", "300"]
        self.shell = subprocess.Popen(
            ["sh", "-c", '"$@" & wait', "sh", *command, "--ready", str(ready)],
            env={**os.environ, "PYTHONPATH": f"{root / 'tests'}:{root}"},
        )
        until(ready.exists)
        self.told = json.loads(ready.read_text())
        headers = {"Authorization": f"Bearer {self.told['key']}"}
        with httpx.Client(base_url=self.told["url"], headers=headers, timeout=GUARD, verify=False) as api:
            self.pod = create(api, env={"PUBLIC_KEY": key.with_name("key.pub").read_text()})
            running(api, self.pod)

    def admin(self, **words: Any) -> Any:
        return httpx.post(f"{self.told['graphql_url']}/_admin", json=words, verify=False).json()


@pytest.fixture
def served(tmp_path: Path, key: Path) -> Iterator[Served]:
    served = Served(tmp_path, key)
    yield served
    with contextlib.suppress(ProcessLookupError):
        os.kill(served.told["pid"], signal.SIGTERM)
    served.shell.wait(GUARD)
    until(lambda: not alive(served.told["pid"]))


def test_a_cloud_of_its_own_has_a_side_door(served: Served) -> None:
    state = served.admin(end=served.pod)
    assert (state["alive"], state["processes"]) == ([], [])


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGKILL, marks=pytest.mark.skipif(variant() != "namespace", reason="needs namespaces")),
    ],
)
def test_a_cloud_that_ends_takes_its_pods_along(served: Served, number: signal.Signals) -> None:
    until(lambda: marked(served.pod))
    os.kill(served.told["pid"], number)
    until(lambda: not marked(served.pod))


def test_a_cloud_ends_with_its_parent(served: Served) -> None:
    until(lambda: marked(served.pod))
    served.shell.kill()
    until(lambda: not marked(served.pod))
