"""Pairs of a decode worker and a lender for one request: blocks, tokens and bytes, from which terms.py has seconds.

Pure.

Shapes: W workers of the model; R decode workers and L lenders of a selection. A decode worker's values are columns
[R, 1], a lender's are [L], so that both together make the pairs' [R, L]. Without lenders L is 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from router.placement.demand import Demand
from router.placement.rates import Bools, Floats, Ints, Rates
from router.placement.worker_table import Hits, WorkerTable

_Value = TypeVar("_Value")
_Item = TypeVar("_Item", bound=np.generic)


class _Lazy(Generic[_Value]):
    """Attribute that is computed when it is first read; `functools.cached_property` takes a lock before Python 3.12."""

    def __init__(self, make: Callable[[Any], _Value]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __get__(self, instance: object, owner: object = None) -> _Value:
        value = instance.__dict__[self._make.__name__] = self._make(instance)
        return value


Kind = Literal["alone", "reading", "computing"]
"""Way in which a decode worker gets the blocks that it lacks: it computes them itself; or it reads those that a lender
holds, and computes the rest; or it reads all of them from a lender, which computes those that it lacks."""
KINDS: tuple[Kind, ...] = "alone", "reading", "computing"


class Inputs:
    """Inputs of one decision: a request and the fleet, with the blocks that each worker has for it."""

    def __init__(
        self, demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, with_sources: bool = True
    ) -> None:
        """Create them; without `with_sources` no lender reads blocks that it could compute."""
        self.demand = demand
        self.workers = workers
        self.hits = hits
        self.rates = rates
        self.with_sources = with_sources
        self.held: Floats = np.minimum(hits.held, demand.num_usable_blocks)
        """Usable blocks that each worker has now, [W]."""
        self.due: Floats = self.held if hits.due is hits.held else np.minimum(hits.due, demand.num_usable_blocks)
        """Usable blocks that each worker has once its queue is computed, [W]."""
        ends = workers.outgoing_bytes, workers.incoming_bytes
        self.most_held: float = self.held.item(self.held.argmax())
        """Usable blocks of the fullest worker."""
        self.most_in_flight: float = max(column.item(column.argmax()) for column in ends)
        """Bytes in flight at the busiest end."""

    def waiting_bytes(self, num_bytes: Floats, borrowers: Ints, lenders: Ints) -> Floats | float:
        """Return the bytes in flight for which transfers of so many bytes wait, [B, L] or 0; `borrowers` is [B, 1]."""
        if not self.most_in_flight:
            return 0.0
        # Flows share a NIC equally: of each other flow at most as many bytes pass before ours ends as ours has, and at
        # most all that are left of it. The fuller of the two NICs decides.
        workers = self.workers
        waiting: Floats = num_bytes * workers.outgoing_flows[lenders]
        np.minimum(waiting, workers.outgoing_bytes[lenders], out=waiting)
        incoming = num_bytes * workers.incoming_flows[borrowers]
        np.minimum(incoming, workers.incoming_bytes[borrowers], out=incoming)
        return np.maximum(waiting, incoming, out=waiting)


class DecodeWorkers:
    """Decode workers of a selection, with the columns [R, 1] that all their pairs need."""

    def __init__(self, inputs: Inputs, rows: Ints) -> None:
        """Create them; `rows` [R] ascend."""
        workers, rates = inputs.workers, inputs.rates
        self.rows = rows
        self.column = rows[:, None]
        self.own_blocks = inputs.held[rows][:, None]
        """Usable blocks that each holds itself."""
        self.tokens_per_s = rates.decode_prefill_tokens_per_s[rows][:, None]
        self.fixed_s = rates.tail_fixed_s[rows][:, None]
        self.stream_delay_s = rates.stream_delay_s[rows][:, None]
        self.queued_tokens = workers.queued_prefill_tokens[rows][:, None]
        self.running = workers.running[rows][:, None]
        # As floating point, because matrices of mixed types take several times longer.
        self.decoding: Floats = workers.decoding[rows].astype(np.float64)[:, None]
        self.last = position(rows, inputs.hits.last_decode)
        """Position of the worker that decoded the session's last request; -1: not among them."""
        self.seconds: dict[str, Floats | float] = {}
        """Seconds of terms that depend on the decode worker alone, by name."""


@dataclass(slots=True, eq=False)
class SourceReads:
    """Blocks that lenders read from other workers before they compute the rest, [L] each or one number for all."""

    blocks: Floats
    """Blocks that the lender has afterwards."""
    sources: Ints | int = -1
    """Row of the source from which reading saves most; -1 where it never does."""
    num_bytes: Floats | float = 0.0
    waiting_bytes: Floats | float = 0.0
    """Bytes in flight for which the reading waits."""
    seconds: Floats | float = 0.0


