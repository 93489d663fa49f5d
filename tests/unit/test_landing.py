"""Reads of one rank over the local transport: whom it stays connected to, and what is left of them."""

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from engine.lending import landing
from engine.lending.landing import OwnRank
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.ranks import BlockPart
from kvtransfer.transport import Pool

BLOCK = 64


def pool_of(value: int) -> Pool:
    return Pool(np.full((4, BLOCK), value, np.uint8))


def test_who_was_not_read_from_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "MAX_PEERS", 2)
    network, pool = LocalNetwork(), pool_of(0)
    reader = LocalTransport(network, "reader")
    reader.register(pool)
    rank = OwnRank(reader, BlockPart(BLOCK), lambda blocks: pool.memory[list(blocks), :8].view(np.uint64))
    lenders = {value: LocalTransport(network, f"lender-{value}") for value in (1, 2, 3)}
    endpoints = {value: lender.register(pool_of(value)) for value, lender in lenders.items()}
    quiet: list[tuple[bytes, ...] | None] = []

    def read_from(values: Sequence[int]) -> None:
        for value in values:
            rank.land(endpoints[value], [0], [1], "flow", lambda prints, gone: quiet.append(prints))
            assert quiet.pop() == (bytes([value]) * 8,)

    read_from([1, 2, 1, 3])
    assert [endpoints[value] in rank._peers for value in (1, 2, 3)] == [True, False, True]
    read_from([2, 3])
    assert [endpoints[value] in rank._peers for value in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize("eager", [True, False])
def test_a_landing_that_is_over_is_freed_at_once(eager: bool) -> None:
    """And does not wait for a collection of cycles, which would be a pause for everybody."""
    network, pool = LocalNetwork(), pool_of(0)
    reader, lender = LocalTransport(network, "reader", eager), LocalTransport(network, "lender")
    reader.register(pool)
    rank = OwnRank(reader, BlockPart(BLOCK), lambda blocks: pool.memory[list(blocks), :8].view(np.uint64))
    endpoint = lender.register(pool_of(7))
    quiet: list[tuple[bytes, ...] | None] = []
    gc.disable()
    try:
        landing = rank.land(endpoint, [0, 2], [1, 3], "flow", lambda prints, gone: quiet.append(prints))
        while reader.step():
            pass
        assert quiet == [(b"\7" * 8,) * 2]
        assert (landing.is_quiet, landing.withdraw(), landing.stuck_s()) == (True, [], 0.0)
        freed = weakref.ref(landing)
        del landing
        assert freed() is None
    finally:
        gc.enable()
