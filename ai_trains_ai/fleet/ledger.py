"""Every charge of a run, and the budget that stops a spend before it happens."""

from __future__ import annotations

from collections.abc import Callable

from ai_trains_ai.errors import BudgetExceeded
from ai_trains_ai.events import Charged, Event
from ai_trains_ai.records import Budget, Charge, Rental
from ai_trains_ai.store import Store

Dollars = Callable[[], float]


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
        self._accruing: list[Dollars] = []
        self._reserving: list[Dollars] = []
        self.budget = budget
        self.store = store

    @property
    def spent(self) -> float:
        """US dollars so far, earlier sessions of the run included, and what running machines owe and isn't booked."""
        return self._spent + sum(owed() for owed in self._accruing)

    @property
    def reserved(self) -> float:
        """US dollars that what goes on now may still cost until it is finished."""
        return sum(reserved() for reserved in self._reserving)

    @property
    def left(self) -> float:
        """US dollars that are neither spent nor reserved; infinite without a budget."""
        return float("inf") if self.budget.usd is None else self.budget.usd - self.spent - self.reserved

    def accrue(self, owed: Dollars, reserved: Dollars) -> None:
        """Count what ``owed`` gives as spent, too, due and booked later; and hold back what ``reserved`` gives."""
        self._accruing.append(owed)
        self._reserving.append(reserved)

    def require(self, charge: Charge) -> None:
        """Ask before a spend of at least ``charge``.

        Raises:
            BudgetExceeded: it would pass the budget, or a plugin's ``before_spend`` forbids it.
        """
        shortage = self.shortage(charge.subject, charge.usd)
        if shortage is not None:
            raise shortage
        self.ask(charge)

    def shortage(self, subject: str, usd: float) -> BudgetExceeded | None:
        """What is wrong with a spend that would pass the budget; nobody else is asked."""
        if usd <= self.left:
            return None
        held = f" and {self.reserved:.2f} are held for what goes on" if self.reserved >= 0.005 else ""
        return BudgetExceeded(
            f"{subject} would cost at least {usd:.2f} USD, but only {max(0.0, self.left):.2f} "
            f"of {self.budget.usd:.2f} USD are left{held}. Raise the budget to go on."
        )

    def ask(self, charge: Charge) -> None:
        """Ask the plugins' ``before_spend``. Raises `BudgetExceeded` when one forbids it."""
        if self._before_spend is not None:
            self._before_spend(charge, self)

    def charge(self, *charges: Charge, rental: Rental | None = None, ended_lease: str = "") -> None:
        """Book what was used, busy, idle and failed time alike, and in the same transaction what that settles."""
        now = self._clock()
        self._store.save_charges([(now, charge) for charge in charges], rental=rental, ended_lease=ended_lease)
        self._spent += sum(charge.usd for charge in charges)
        for charge in charges:
            self._emit(Charged(charge, time=now))
