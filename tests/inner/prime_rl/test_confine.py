"""The wall around an agent's code on the pod: what it may do, what it may not, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ai_trains_ai.inner.prime_rl.pod import confine
from ai_trains_ai.inner.prime_rl.pod.confine import Confined, Limits, Wall, memory_of, probe, start
from ai_trains_ai.inner.prime_rl.pod.process import alive, tree
from ai_trains_ai.inner.prime_rl.pod.surroundings import answers, free_port
from ai_trains_ai.sandbox import kernel

PYTHON = "/usr/bin/python3"  # one that other users can run, which that of the tests may be not
UID = 64_100 + os.getpid() % 1000  # tests beside each other end each other's processes by their user
ROOT = os.geteuid() == 0

pytestmark = [
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"there is no {PYTHON}"),
    pytest.mark.skipif(kernel.landlock_version() < 4, reason="the kernel has no Landlock that knows ports"),
]


class Service:
    """Somebody who listens outside and says what he hears in capitals."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.server.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    @staticmethod
    def _answer(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                client.sendall(data.upper())


class Host:
    """Starts programs behind walls, and sees to it that they end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.service, self.forbidden, self.port = Service(), Service(), free_port()
        self.started: list[Confined] = []

    def start(self, wall: Wall, script: str, **options: Any) -> Confined:
        child = start(
            wall,
            [PYTHON, "-c", script, str(self.port), str(self.service.port), str(self.forbidden.port)],
            env={"PATH": "/usr/bin:/bin", "HOME": "/", **options.pop("env", {})},
            cwd=Path("/"),
            log=self.log,
            visible=[],
            listen_port=self.port,
            connect_port=self.service.port,
            **options,
        )
        self.started.append(child)
        return child

    def run(self, wall: Wall, script: str, **options: Any) -> str:
        child = self.start(wall, script, **options)
        until(lambda: child.poll() is not None)
        return self.log.read_text()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    for child in host.started:
        child.kill()
    host.service.server.close()
    host.forbidden.server.close()


def until(holds: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.01)
    return found


TIERS = [
    Wall(UID if ROOT else 0, network, private)
    for network in ("namespace", "ports", "calls")
    for private in (True, False)
]
NAMES = [f"{wall.network}{'-private' if wall.private_files else ''}" for wall in TIERS]

TRIES = """
import ctypes, json, os, signal, socket, sys, tempfile
own, service, forbidden = map(int, sys.argv[1:4])
def tried(act):
    try: return [True, repr(act())[:80]]
    except BaseException as error: return [False, f"{type(error).__name__}: {error}"]
def talk(port):
    with socket.create_connection(("127.0.0.1", port), 5) as s:
        s.sendall(b"hello"); return s.recv(10)
def loopback():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5) as client:
        return server.accept()[1] == client.getsockname()
def unix():
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(folder + "/s"); server.listen()
        with socket.socket(socket.AF_UNIX) as client: return client.connect(folder + "/s") is None
def listen(port):
    with socket.create_server(("127.0.0.1", port)): return port
def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *arguments) < 0: raise OSError(ctypes.get_errno(), "refused")
acts = {
    "talk to the service": lambda: talk(service),
    "listen on its port": lambda: listen(own),
    "a loopback of its own": loopback,
    "a unix socket": unix,
    "ask for its interfaces": lambda: socket.if_nameindex() and socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "write below /tmp": lambda: open(tempfile.mkdtemp() + "/x", "w").write("x"),
    "talk to another port": lambda: talk(forbidden),
    "listen on the engine's port": lambda: listen(int(os.environ["OTHER"])),
    "UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "IPv6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM),
    "a raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "another netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9),
    "a packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "DNS": lambda: socket.getaddrinfo("example.org", 80),
    "read a file of root": lambda: open(os.environ["SECRET"]).read(),
    "read the environment of root": lambda: open(f"/proc/{os.environ['PID']}/environ").read(),
    "write to root's folder": lambda: open(os.environ["SECRET"] + ".mine", "w"),
    "end a process of root": lambda: os.kill(int(os.environ["PID"]), signal.SIGTERM),
    "trace a process of root": lambda: call(101, 16, int(os.environ["PID"]), 0, 0),
    "become root": lambda: os.setuid(0) if os.getuid() else call(-1),
    "a namespace": lambda: call(272, 0x10000000),
    "many open files": lambda: [open("/dev/null") for _ in range(40_000)],
    "a large file": lambda: open("/tmp/large", "w").truncate(1 << 40),
}
print(json.dumps({name: tried(act) for name, act in acts.items()}))
"""
ALLOWED = (
    "talk to the service",
    "listen on its port",
    "a loopback of its own",
    "a unix socket",
    "ask for its interfaces",
    "write below /tmp",
)
ROOTS_OWN = (  # of another user alone
    "read a file of root",
    "read the environment of root",
    "write to root's folder",
    "become root",
)


def outcome(host: Host, wall: Wall) -> Mapping[str, list[Any]]:
    secret = host.folder / "secret"
    secret.write_text("key")
    secret.chmod(0o600)
    low = next(port for port in range(20_000, 30_000) if not answers(port))
    variables = {"SECRET": str(secret), "PID": str(os.getpid()), "OTHER": str(low)}
    found: dict[str, list[Any]] = json.loads(host.run(wall, TRIES, env=variables).splitlines()[-1])
    (host.folder / "secret.mine").unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("wall", TIERS, ids=NAMES)
def test_what_is_allowed_works_and_the_rest_is_refused(host: Host, wall: Wall) -> None:
    found = outcome(host, wall)
    assert {name: found[name] for name in ALLOWED if not found[name][0]} == {}
    expected = set(ALLOWED) | (set() if wall.uid else set(ROOTS_OWN))
    if wall.network == "namespace":
        expected |= {"listen on the engine's port"}  # of its own network: nobody outside sees it
    if wall.network == "ports" and host.forbidden.port >= 32_768:
        expected |= {"talk to another port"}  # high ports stay reachable, and the guarantee says so
    if wall.network == "calls":
        expected |= {"talk to another port", "listen on the engine's port"}
    assert {name: found[name] for name in found if found[name][0] and name not in expected} == {}


def test_landlock_refuses_low_ports(host: Host) -> None:
    low = next(port for port in range(20_000, 30_000) if not answers(port))
    with socket.create_server(("127.0.0.1", low)):
        said = host.run(
            Wall(0, "ports", False), f"import socket; socket.create_connection(('127.0.0.1', {low}), 5); print('in')"
        )
    assert "PermissionError" in said


@pytest.mark.parametrize("wall", TIERS, ids=NAMES)
def test_its_port_is_reached_from_outside(host: Host, wall: Wall) -> None:
    script = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        with server.accept()[0] as client: client.sendall(client.recv(100)[::-1])
"""
    host.start(wall, script)

    def ask() -> bytes:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", host.port), 5) as client:
            client.sendall(b"abc")
            return client.recv(100)
        return b""

    assert until(ask) == b"cba"


