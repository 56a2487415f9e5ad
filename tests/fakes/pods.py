"""The machines behind the local cloud's pods: SSH servers whose processes can be killed, frozen, moved to another port.

Three variants. "namespace" (root): sshd in a PID and mount namespace of its own with a private /workspace; killing the
namespace's first process ends everything in it, detached jobs too. "process": sshd as an ordinary process; what it
started is found by a marker in its environment. "asyncssh": no sshd at all, an asyncssh server in the cloud's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncssh

from fakes.sshd import SSHD, configure, free_port, new_key, tree

MARKER = "LOCAL_RUNPOD_POD"  # names a pod's processes, also those that left its tree
WORKSPACE = Path("/workspace")  # where Runpod's images keep their work

NVIDIA_SMI = r"""#!/bin/sh
# what the canary asks of the real tool: -L, --query-gpu=... --format=csv[,noheader][,nounits], or the table
gpus() { i=0; while [ $i -lt @COUNT@ ]; do echo $i; i=$((i + 1)); done; }
query= format=
for argument; do
  case $argument in
    -L) for i in $(gpus); do echo "GPU $i: @NAME@ (UUID: GPU-@ID@-$i)"; done; exit 0;;
    --query-gpu=*) query=${argument#*=};;
    --format=*) format=${argument#*=};;
  esac
done
mib=" MiB"
case $format in *nounits*) mib=;; esac
if [ -z "$query" ]; then
  echo "| NVIDIA-SMI @DRIVER@    Driver Version: @DRIVER@    CUDA Version: @CUDA@ |"
  for i in $(gpus); do echo "|   $i  @NAME@      @USED@MiB / @MEMORY@MiB |      0%      Default |"; done
  exit 0
fi
case $format in *noheader*) ;; *) echo "$query" | sed 's/,/, /g';; esac
for i in $(gpus); do
  line=
  for name in $(echo "$query" | tr ',' ' '); do
    case $name in
      index) value=$i;; count) value=@COUNT@;; name|gpu_name) value="@NAME@";; uuid|gpu_uuid) value="GPU-@ID@-$i";;
      driver_version) value=@DRIVER@;; memory.total) value="@MEMORY@$mib";; memory.used) value="@USED@$mib";;
      memory.free) value="$((@MEMORY@ - @USED@))$mib";; ecc.errors.uncorrected*) value=@ECC@;; utilization.*) value=0;;
      temperature.gpu) value=31;; compute_cap) value=8.9;;
      *) echo "Field \"$name\" is not a valid field to query."; exit 2;;
    esac
    line="${line:+$line, }$value"
  done
  echo "$line"
