"""Quota ledgers: tokens per tenant and window of wall-clock time, in memory or shared by several routers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


class QuotaLedger(Protocol):
    """Ledger with aligned windows, which begin at wall-clock multiples of `window_s` since the epoch.

    An implementation that cannot reach its store decides locally; it raises nothing.
    """

    async def charge(self, tenant: str, tokens: int, limit: int, window_s: int) -> float | None:
        """Count `tokens` and return None; beyond `limit` count nothing and return the seconds until the window ends."""

    async def refund(self, tenant: str, tokens: int, window_s: int) -> None:
        """Subtract `tokens` charged in the present window, not below 0."""


@dataclass(slots=True)
class LocalLedger:
    """Ledger of one router, in memory."""

    clock: Callable[[], float] = time.time
    _used: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """Window number and tokens, by tenant and window_s."""
    _sweep_above: int = 1024

    async def charge(self, tenant: str, tokens: int, limit: int, window_s: int) -> float | None:
        now = self.clock()
        window = int(now // window_s)
        used = self._total(tenant, window, window_s) + tokens
        if used > limit:
            return (window + 1) * window_s - now
        self._used[tenant, window_s] = window, used
        self._sweep(now)
        return None

    async def refund(self, tenant: str, tokens: int, window_s: int) -> None:
        window = int(self.clock() // window_s)
        if used := self._total(tenant, window, window_s):
            self._used[tenant, window_s] = window, max(0, used - tokens)

    def _total(self, tenant: str, window: int, window_s: int) -> int:
        of_window, used = self._used.get((tenant, window_s), (window, 0))
        return used if of_window == window else 0

    def _sweep(self, now: float) -> None:
        """Drop windows that are over.

        Amortised: the bound doubles with the remaining number.
        """
        if len(self._used) > self._sweep_above:
            self._used = {key: used for key, used in self._used.items() if used[0] == now // key[1] and used[1]}
            self._sweep_above = max(1024, 2 * len(self._used))
