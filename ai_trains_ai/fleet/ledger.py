"""Every charge of a run, and the budget that stops a spend before it happens."""

from __future__ import annotations

from collections.abc import Callable

from ai_trains_ai.errors import BudgetExceeded
from ai_trains_ai.events import Charged, Event
from ai_trains_ai.records import Budget, Charge
from ai_trains_ai.store import Store


class Ledger:
    """Books charges durably. Use it from the run's thread."""

    def __init__(
        self,
        store: Store,
        budget: Budget,
        clock: Callable[[], float],
        emit: Callable[[Event], None],
        before_spend: Callable[[Charge, Ledger], None] | None = None,
    ) -> None:
        self._store, self._clock, self._emit = store, clock, emit
        self._before_spend = before_spend
        self._spent = sum(charge.usd for _, charge in store.charges())
        self._accruing: list[Callable[[], float]] = []
        self.budget = budget
        self.store = store

    @property
    def spent(self) -> float:
        """US dollars so far, earlier sessions of the run included, and what running machines owe and isn't booked."""
        return self._spent + sum(owed() for owed in self._accruing)

    def accrue(self, owed: Callable[[], float]) -> None:
        """Count what ``owed`` gives as spent, too: dollars that are due and will be booked later."""
        self._accruing.append(owed)

    def require(self, charge: Charge) -> None:
        """Ask before a spend of at least ``charge``.

        Raises:
            BudgetExceeded: it would pass the budget, or a plugin's ``before_spend`` forbids it.
        """
        cap = self.budget.usd
        if cap is not None and self.spent + charge.usd > cap:
            raise BudgetExceeded(
                f"{charge.subject} would cost at least {charge.usd:.2f} USD, but only {max(0.0, cap - self.spent):.2f} "
                f"of {cap:.2f} USD are left. Raise the budget to go on."
            )
        if self._before_spend is not None:
            self._before_spend(charge, self)

    def charge(self, charge: Charge) -> None:
        """Book what was used, busy, idle and failed time alike."""
        now = self._clock()
        self._store.save_charges([(now, charge)])
        self._spent += charge.usd
        self._emit(Charged(charge, time=now))