done
"""


@functools.cache
def variant() -> str:
    """The most faithful kind of machine that can be had here."""
    if not SSHD:
        return "asyncssh"
    probe = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL", "true"]
    try:
        return "namespace" if subprocess.run(probe, capture_output=True, timeout=20).returncode == 0 else "process"
    except (OSError, subprocess.TimeoutExpired):
        return "process"


def marked(*pod_ids: str) -> list[int]:
    """The living processes of these pods, by the marker in their environment."""
    marks, found = {f"{MARKER}={pod_id}".encode() for pod_id in pod_ids}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may end while it is looked at, or be somebody else's
                if marks.intersection((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def path_of_a_pod(bin_folder: Path) -> str:
    """`PATH` with the pod's programs first, and without the virtual environment of whoever runs the tests: a torch in
    it would see no GPU."""
    ours = os.environ.get("PATH", "/usr/bin:/bin").split(":")
    return ":".join([str(bin_folder), *(part for part in ours if not Path(part, "../pyvenv.cfg").exists())])


class Machine:
    """One pod's host. `folder` becomes its disk; `env` is what the container sees and, as there, SSH sessions don't."""

    def __init__(
        self, folder: Path, pod_id: str, authorized: str, env: Mapping[str, str], smi: Mapping[str, str]
    ) -> None:
        self.folder, self.pod_id, self.port = folder, pod_id, free_port()
        self.workspace = folder / "workspace"
        for name in ("home", "bin", "workspace"):
            (folder / name).mkdir(parents=True)
        self.fingerprint = new_key(folder / "host").get_fingerprint()
        (folder / "authorized").write_text(authorized.rstrip() + "\n")
        script = NVIDIA_SMI
        for name, value in smi.items():
            script = script.replace(f"@{name}@", value)
        (folder / "bin/nvidia-smi").write_text(script)
        (folder / "bin/nvidia-smi").chmod(0o755)
        visible = {name: value for name, value in env.items() if name != "PUBLIC_KEY"}
        self.env = {**visible, "AITA_WORKDIR": self.root}
        lines = [f'export {name}="{value}"\n' for name, value in self.env.items()]
        (self.workspace / "rp_environment").write_text("".join(lines))  # Runpod's images: /etc/rp_environment
        (self.workspace / "rp_environment").chmod(0o600)

    @property
    def root(self) -> str:
        """The folder for jobs, as the pod sees it."""
        return str(self.workspace / "ai-trains-ai")

    @property
    def session(self) -> dict[str, str]:
        path = path_of_a_pod(self.folder / "bin")
        return {"HOME": str(self.folder / "home"), "PATH": path, "AITA_WORKDIR": self.root, MARKER: self.pod_id}

    @property
    def tree(self) -> list[int]:
        """Living processes that are known without their marker: sshd overwrites its environment."""
        return []

    @property
    def pids(self) -> list[int]:
        return sorted({*self.tree, *marked(self.pod_id)})

    def start(self, listen: bool = True) -> None:
        """Boot; called in the cloud's loop. Without `listen` connections to the port are refused."""
        raise NotImplementedError

    def remap(self) -> None:
        """SSH moves to a new public port; connections break, jobs go on."""
        raise NotImplementedError

    def freeze(self) -> None:
        for _ in range(2):  # one may start another while it is being stopped
            send(self.pids, signal.SIGSTOP)

    def thaw(self) -> None:
        send(self.pids, signal.SIGCONT)

    def kill(self) -> None:
        """The host is gone, with every process on it."""
        deadline = time.monotonic() + 10.0
        while (pids := self.pids) and time.monotonic() < deadline:  # a process may start another one while it is killed
            send(pids, signal.SIGKILL)
            time.sleep(0.005)


class SshdMachine(Machine):
    """A shell keeps one sshd alive; a new port is a new configuration and a killed sshd."""

    process: subprocess.Popen[bytes] | None = None
    wrap: tuple[str, ...] = ()

    @property
    def tree(self) -> list[int]:
        return [pid for pid in tree(self.process.pid) if alive(pid)] if self.process else []

    @property
    def first(self) -> str:
        """What the pod's shell does before it serves."""
        return ":"

    def start(self, listen: bool = True) -> None:
        config = configure(self.folder, self.port, self.session)
        die = "setpriv --pdeathsig KILL " if shutil.which("setpriv") else ""  # no pod outlives a killed cloud
        serve = f"while :; do {die}{SSHD} -D -e -f {config}; sleep 0.02; done" if listen else "sleep 1000000"
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*die.split(), *self.wrap, "sh", "-c", f"{self.first}; {serve}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": self.session["PATH"], **self.env, MARKER: self.pod_id},
            )

    def remap(self) -> None:
        self.port = free_port()
        configure(self.folder, self.port, self.session)
        send([pid for pid in self.tree if _command(pid).startswith("sshd")], signal.SIGKILL)

    def kill(self) -> None:
        super().kill()
        if self.process is not None:
            self.process.wait()


