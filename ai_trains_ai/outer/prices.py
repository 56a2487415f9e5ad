"""What tokens of a paid service cost, and the booking of what an outer policy takes."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

from attrs import asdict, frozen

from ai_trains_ai.errors import ConfigurationError, Transient
from ai_trains_ai.fleet import Ledger
from ai_trains_ai.records import Charge, Usage

TINKER_TABLE: Final = "https://tinker-docs.thinkingmachines.ai/tinker/models.json"
_SECONDS: Final = 20.0


@frozen
class Prices:
    """US dollars per million tokens: read without and with a cache, sampled, and trained on."""

    prefill: float
    cached: float
    sampled: float
    trained: float = 0.0

    @classmethod
    def of(cls, given: Prices | Mapping[str, float]) -> Prices:
        """From a mapping with these names; ``cached`` is ``prefill`` where it is left out.

        Raises:
            ConfigurationError: a name is missing or unknown, or a price is no amount.
        """
        if isinstance(given, Prices):
            return given
        names = {"prefill", "cached", "sampled", "trained"}
        if unknown := set(given) - names:
            raise ConfigurationError(f"prices has {', '.join(sorted(unknown))}. It takes {', '.join(sorted(names))}.")
        if missing := {"prefill", "sampled"} - set(given):
            raise ConfigurationError(f"prices lacks {', '.join(sorted(missing))}, in USD per million tokens.")
        prices = cls(**{"cached": given["prefill"], **given})
        for name, price in asdict(prices).items():
            if not isinstance(price, int | float) or isinstance(price, bool) or not 0 <= price < math.inf:
                raise ConfigurationError(f"prices[{name!r}] is {price!r}; give USD per million tokens, 0 or more.")
        return prices

    def turn(self, usage: Usage) -> float:
        """US dollars of one turn."""
        fresh = usage.prompt - usage.cached
        return (fresh * self.prefill + usage.cached * self.cached + usage.completion * self.sampled) / 1e6

    def training(self, tokens: int) -> float:
        """US dollars of training on so many tokens, prompts included."""
        return tokens * self.trained / 1e6


def fetch_tinker(model: str, url: str = TINKER_TABLE) -> Prices:
    """Tinker's published price of a model. Blocks for up to 20 s.

    Raises:
        Transient: the table can't be had, or does not name the model with all four prices.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "ai-trains-ai"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            table = json.load(answer)
        entries = table if isinstance(table, list) else table["models"]
        entry = next(entry for entry in entries if entry.get("tinker_id") == model)
        columns = {"prefill": "prefill", "cached": "cached_prefill", "sampled": "sample", "trained": "train"}
        return Prices.of({name: _dollars(entry[column]) for name, column in columns.items()})
    except (OSError, ValueError, KeyError, TypeError, StopIteration, AttributeError) as error:
        raise Transient(
            f"Tinker's price of {model} can't be read from {url} ({type(error).__name__}: {error}). Pass it: "
            "prices={'prefill': …, 'cached': …, 'sampled': …, 'trained': …} in USD per million tokens."
        ) from error


def _dollars(text: Any) -> float:
    return float(str(text).strip().removeprefix("$").replace(",", ""))


class TokenBooks:
    """Asks the ledger before tokens are spent and books them after. Use it from the run's thread.

    Without ``prices`` the tokens are booked at no cost; a run with a budget must not be started then.
    """

    def __init__(self, ledger: Ledger, model: str, prices: Prices | None) -> None:
        if prices is None and ledger.budget.usd is not None:
            raise ConfigurationError(
                f"The run has a budget, and what {model} costs is unknown. Pass prices={{'prefill': …, 'sampled': …}} "
                "in USD per million tokens to the outer trainer, with zeros where it costs nothing."
            )
        self._ledger, self._model, self._prices = ledger, model, prices or Prices(0.0, 0.0, 0.0, 0.0)

    def before_turn(self, prompt: int, completion: int) -> None:
        """Raises `BudgetExceeded` when the dearest outcome of a turn would pass the budget."""
        usd = self._prices.turn(Usage(prompt, completion))
        self._ledger.require(Charge("tokens", f"{self._model}: a turn", prompt + completion, "tokens", usd))

    def turn(self, usage: Usage) -> None:
        """Book a turn, by what it was: cached and fresh prompt, sampled tokens."""
        parts = {
            "prefill": Usage(usage.prompt - usage.cached, 0),
            "cached prefill": Usage(usage.cached, 0, usage.cached),
            "sampled": Usage(0, usage.completion),
        }
        self._book({what: (part.prompt + part.completion, self._prices.turn(part)) for what, part in parts.items()})

    def before_training(self, tokens: int) -> None:
        """Raises `BudgetExceeded` when the update would pass the budget."""
        usd = self._prices.training(tokens)
        self._ledger.require(Charge("tokens", f"{self._model}: an update", tokens, "tokens", usd))

    def training(self, tokens: int) -> None:
        """Book an update."""
        self._book({"trained": (tokens, self._prices.training(tokens))})

    def _book(self, used: Mapping[str, tuple[int, float]]) -> None:
        charges = [
            Charge("tokens", f"{self._model}: {what}", tokens, "tokens", usd)
            for what, (tokens, usd) in used.items()
            if tokens
        ]
        if charges:
            self._ledger.charge(*charges)
