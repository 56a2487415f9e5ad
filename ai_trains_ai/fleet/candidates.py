"""Which offer to rent next: the cheapest per job, among those that are not out of stock or under suspicion just now."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import define

from ai_trains_ai.records import Offer

COOL_DOWN = (60.0, 120.0, 240.0, 480.0, 900.0)  # seconds after the first, second, … refusal in a row
BAD_PODS = 2  # pods in a row that never became usable: the offer then cools down like one that is out of stock


@define
class _Trouble:
    refusals: int = 0
    bad_pods: int = 0
    until: float = 0.0


class Candidates:
    """Ranks offers by expected dollars per job, and remembers which ones were refused.

    The hours of a job on a GPU type are learned from this run's own jobs; a type that none has run on yet is expected
    to take as long as the others on average, so that price decides.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hours: dict[str, tuple[int, float]] = {}
        self._trouble: dict[str, _Trouble] = {}

    def learn(self, gpu_type: str, hours: float) -> None:
        """A job held a slot of this type for so many hours."""
        count, total = self._hours.get(gpu_type, (0, 0.0))
        self._hours[gpu_type] = (count + 1, total + hours)

    def usd_per_job(self, offer: Offer) -> float:
        """What a job on a slot of this offer is expected to cost."""
        return offer.usd_per_hour / offer.slots * self._expected_hours(offer.gpu_type)

    def ranked(self, offers: Iterable[Offer]) -> list[Offer]:
        """Those that may be tried now, the best first; of equal ones, the provider's first."""
        now = self._clock()
        free = [offer for offer in offers if offer.available and self._of(offer).until <= now]
        return sorted(free, key=self.usd_per_job)

    def refused(self, offer: Offer) -> None:
        """It was out of stock: leave it alone for a while, longer each time."""
        trouble = self._of(offer)
        trouble.until = self._clock() + COOL_DOWN[min(trouble.refusals, len(COOL_DOWN) - 1)]
        trouble.refusals += 1

    def bad(self, offer: Offer) -> None:
        """A pod of it never became usable."""
        trouble = self._of(offer)
        trouble.bad_pods += 1
        if trouble.bad_pods >= BAD_PODS:
            trouble.bad_pods = 0
            self.refused(offer)

    def good(self, offer: Offer) -> None:
        """A pod of it works."""
        self._trouble.pop(offer.id, None)

    def soonest(self) -> float:
        """Seconds until the next offer may be tried again; 0 when none is waiting."""
        waits = [trouble.until - self._clock() for trouble in self._trouble.values()]
        return max(0.0, min((wait for wait in waits if wait > 0), default=0.0))

    def _of(self, offer: Offer) -> _Trouble:
        return self._trouble.setdefault(offer.id, _Trouble())

    def _expected_hours(self, gpu_type: str) -> float:
        count, total = self._hours.get(gpu_type, (0, 0.0))
        if count:
            return total / count
        jobs = sum(count for count, _ in self._hours.values())
        return sum(total for _, total in self._hours.values()) / jobs if jobs else 1.0
