"""The run's books of its machines: what is rented, who holds a slot, and what every second of it costs.

A pod is paid from its create to its end at the price of the pod that was created. Time that a lease covers is booked on
its job, when the lease ends; the rest on the pod, by what it did: boot, idle, failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import evolve

from ai_trains_ai.fleet.ledger import Ledger
from ai_trains_ai.records import Charge, Lease, Offer, Pod, Rental

CENTS = 1e-12  # US dollars below which nothing is booked


class Books:
    """The rentals and leases of one provider in a run. What it says is stored before it returns."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], provider: str) -> None:
        self.ledger, self._store, self._clock, self._provider = ledger, ledger.store, clock, provider
        self._rentals = {r.marker: r for r in self._store.rentals(provider) if r.state != "ended"}
        self._leases = {lease.id: lease for lease in self._store.leases() if lease.pod.marker in self._rentals}
        self._charged = {marker: self._store.charged_to_pod(marker) for marker in self._rentals}
        self._waiting: dict[str, float] = {}  # dollars that jobs without a slot are to cost
        ledger.accrue(self._owed, self._reserved)

    # ------------------------------------------------------------------------------------------ rentals

    @property
    def open(self) -> list[Rental]:
        """The pods that are there, or may be."""
        return list(self._rentals.values())

    def has(self, marker: str) -> bool:
        """Whether a pod of this name is there, or may be."""
        return marker in self._rentals

    @property
    def ever_rented(self) -> bool:
        """Whether a pod was ever asked for."""
        return bool(self._store.rentals(self._provider))

    @property
    def spent(self) -> float:
        """US dollars for this provider's pods so far, booked or not."""
        rentals = self._store.rentals(self._provider)
        return sum(self._store.charged_to_pod(rental.marker) for rental in rentals) + self._owed()

    def job_hours(self) -> list[tuple[str, float]]:
        """GPU type and hours of every job that ended by itself on this provider's pods."""
        types = {rental.marker: rental.offer.gpu_type for rental in self._store.rentals(self._provider)}
        ended = (p for p in self._store.placements() if p.exit is not None and p.marker in types)
        return [(types[placed.marker], placed.seconds / 3600) for placed in ended]

    @property
    def usd_per_hour(self) -> float:
        """Of all of them together."""
        return sum(rental.offer.usd_per_hour for rental in self.open)

    def intend(self, marker: str, offer: Offer) -> Rental:
        """Keep the intent to rent, before the provider is asked."""
        rental = Rental(marker, self._provider, offer, "intent", self._clock(), self._clock())
        self._keep(rental)
        return rental

    def nothing_came(self, rental: Rental) -> None:
        """The intent led to no pod."""
        self._forget(rental.marker)
        self._store.save_rentals(evolve(rental, state="ended", seen=self._clock()))

    def rented(self, rental: Rental, pod: Pod) -> Rental:
        """The rental of a pod that is there, at its real price."""
        # one that stopped by itself shows no price any more
        stopped = pod.status not in ("starting", "ready") and pod.offer.usd_per_hour == 0
        offer = evolve(pod.offer, usd_per_hour=rental.offer.usd_per_hour) if stopped else pod.offer
        # the name that it was asked for by, whatever place it got: candidates are judged by it
        offer = evolve(offer, id=rental.offer.id)
        rental = evolve(rental, state="alive", offer=offer, pod_id=pod.id, seen=self._clock())
        self._charged.setdefault(rental.marker, self._store.charged_to_pod(rental.marker))
        self._keep(rental)
        return rental

    def is_stray(self, pod: Pod) -> bool:
        """Whether a pod with our marker is none of those that are rented: it came late, or a create made two."""
        rental = self._rentals.get(pod.marker)
        return rental is None or (rental.state == "alive" and rental.pod_id != pod.id)

    def late(self, pod: Pod) -> Rental:
        """The rental of a stray pod, from when its create was asked for."""
        known = next((r for r in self._store.rentals(self._provider) if r.marker == pod.marker), None)
        now = self._clock()
        rental = known or Rental(pod.marker, self._provider, pod.offer, "intent", now, now)
        if known is not None and known.pod_id not in ("", pod.id):
            rental = evolve(known, marker=f"{pod.marker}~{pod.id}")
        return self.rented(rental, pod)

    def seen(self, markers: Iterable[str]) -> None:
        """These pods are there now."""
        now = self._clock()
        found = [evolve(self._rentals[m], seen=now) for m in markers if m in self._rentals]
        self._rentals.update({rental.marker: rental for rental in found})
        self._store.save_rentals(*found)

    def settle(self, marker: str, kind: str) -> None:
        """Book what no charge and no lease covers of a pod's time up to now."""
        self._charge(marker, self._rest(marker, kind, self._clock()))

    def ended(self, marker: str, kind: str, *, lost: bool = False) -> None:
        """A pod is gone: book the rest of it, leases on it included.

        ``lost``: it went when nobody looked, so it is paid to where it was last seen.
        """
        rental = self._rentals.get(marker)
        if rental is None:
            return
        until = rental.seen if lost else self._clock()
        held = [lease for lease in self._leases.values() if lease.pod.marker == marker]
        busy = [self._busy(lease, max(lease.begin, until)) for lease in held]
        for lease in held:
            del self._leases[lease.id]
        covered = sum(charge.usd for charge in busy)
        rest = self._rest(marker, kind, until, covered)
        rental = evolve(rental, state="ended", seen=until)
        self._forget(marker)
        self.ledger.charge(*busy, *rest, rental=rental)

    # ------------------------------------------------------------------------------------------ leases

    @property
    def leases(self) -> list[Lease]:
        """Those that go on."""
        return list(self._leases.values())

    def expect(self, key: str, usd: float) -> None:
        """Hold back dollars for a job that waits for a slot, until `begin` or `give_up`."""
        self._waiting[key] = usd

    def give_up(self, key: str) -> None:
        self._waiting.pop(key, None)

    def begin(self, lease: Lease, *, lasting: bool) -> None:
        """A job has its slot. A ``lasting`` lease is found again after a restart."""
        self._waiting.pop(lease.id, None)
        self._leases[lease.id] = lease
        if lasting:
            self._store.save_lease(lease)

    def finish(self, lease: Lease) -> None:
        """A job gave its slot back. Nothing, when its pod was settled before."""
        if self._leases.pop(lease.id, None) is not None:
            self._charge(lease.pod.marker, [self._busy(lease, self._clock())], ended_lease=lease.id)

    # ------------------------------------------------------------------------------------------ sums

    def _owed(self) -> float:
        """Dollars of pods that are there, as far as they aren't booked."""
        now = self._clock()
        return sum(max(0.0, self._due(r, now)) for r in self._rentals.values() if r.state == "alive")

    def _reserved(self) -> float:
        """Dollars that the leases, and the jobs that wait for one, may still cost."""
        return sum(self._kept(rental) for rental in self._rentals.values()) + sum(self._waiting.values())

    def expected_of(self, key: str) -> float:
        """Dollars that are held back by `expect`."""
        return self._waiting.get(key, 0.0)

    def kept_for(self, marker: str, seconds: float) -> float:
        """Dollars that a pod would cost more than is reserved already if a job stayed on it for so long."""
        rental = self._rentals[marker]
        return max(0.0, seconds * rental.offer.usd_per_hour / 3600 - self._kept(rental))

    def _kept(self, rental: Rental) -> float:
        """Dollars of a pod until its last lease is over: all of it is paid for, however many slots are in use."""
        now = self._clock()
        mine = (lease for lease in self._leases.values() if lease.pod.marker == rental.marker)
        last = max((lease.seconds - (now - lease.begin) for lease in mine), default=0.0)
        return max(0.0, last) * rental.offer.usd_per_hour / 3600

    def _due(self, rental: Rental, until: float) -> float:
        """Dollars of a pod's time that no charge covers."""
        seconds = max(0.0, until - rental.created)
        return rental.offer.usd_per_hour * seconds / 3600 - self._charged.get(rental.marker, 0.0)

    def _rest(self, marker: str, kind: str, until: float, covered: float = 0.0) -> list[Charge]:
        rental = self._rentals[marker]
        if rental.state != "alive":
            return []
        held = sum(
            (until - lease.begin) * _price(lease) for lease in self._leases.values() if lease.pod.marker == marker
        )
        usd = self._due(rental, until) - held - covered
        if usd <= CENTS:
            return []
        return [Charge(kind, marker, usd / rental.offer.usd_per_hour * 3600, "seconds", usd, marker)]

    def _busy(self, lease: Lease, until: float) -> Charge:
        seconds = until - lease.begin
        return Charge("busy", lease.job_id, seconds, "seconds", seconds * _price(lease), lease.pod.marker)

    def _charge(self, marker: str, charges: list[Charge], ended_lease: str = "") -> None:
        if charges:
            self._charged[marker] = self._charged.get(marker, 0.0) + sum(charge.usd for charge in charges)
            self.ledger.charge(*charges, ended_lease=ended_lease)

    def _keep(self, rental: Rental) -> None:
        self._rentals[rental.marker] = rental
        self._store.save_rentals(rental)

    def _forget(self, marker: str) -> None:
        self._rentals.pop(marker, None)
        self._charged.pop(marker, None)


def _price(lease: Lease) -> float:
    """US dollars a second of the lease's slot."""
    return lease.pod.offer.usd_per_hour / lease.pod.offer.slots / 3600
