"""Machines of your own: a list of hosts that are reached over SSH, each with its GPUs and, if you like, a price.

A host is rented by claiming it: a folder that holds the marker is renamed into place on the host itself, so that two
controllers never share one, and a restarted controller finds what it had.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, fields, frozen

from ai_trains_ai.errors import AmbiguousCreate, ConfigurationError, NoCapacity, Transient, TransportError
from ai_trains_ai.interfaces import GPUProvider, Transport
from ai_trains_ai.records import Offer, Pod, PodRequest, PodSpec
from ai_trains_ai.transport.ssh import Host, Patience, SSHTransport

logger = logging.getLogger(__name__)

PATIENCE = Patience(connect=10.0, total=15.0, pause=0.5)
TAKEN = 45  # exit status of a claim on a host that somebody else has
# exit statuses: 0 done. The marker goes into place with its folder, in one rename.
CLAIM = (
    'set -e; mkdir -p "$1"; t=$(mktemp -d "$1/claim.XXXXXX"); printf %s "$2" >"$t/marker"; '
    'if mv -T "$t" "$1/claim" 2>/dev/null; then exit 0; fi; rm -rf "$t"; '
    f'[ "$(cat "$1/claim/marker")" = "$2" ] || exit {TAKEN}'
)
FREE = (
    '[ "$(cat "$1/claim/marker" 2>/dev/null)" = "$2" ] || exit 0; '
    '[ -f "$1/end.sh" ] && sh "$1/end.sh" "$1" 2; rm -f "$1/deadman.pid" "$1/epoch"; rm -rf "$1/claim"'
)


@frozen
class SSHHost:
    """One machine. ``slots`` jobs fit on it at a time; ``gpu_type`` is what a request asks for, "cpu" without a GPU.

    ``key`` is a private key file, ``known_host`` the line of the host's public key (empty: the first one shown is
    taken), ``root`` the folder on the host that jobs live in.
    """

    address: str
    gpu_type: str = "cpu"
    count: int = 0
    slots: int = 1
    usd_per_hour: float = 0.0
    user: str = "root"
    port: int = 22
    key: str = field(default="~/.ssh/id_ed25519", repr=False)
    known_host: str = field(default="", repr=False)
    root: str = "/var/tmp/ai-trains-ai"

    def __attrs_post_init__(self) -> None:
        if self.slots < 1 or self.count < 0 or self.usd_per_hour < 0:
            raise ConfigurationError(f"{self.id}: slots must be at least 1, count and usd_per_hour at least 0.")
        if not self.root.startswith("/"):
            raise ConfigurationError(f"{self.id}: root must be an absolute path, not {self.root!r}.")

    @property
    def id(self) -> str:
        return f"{self.user}@{self.address}:{self.port}"

    @classmethod
    def of(cls, given: Any) -> SSHHost:
        """A host from an address, a mapping of its fields, or a host."""
        if isinstance(given, SSHHost):
            return given
        if isinstance(given, str):
            return cls(given)
        known = {a.name for a in fields(cls)}
        if not isinstance(given, Mapping) or "address" not in given or set(given) - known:
            raise ConfigurationError(
                f"{given!r} is no host. Give an address, or a mapping with address and perhaps "
                f"{', '.join(sorted(known - {'address'}))}."
            )
        return cls(**given)


class SSHProvider(GPUProvider):
    """Rents the hosts of a fixed list, each to one fleet at a time.

    Args:
        hosts: addresses, mappings of the fields of `SSHHost`, or such hosts.
        patience: how long a host that doesn't answer is waited for.
    """

    def __init__(self, hosts: Sequence[Any], patience: Patience = PATIENCE) -> None:
        if isinstance(hosts, str) or not hosts:
            raise ConfigurationError("SSHProvider needs a list of hosts, with at least one: hosts=['gpu-1.example'].")
        self._patience = patience
        self.hosts = {host.id: host for host in map(SSHHost.of, hosts)}
        if len(self.hosts) < len(hosts):
            raise ConfigurationError("SSHProvider was given the same host twice.")
        self.max_pods = len(self.hosts)
        self._shells: dict[str, SSHTransport] = {}

    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        wanted = [
            host
            for host in self.hosts.values()
            if (not request.gpu_types or host.gpu_type in request.gpu_types)
            and (host.gpu_type == "cpu" or host.count >= request.count)
        ]
        claims = await asyncio.gather(*(self._claim_of(host) for host in wanted))
        return [_offer(host, available=claim == "") for host, claim in zip(wanted, claims, strict=True)]

    async def create(self, offer: Offer, spec: PodSpec) -> Pod:
        host = self.hosts.get(offer.id)
        if host is None:
            raise ConfigurationError(f"{offer.id!r} is none of this provider's hosts: {', '.join(self.hosts)}.")
        if not spec.marker or "/" in spec.marker:
            raise ConfigurationError(f"{spec.marker!r} can't be a marker: it must be a text without slashes.")
        # repeating a claim under the same marker is harmless, so a lost answer is asked for again
        claim = ["sh", "-c", CLAIM, "claim", host.root, spec.marker]
        status, said = await self._shell(host).run(claim, timeout=60)
        if status is None:
            with contextlib.suppress(Transient):
                status, said = await self._shell(host).run(claim, timeout=60)
        if status is None:
            raise AmbiguousCreate(f"{host.id} was lost while it was claimed.")
        if status == TAKEN:
            raise NoCapacity(
                f"{host.id} is claimed by another fleet. Terminate its pod there, or remove {host.root}/claim."
            )
        if status != 0:
            raise Transient(
                f"{host.id} can't be claimed: {said.decode('utf-8', 'replace').strip()[-200:] or 'it is lost'}."
            )
        return _pod(host, spec.marker)

    async def get(self, pod_id: str) -> Pod | None:
        host, marker = self._parts(pod_id)
        if host is None:
            return None
        claim = await self._claim_of(host)
        if claim is None:
            return _pod(host, marker, ready=False)
        return _pod(host, marker) if claim == marker else None

    async def list(self, marker: str) -> Sequence[Pod]:
        claims = await asyncio.gather(*(self._claim_of(host) for host in self.hosts.values()))
        found = zip(self.hosts.values(), claims, strict=True)
        return [_pod(host, claim) for host, claim in found if claim and claim.startswith(marker)]

    async def terminate(self, pod_id: str) -> None:
        host, marker = self._parts(pod_id)
        if host is None:
            return
        status, _ = await self._shell(host).run(["sh", "-c", FREE, "free", host.root, marker], timeout=60)
        if status is None:
            raise Transient(f"{host.id} was lost while its pod was ended; try again.")

    async def connect(self, pod: Pod) -> Transport:
        host, marker = self._parts(pod.id)
        if host is None or await self._claim_of(host) != marker:
            raise Transient(f"{pod.id} can't be reached, or is no longer ours.")
        return SSHTransport(_address(host))

    def end_command(self, pod: Pod) -> str:
        """Gives the host back: whoever claims it next finds it free."""
        return f"rm -rf {shlex.quote(pod.root)}/claim {shlex.quote(pod.root)}/epoch"

    async def close(self) -> None:
        shells, self._shells = list(self._shells.values()), {}
        await asyncio.gather(*(shell.close() for shell in shells))

    # ------------------------------------------------------------------------------------------ hosts

    def _parts(self, pod_id: str) -> tuple[SSHHost | None, str]:
        name, _, marker = pod_id.rpartition("/")
        return self.hosts.get(name), marker

    def _shell(self, host: SSHHost) -> SSHTransport:
        return self._shells.setdefault(host.id, SSHTransport(_address(host), self._patience))

    async def _claim_of(self, host: SSHHost) -> str | None:
        """The marker that a host is claimed under, empty when it is free; ``None`` when it doesn't answer."""
        try:
            status, said = await self._shell(host).run(
                ["sh", "-c", 'cat "$1/claim/marker" 2>/dev/null || true', "claim", host.root], timeout=30
            )
        except (Transient, TransportError) as error:
            logger.warning("%s is left out: %s", host.id, error)
            return None
        return None if status is None else said.decode("utf-8", "replace")


def _address(host: SSHHost) -> Host:
    return Host(host.address, host.port, host.user, host.key, host.known_host)


def _offer(host: SSHHost, *, available: bool) -> Offer:
    return Offer(host.id, host.gpu_type, host.count, host.usd_per_hour, host.slots, available)


def _pod(host: SSHHost, marker: str, *, ready: bool = True) -> Pod:
    offer = _offer(host, available=False)
    return Pod(
        f"{host.id}/{marker}", marker, offer, "ready" if ready else "unreachable", host.id, host=host.id, root=host.root
    )
