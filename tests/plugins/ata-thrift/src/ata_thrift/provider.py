"""This machine at a price, so that an experiment without a bill learns to budget."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from ai_trains_ai.providers.local import LocalProvider
from ai_trains_ai.records import Offer, PodRequest


class MeteredProvider(LocalProvider):
    """Slots of this machine; ``usd_per_hour`` is the price of all of them together."""

    def __init__(self, usd_per_hour: float = 0.36, slots: int | None = None) -> None:
        super().__init__(slots)
        self.usd_per_hour = usd_per_hour

    async def offers(self, request: PodRequest) -> Sequence[Offer]:
        return [evolve(offer, usd_per_hour=self.usd_per_hour) for offer in await super().offers(request)]