def test_the_relay_carries_much_at_a_time_and_half_closed_connections(host: Host) -> None:
    script = """
import socket, sys, threading
total = []
def one():
    with socket.create_connection(("127.0.0.1", int(sys.argv[2])), 30) as s:
        threading.Thread(target=lambda: (s.sendall(b"a" * 100_000), s.shutdown(socket.SHUT_WR))).start()
        said = b""
        while data := s.recv(1 << 16): said += data
        total.append(said == b"A" * 100_000)
threads = [threading.Thread(target=one) for _ in range(100)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(total), all(total))
"""
    assert host.run(Wall(UID if ROOT else 0, "namespace", False), script).split() == ["100", "True"]


@pytest.mark.parametrize("wall", TIERS[::2], ids=NAMES[::2])
def test_processes_start_others_and_nothing_is_left_after_its_end(host: Host, wall: Wall) -> None:
    script = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: print(os.getpid(), flush=True)
        time.sleep(600)
time.sleep(600)
"""
    child = host.start(wall, script)
    until(lambda: len(tree(child.pid)) >= 3 and len(host.log.read_text().split()) == 2)
    orphans = [int(line) for line in host.log.read_text().split()]
    assert memory_of([child.pid]) > 1 << 20
    child.kill()
    assert child.poll() is not None
    assert [pid for pid in orphans if alive(pid)] == []


@pytest.mark.skipif(not ROOT, reason="only root can use another user")
def test_an_orphan_of_its_user_is_ended_too(host: Host) -> None:
    script = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    print(os.getpid(), flush=True)\n    time.sleep(600)"
    )
    child = host.start(Wall(UID, "calls", False), script)
    until(lambda: child.poll() is not None and host.log.read_text().strip())
    assert alive(int(host.log.read_text()))
    child.kill()
    assert not alive(int(host.log.read_text()))


def test_it_sees_no_variable_of_its_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "secret")
    said = host.run(Wall(0, "calls", False), "import os; print(sorted(os.environ))", env={"MINE": "1"})
    assert [name for name in json.loads(said.replace("'", '"')) if name not in ("LC_CTYPE",)] == [
        "HOME",
        "MINE",
        "PATH",
    ]


@pytest.mark.skipif(not ROOT, reason="only root can use another user")
def test_it_can_start_so_many_processes_and_no_more(host: Host) -> None:
    script = """
import subprocess
try:
    for _ in range(50): subprocess.Popen(["sleep", "60"])
except OSError as error: print(error)
"""
    assert "unavailable" in host.run(Wall(UID, "calls", False), script, limits=Limits(processes=20))


def test_a_wall_that_can_not_be_put_up_runs_nothing(host: Host) -> None:
    child = host.start(Wall(0, "calls", False), "print('ran')", limits=Limits(open_files=-2))
    until(lambda: child.poll() is not None)
    assert child.poll() == confine.FAILED
    said = host.log.read_text()
    assert "The wall can't be put up" in said
    assert "ran" not in said


class TestProbe:
    @pytest.mark.skipif(not ROOT, reason="only root can have it all")
    def test_it_finds_the_strongest_wall(self) -> None:
        wall = probe(PYTHON, UID)
        assert (wall.uid, wall.notes) == (UID, ())
        assert wall.text() == f"env server: user {UID}, {confine.SAID[wall.network]}, its own /tmp"

    def test_it_says_why_a_user_of_its_own_can_not_be_had(self, tmp_path: Path) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o700)
        shutil.copy(PYTHON, closed / "python")
        wall = probe(str(closed / "python"), UID)
        assert wall.uid == 0
        assert (
            f"another user can't run {closed}/python" in wall.text() if ROOT else "not started by root" in wall.text()
        )

    def test_what_a_host_forbids_is_left_out_and_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        checks = {**confine.CHECKS, "namespace": "import sys; sys.exit('forbidden here')"}
        monkeypatch.setattr(confine, "CHECKS", checks)
        wall = probe(PYTHON, 0)
        assert wall.network == "ports"
        assert "no 'namespace': forbidden here" in wall.text()

    def test_without_anything_it_still_has_a_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(confine, "CHECKS", dict.fromkeys(confine.NETWORKS, "import sys; sys.exit('no')"))
        assert probe(PYTHON, 0).text().startswith("env server: the engine's user, the network of the pod")
