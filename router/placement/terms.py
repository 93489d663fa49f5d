"""The terms of a candidate's cost: each has a name, the seconds of all pairs at once, and a lower bound of them.

Pure. docs/extending.md describes how other packages add terms.

    cost = TTFT, the sum of the terms that follow one another in time
         + delay of the streams that run on the decode worker, with the terms of other packages
         - a small share of both for the workers that served the session's last request (rates.py)

In a large fleet the sum of the bounds excludes most pairs before their seconds are computed. So a bound has a part by
decode worker and a part by lender: it needs no matrix of pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import numpy as np

from cluster.errors import StartError
from kvtransfer.registry import load_plugin, plugin_names
from router.placement.demand import Demand
from router.placement.pairs import KINDS, DecodeWorkers, Inputs, Kind, Pairs
from router.placement.rates import Floats, Priors, Rates
from router.placement.worker_table import Hits, WorkerTable, WorkerView

GROUP = "tandem.placement_terms"
"""Group of the entry points by which other packages bring terms."""
ENCODE_SHARE = 0.5
"""Assumed time of the model's encoder for an item, as a share of the time in which the worker computes its tokens. An
encoder with a tenth of the model's parameters reads four patches or more for each token."""
Bound = tuple[Floats | float, Floats | float]
"""Seconds by decode worker, [R, 1] or one number, and by lender, [L] or one number."""


class Term(ABC):
    """One term of the cost of pairs."""

    name: ClassVar[str]
    """Name in explanations, unique among all terms."""
    by_decode_worker: ClassVar[bool] = False
    """Whether `seconds` depends on the decode worker alone, [R, 1]: it is computed once for all kinds of pairs."""

    @abstractmethod
    def seconds(self, pairs: Pairs) -> Floats | float:
        """Return the seconds of all pairs, broadcastable to [R, L]; the caller does not change the array."""

    def lower_bound(self, pairs: Pairs) -> Bound:
        """Return two parts which, added for a pair, are at most its `seconds`; 0 holds for a term of 0 or more."""
        return 0.0, 0.0


class SourceRead(Term):
    """Reading of the lender from its source before it computes."""

    name = "source_read"

    def seconds(self, pairs: Pairs) -> Floats | float:
        return pairs.reads.seconds


class LenderQueue(Term):
    """Computing of the prompts before this one at the lender."""

    name = "lender_queue"

    def seconds(self, pairs: Pairs) -> Floats:
        seconds: Floats = pairs.workers.queued_prefill_tokens[pairs.lenders] / pairs.lender_tokens_per_s
        return seconds

    def lower_bound(self, pairs: Pairs) -> Bound:
        return 0.0, self.seconds(pairs)


class LenderCompute(Term):
    """Computing of the blocks that the lender lacks."""

    name = "lender_compute"

    def seconds(self, pairs: Pairs) -> Floats:
        return self._computing_s(pairs, pairs.reads.blocks)

    def lower_bound(self, pairs: Pairs) -> Bound:
        # No source holds more than the fullest worker, so no lender computes less than what is left after that.
        inputs = pairs.inputs
        return 0.0, self._computing_s(pairs, np.maximum(inputs.due[pairs.lenders], inputs.most_held))

    @staticmethod
    def _computing_s(pairs: Pairs, blocks: Floats) -> Floats:
        demand = pairs.demand
        tokens = (demand.num_usable_blocks - blocks) * demand.block_tokens
        seconds: Floats = pairs.rates.prefill_fixed_s[pairs.lenders] + tokens / pairs.lender_tokens_per_s
        return seconds


class LenderEncode(Term):
    """Encoding of the items that the lender lacks, whole or in part, among the blocks that it computes."""

    name = "lender_encode"

    def seconds(self, pairs: Pairs) -> Floats | float:
        demand = pairs.demand
        end = demand.num_usable_blocks * demand.block_tokens
        begun = [item for item in demand.own_items if item[0] < end]
        return _encoding_s(begun, pairs.reads.blocks * demand.block_tokens, pairs.lender_tokens_per_s)