class Pairs:
    """R decode workers, each with each of L lenders in one way, or alone."""

    def __init__(self, inputs: Inputs, decode: DecodeWorkers, kind: Kind, lenders: Ints | None = None) -> None:
        """Create them; `lenders` [L] are ascending rows, None for "alone"."""
        self.inputs = inputs
        self.demand, self.workers, self.rates = inputs.demand, inputs.workers, inputs.rates
        self.decode = decode
        self.kind = kind
        self._lenders = lenders
        usable = inputs.demand.num_usable_blocks
        self.blocks: Floats | float = float(usable)
        """Leading blocks of the prompt that the decode worker has after the loan, [R, 1], [L] or a number."""
        if lenders is None:
            self.blocks = decode.own_blocks
        elif kind == "reading":
            self.blocks = inputs.held[lenders]
        self.own_tokens: Floats | float = self.demand.num_tokens - self.blocks * self.demand.block_tokens
        """Tokens that the decode worker computes, of the shape of `blocks`."""
        if kind == "computing":
            self.lender_tokens_per_s = inputs.rates.prefill_tokens_per_s[lenders]
            """Rate of the lender's computing, [L]."""
        self.before_s: Floats | float = 0.0
        """Seconds until a term of the TTFT begins, while it is asked for its seconds: the terms before it, summed."""

    @property
    def lenders(self) -> Ints:
        """Rows of the lenders, [L]."""
        assert self._lenders is not None, "these are decode workers alone"
        return self._lenders

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.decode.rows), 1 if self._lenders is None else len(self._lenders)

    @_Lazy
    def own_s(self) -> Floats:
        """Seconds in which the decode worker computes its own tokens, [R, 1] or [R, L]."""
        seconds: Floats = self.own_tokens / self.decode.tokens_per_s
        return seconds

    @_Lazy
    def moved_bytes(self) -> Floats:
        """Bytes that the decode worker reads, [R, 1] or [R, L]; 0 or less where nothing is to be read."""
        num_bytes: Floats = (self.blocks - self.decode.own_blocks) * self.demand.block_bytes
        return num_bytes

    @_Lazy
    def bytes_per_s(self) -> Floats:
        """Rate of the decode worker's reading, [R, L]."""
        return self.picked(self.rates.kv_bytes_per_s)

    @_Lazy
    def waiting_bytes(self) -> Floats | float:
        """Bytes in flight of other placements for which the decode worker's reading waits, [R, L] or 0."""
        most = self.inputs.most_in_flight
        if self._lenders is None or not most:
            return 0.0
        if self.kind == "reading":
            return self.inputs.waiting_bytes(self.moved_bytes, self.decode.column, self._lenders)
        # While the lender computes, what is in flight now drains at the pair's rate.
        ready_s = self.before_s
        if most <= np.min(ready_s) * self.bytes_per_s.min():
            return 0.0  # the common case, found without a matrix
        waiting = self.inputs.waiting_bytes(self.moved_bytes, self.decode.column, self._lenders)
        left: Floats = np.maximum(0.0, waiting - ready_s * self.bytes_per_s)
        return left

    def possible(self) -> Bools:
        """Return whether the lender can lend and has something to lend, [R, L]."""
        able: Bools = self.decode.own_blocks < self.blocks
        return able & self.picked(self.workers.compatible)

    @_Lazy
    def reads(self) -> SourceReads:
        """Blocks that each computing lender reads from the worker where that saves most."""
        inputs, lenders = self.inputs, self.lenders
        blocks = inputs.due[lenders]
        at = (blocks < inputs.most_held).nonzero()[0]  # often few: most hold as much as anybody
        if not len(at) or not inputs.with_sources:
            return SourceReads(blocks)
        demand, rates, lacking = self.demand, self.rates, blocks[at][:, None]
        borrowers, holders = lenders[at], (inputs.held > lacking.min()).nonzero()[0]
        # All [A, H], for A lenders that lack what H others hold.
        gain = inputs.held[holders] - lacking
        read_s = gain * demand.block_bytes
        waiting = inputs.waiting_bytes(read_s, borrowers[:, None], holders)
        read_s += waiting
        read_s /= pick(rates.kv_bytes_per_s, borrowers, holders)
        read_s += pick(rates.loan_overhead_s, borrowers, holders)
        # Time of reading from a holder, less the time in which the lender would compute the same blocks.
        lost_s = read_s - gain * demand.block_tokens / rates.prefill_tokens_per_s[borrowers][:, None]
        lost_s[(gain <= 0) | ~pick(self.workers.compatible, borrowers, holders)] = np.inf
        best = lost_s.argmin(axis=1)
        flat = np.arange(len(at)) * len(holders) + best
        worth = (lost_s.take(flat) < 0).nonzero()[0]
        if not len(worth):
            return SourceReads(blocks)
        at, flat = at[worth], flat[worth]

        def chosen(values: Floats) -> Floats:
            each = np.zeros(len(lenders))
            each[at] = values.take(flat)
            return each

        sources = np.full(len(lenders), -1)
        sources[at] = holders[best[worth]]
        gains = chosen(gain)
        waits = chosen(waiting) if isinstance(waiting, np.ndarray) else 0.0
        return SourceReads(blocks + gains, sources, gains * demand.block_bytes, waits, chosen(read_s))

    def picked(self, matrix: NDArray[_Item]) -> NDArray[_Item]:
        """Return the pairs' elements [R, L] of a matrix [W, W] by borrower and lender."""
        return pick(matrix, self.decode.rows, self.lenders)


def pick(matrix: NDArray[_Item], rows: Ints, columns: Ints) -> NDArray[_Item]:
    """Return [rows, columns] of a [W, W] matrix."""
    return matrix.take(rows, axis=0).take(columns, axis=1)


def position(rows: Ints, row: int) -> int:
    """Return the position of a row among ascending rows; -1 where it is not among them."""
    at = int(rows.searchsorted(row)) if row >= 0 else len(rows)
    return at if at < len(rows) and rows.item(at) == row else -1
