"""Real SSH servers on free ports of 127.0.0.1, each with its own keys and home."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import asyncssh

from ai_trains_ai.transport.ssh import Host, Patience

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else "")
if not SSHD and os.environ.get("AI_TRAINS_AI_REQUIRE_SSHD"):
    raise RuntimeError("sshd is not installed, and tests that need it must not be left out: install openssh-server")
QUICK = Patience(connect=5.0, total=10.0, pause=0.05, keepalive=0.5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def new_key(path: Path) -> asyncssh.SSHKey:
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(path)
    key.write_public_key(path.with_name(f"{path.name}.pub"))
    path.chmod(0o600)
    return key


def configure(folder: Path, port: int, session: Mapping[str, str]) -> Path:
    """Write sshd's configuration; `folder` holds `host` (a key) and `authorized`. `session` is the sessions' env."""
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/authorized\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "UsePAM no\nStrictModes no\nMaxStartups 100\nMaxSessions 100\n"
        f"SetEnv {' '.join(f'{name}={value}' for name, value in session.items())}\n"
    )
    return config


def tree(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it may end while it is looked at
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(descendant for child in found for descendant in tree(child))]


class Server:
    """One sshd with its own keys and home. `stop` and `start` are a host that goes and comes back."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        for name in ("host", "client"):
            new_key(folder / name)
        shutil.copy(folder / "client.pub", folder / "authorized")
        self.process: subprocess.Popen[bytes] | None = None
        self.session = {"HOME": str(self.home)}  # what commands find in their environment

    @property
    def host(self) -> Host:
        return Host("127.0.0.1", self.port, getpass.getuser(), str(self.folder / "client"))

    def start(self) -> None:
        config = configure(self.folder, self.port, self.session)
        log = (self.folder / "sshd.log").open("ab")
        self.process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(config)], stdout=log, stderr=log, start_new_session=True
        )

    def stop(self) -> None:
        """Kill the server and its sessions: connections break."""
        if self.process is None:
            return
        for child in tree(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
        self.process.wait()
        self.process = None