class Encode(Term):
    """Encoding of the items that neither the decode worker's blocks nor the loan cover."""

    name = "encode"

    def seconds(self, pairs: Pairs) -> Floats | float:
        demand = pairs.demand
        return _encoding_s(demand.own_items, pairs.blocks * demand.block_tokens, pairs.decode.tokens_per_s)


def _encoding_s(items: Sequence[tuple[int, int]], covered: Floats | float, tokens_per_s: Floats) -> Floats | float:
    """Return the seconds for the items that end after the `covered` tokens, in the shape of those and the rates."""
    tokens = sum((end > covered) * (end - first) for first, end in items)
    seconds: Floats | float = ENCODE_SHARE * tokens / tokens_per_s
    return seconds


class Transfer(Term):
    """Reading of the decode worker from the lender."""

    name = "transfer"

    def seconds(self, pairs: Pairs) -> Floats:
        waiting = pairs.waiting_bytes
        num_bytes = pairs.moved_bytes + waiting if isinstance(waiting, np.ndarray) else pairs.moved_bytes
        seconds: Floats = num_bytes / pairs.bytes_per_s
        seconds += pairs.picked(pairs.rates.loan_overhead_s)
        return seconds

    def lower_bound(self, pairs: Pairs) -> Bound:
        # No pair has less than the smallest overhead nor more than the best rate, and nothing else may be in flight.
        # The bytes that a lender holds already depend on both workers: they count as none.
        least_s = pairs.rates.loan_overhead_s.min()
        if pairs.kind == "computing":
            return least_s + pairs.moved_bytes / pairs.rates.kv_bytes_per_s.max(), 0.0
        return least_s, 0.0


class DecodeQueue(Term):
    """Computing of the prompts before this one at the decode worker."""

    name = "decode_queue"
    by_decode_worker = True

    def seconds(self, pairs: Pairs) -> Floats:
        seconds: Floats = pairs.decode.queued_tokens / pairs.decode.tokens_per_s
        return seconds

    def lower_bound(self, pairs: Pairs) -> Bound:
        return self.seconds(pairs), 0.0


class PromptTail(Term):
    """Computing of the rest of the prompt at the decode worker."""

    name = "prompt_tail"

    def seconds(self, pairs: Pairs) -> Floats:
        seconds: Floats = pairs.decode.fixed_s + pairs.own_s
        return seconds

    def lower_bound(self, pairs: Pairs) -> Bound:
        of_row, of_lender = _own_bound(pairs, 1.0)
        return pairs.decode.fixed_s + of_row, of_lender


class PromptDelay(Term):
    """Delay of the decode worker's decoding streams while it computes the rest of the prompt, summed over them."""

    name = "prompt_delay"

    def seconds(self, pairs: Pairs) -> Floats:
        seconds: Floats = pairs.decode.decoding * pairs.own_s
        return seconds

    def lower_bound(self, pairs: Pairs) -> Bound:
        return _own_bound(pairs, pairs.decode.decoding)


class StreamDelay(Term):
    """Delay of the decode worker's streams because they are one more, summed over them."""

    name = "stream_delay"
    by_decode_worker = True

    def seconds(self, pairs: Pairs) -> Floats:
        seconds: Floats = pairs.decode.running * pairs.decode.stream_delay_s
        return seconds

    def lower_bound(self, pairs: Pairs) -> Bound:
        return self.seconds(pairs), 0.0


def _own_bound(pairs: Pairs, times: Floats | float) -> Bound:
    """Return the bound of `times` [R, 1] the seconds in which decode workers compute their own tokens."""
    # Every lender leaves `least` tokens or more to compute. What it leaves beyond them takes at least as long as on the
    # decode worker where that takes least.
    unit_s, tokens = times / pairs.decode.tokens_per_s, pairs.own_tokens
    if not isinstance(tokens, np.ndarray):
        return unit_s * tokens, 0.0
    least = tokens.min()
    return unit_s * least, (tokens - least) * unit_s.min()