class NamespaceMachine(SshdMachine):
    """The kernel ends all there is in the namespace with its first process: a host loss that nothing can escape."""

    wrap = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")

    @property
    def root(self) -> str:
        return str((WORKSPACE if _has_workspace() else self.workspace) / "ai-trains-ai")

    @property
    def first(self) -> str:
        return f"mount --bind {self.workspace} {WORKSPACE}" if _has_workspace() else ":"


class AsyncsshMachine(Machine):
    """Where there is no sshd. Commands are children of the cloud's process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loop = asyncio.get_running_loop()
        self._open: set[Any] = set()
        self._acceptor: asyncio.AbstractServer | None = None
        self._frozen = self._dead = False

    def start(self, listen: bool = True) -> None:
        if listen:
            self._later(self._listen())

    def remap(self) -> None:
        self.port = free_port()
        self._later(self._move())

    def freeze(self) -> None:
        super().freeze()
        self._frozen = True
        self._loop.call_soon_threadsafe(self._pause)

    def thaw(self) -> None:
        super().thaw()
        self._frozen = False
        self._loop.call_soon_threadsafe(self._resume)

    def kill(self) -> None:
        self._dead = True
        self._loop.call_soon_threadsafe(self._abort)
        super().kill()

    def _later(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _listen(self) -> None:
        machine = self

        class Login(asyncssh.SSHServer):
            def connection_made(self, connection: asyncssh.SSHServerConnection) -> None:
                self.connection = connection
                machine._open.add(connection)
                if machine._frozen:
                    machine._pause()

            def connection_lost(self, error: Exception | None) -> None:
                machine._open.discard(self.connection)

        self._acceptor = await asyncssh.listen(
            "127.0.0.1",
            self.port,
            server_factory=Login,
            server_host_keys=[str(self.folder / "host")],
            authorized_client_keys=str(self.folder / "authorized"),
            process_factory=self._run,
            encoding=None,
        )
        if self._dead:
            self._abort()

    async def _run(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        if self._dead:
            return process.close()
        child = await asyncio.create_subprocess_exec(
            *("sh", "-c", process.command or "exit 0"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.session,
            cwd=self.folder / "home",
            start_new_session=True,
        )
        feeding = asyncio.ensure_future(_feed(process, child))
        with contextlib.suppress(OSError, asyncssh.Error):  # the client went away; the command goes on, as with sshd
            await asyncio.gather(_pump(child.stdout, process.stdout), _pump(child.stderr, process.stderr))
        status = await child.wait()
        feeding.cancel()
        process.exit(status if status >= 0 else 128 - status)

    async def _move(self) -> None:
        self._abort()
        await self._listen()

    def _transports(self) -> list[Any]:
        return [found for one in self._open if (found := getattr(one, "_transport", None)) is not None]

    def _pause(self) -> None:
        for transport in self._transports():
            with contextlib.suppress(RuntimeError):
                transport.pause_reading()

    def _resume(self) -> None:
        for transport in self._transports():
            with contextlib.suppress(RuntimeError):
                transport.resume_reading()

    def _abort(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        for connection in list(self._open):
            connection.abort()
        self._open.clear()


async def _feed(process: Any, child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    while True:
        try:
            data = await process.stdin.read(1 << 16)
            if not data:
                break
            child.stdin.write(data)
            await child.stdin.drain()
        except asyncssh.SignalReceived as received:
            send([child.pid], getattr(signal, f"SIG{received.signal}", signal.SIGTERM))
        except (OSError, asyncssh.Error):
            break
    child.stdin.close()


async def _pump(source: Any, sink: Any) -> None:
    while data := await source.read(1 << 16):
        sink.write(data)
        await sink.drain()


MACHINES: dict[str, type[Machine]] = {
    "namespace": NamespaceMachine,
    "process": SshdMachine,
    "asyncssh": AsyncsshMachine,
}


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@functools.cache
def _has_workspace() -> bool:
    with contextlib.suppress(OSError):  # a mount point has to exist on the host; nothing is ever written there
        WORKSPACE.mkdir(exist_ok=True)
    return WORKSPACE.is_dir()