_ALONE = DecodeQueue(), PromptTail()
_READING = Transfer(), *_ALONE
_ALONE_WITH_ITEMS = DecodeQueue(), Encode(), PromptTail()
_READING_WITH_ITEMS = Transfer(), *_ALONE_WITH_ITEMS
TTFT: dict[Kind, tuple[Term, ...]] = {
    "alone": _ALONE,
    "reading": _READING,
    "computing": (SourceRead(), LenderQueue(), LenderCompute(), *_READING),
}
"""Terms of the time to first token of a text, in order of time."""
TTFT_WITH_ITEMS: dict[Kind, tuple[Term, ...]] = {
    "alone": _ALONE_WITH_ITEMS,
    "reading": _READING_WITH_ITEMS,
    "computing": (SourceRead(), LenderQueue(), LenderCompute(), LenderEncode(), *_READING_WITH_ITEMS),
}
"""The same of a prompt with items."""
DELAY: tuple[Term, ...] = PromptDelay(), StreamDelay()
"""Terms of the delay of running streams."""


def ttft_terms(pairs: Pairs) -> tuple[Term, ...]:
    """Return the terms of the pairs' TTFT."""
    return (TTFT_WITH_ITEMS if pairs.demand.own_items else TTFT)[pairs.kind]


@cache
def delay_terms() -> tuple[Term, ...]:
    """Return all terms that count as delay.

    Raises StartError.
    """
    return *DELAY, *further_terms()


@cache
def further_terms() -> tuple[Term, ...]:
    """Return the terms of installed packages, in order of the entry points' names; they count as delay.

    Raises StartError, which names the entry point, for a term that cannot be loaded or does not keep the interface.
    """
    names = {term.name for term in (*TTFT_WITH_ITEMS["computing"], *DELAY)}
    terms = []
    for entry in plugin_names(GROUP):
        try:
            made = load_plugin(GROUP, entry)
            term = made() if isinstance(made, type) else made
            fault = _fault_of(term, names)
        except Exception as error:
            raise StartError(f"{GROUP}.{entry}", f"{type(error).__name__}: {error}") from error
        if fault:
            raise StartError(f"{GROUP}.{entry}", fault)
        names.add(term.name)
        terms.append(term)
    return tuple(terms)


def _fault_of(term: object, taken: set[str]) -> str:
    """Return the reason why an object is no term, tried on two decode workers and three lenders; empty for a term."""
    if not isinstance(term, Term):
        return f"is a {type(term).__name__}, not a {Term.__module__}.Term"
    if not isinstance(getattr(term, "name", None), str) or not term.name or term.name in taken:
        return f"has the name {getattr(term, 'name', None)!r}: each term needs its own"
    workers = WorkerTable.of([WorkerView(name, name < "c", b"", 1, 1, 16, 9, 9) for name in "abcde"])
    inputs = Inputs(
        Demand(9, 2, 3, 4, 1), workers, Hits.of(workers, {"c": 1}), Rates.uniform(5, Priors(1, 1, 1, 1, 1, 1))
    )
    decode, lenders = DecodeWorkers(inputs, np.array([0, 1])), np.array([2, 3, 4])
    for kind in KINDS:
        pairs = Pairs(inputs, decode, kind, None if kind == "alone" else lenders)
        seconds = np.broadcast_to(term.seconds(pairs), pairs.shape)
        of_row, of_lender = term.lower_bound(pairs)
        least = np.broadcast_to(of_row, (2, 1)) + np.broadcast_to(of_lender, (pairs.shape[1],))
        if not np.isfinite(seconds).all():
            return f"gives seconds that are not finite: {seconds.tolist()}"
        if (least > seconds).any():
            return f"has a lower bound above its seconds: {least.tolist()} and {seconds.tolist()}"
    return ""
