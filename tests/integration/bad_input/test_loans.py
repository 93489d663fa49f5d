"""What a lender's engine answers to borrowers that are wrong: a reason, and nothing is held for them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.network.mux import Channel
from cluster.network.mux_stream import MuxStream
from kvcache.block_keys import block_keys, pack_tokens, root_key
from loans.peers.connection import VERSION
from protos import loans_pb2
from support.observed_cluster import BLOCK, GOOD, MALFORMED, POOL_TOKENS, VOCAB, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = GOOD[: 4 * BLOCK]


class Borrower:
    """A connection with the lender's engine, as a borrower's."""

    def __init__(self, hello: loans_pb2.EngineHello) -> None:
        self.stream = MuxStream(hello.SerializeToString())
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stream.mux.on_note = lambda _: None
        self.stream.mux.on_end.append(self._ended)

    def _ended(self, reason: bytes) -> None:
        self.reason.set_result(reason.decode(errors="replace"))

    def open(self, want: bytes) -> "Loan":
        return Loan(self.stream.mux.open(want))


class Loan:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.num_blocks = 0
        self.has_all: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        channel.on_messages = self._lent
        channel.on_end = lambda reason: self.reason.set_result(reason.decode(errors="replace"))

    def _lent(self, messages: Any) -> None:
        for message in messages:
            self.num_blocks += len(loans_pb2.Lent.FromString(message).blocks.block_ids)
        if self.num_blocks == len(TOKENS) // BLOCK and not self.has_all.done():
            self.has_all.set_result(None)

    def release(self, first: int, count: int) -> None:
        self.channel.send(loans_pb2.Release(first=first, count=count).SerializeToString())

    async def announced(self) -> None:
        await within(self.has_all)


async def within(future: "asyncio.Future[Any]") -> Any:
    async with asyncio.timeout(60):
        return await future


def hello(site: Site, **fields: Any) -> loans_pb2.EngineHello:
    good: dict[str, Any] = {
        "version": VERSION,
        "worker_id": "tester",
        "incarnation": b"t" * 16,
        "wanted_incarnation": site.prefill.incarnation,
        "model_fingerprint": site.prefill.model_fingerprint,
        "endpoint": b"nothing",
    }
    return loans_pb2.EngineHello(**(good | fields))


def want(site: Site, tokens: Any = TOKENS, **fields: Any) -> bytes:
    root = root_key(site.prefill.model_fingerprint, "")
    good: dict[str, Any] = {
        "keys": b"".join(block_keys(root, tokens, BLOCK)),
        "token_ids": pack_tokens(tokens),
        "root": root,
        "may_compute": True,
    }
    return loans_pb2.Want(**(good | fields)).SerializeToString()


@asynccontextmanager
async def borrower(site: Site, **fields: Any) -> AsyncIterator[Borrower]:
    connected = Borrower(hello(site, **fields))
    await connected.stream.connect(site.prefill.loan_address, None)
    try:
        yield connected
    finally:
        connected.stream.end()


@asynccontextmanager
async def loan(site: Site) -> AsyncIterator[tuple[Borrower, Loan]]:
    """A loan of four blocks, all of them announced."""
    async with borrower(site) as connected:
        first = connected.open(want(site))
        await first.announced()
        yield connected, first


WANTS: dict[str, tuple[Callable[[Site], bytes], str]] = {
    "no tokens": (lambda site: want(site, []), "first_block: must be below the 0 blocks"),
    "less than a block": (lambda site: want(site, GOOD[:15]), "first_block: must be below the 0 blocks"),
    "fewer tokens than keys": (
        lambda site: want(site, token_ids=pack_tokens(GOOD[:63])),
        "token_ids: 63 tokens do not",
    ),
    "first block beyond the last": (lambda site: want(site, first_block=4), "first_block: must be below the 4"),
    "first block far beyond": (lambda site: want(site, first_block=(1 << 32) - 1), "first_block: must be below the 4"),
    "token out of range": (lambda site: want(site, [VOCAB] * 64), f"token_ids: must be below {VOCAB}, not {VOCAB}"),
    "keys of another root": (lambda site: want(site, root=b"x" * 16), "keys: do not begin with"),
    "an adapter that it lacks": (lambda site: want(site, adapter=b"a" * 16), "adapter: this worker has no adapter"),
    "more than the pool": (lambda site: want(site, [1] * (POOL_TOKENS + BLOCK)), " blocks in a pool of"),
}


@pytest.mark.parametrize(("message", "reason"), WANTS.values(), ids=WANTS)
async def test_loans_that_are_refused(site: Site, message: Callable[[Site], bytes], reason: str) -> None:
    """And nothing else of their connection is."""
    async with loan(site) as (connected, first):
        refused = connected.open(message(site))
        assert reason in await within(refused.reason)
        await connected.open(want(site)).announced()
        assert not first.reason.done()


MESSAGES: dict[str, tuple[Callable[[Site], bytes], str]] = {
    "half a token": (lambda site: want(site, token_ids=bytes(259)), "a want is not valid"),
    "half a key": (lambda site: want(site, keys=bytes(65)), "a want is not valid"),
    "bytes that are no want": (lambda _: MALFORMED, "a want is not valid"),
}


@pytest.mark.parametrize(("message", "reason"), MESSAGES.values(), ids=MESSAGES)
async def test_what_no_engine_sends(site: Site, message: Callable[[Site], bytes], reason: str) -> None:
    """It ends the connection, and with it all loans: what else is meant by it nobody knows."""
    async with loan(site) as (connected, first):
        connected.open(message(site))
        assert reason in await within(connected.reason)
        assert first.reason.done()


async def test_a_release_that_is_none(site: Site) -> None:
    async with loan(site) as (connected, first):
        first.channel.send(MALFORMED)
        assert "a release is not valid" in await within(connected.reason)


async def test_what_concerns_a_loan_that_is_over(site: Site) -> None:
    """Borrower and lender may end it at once."""
    async with loan(site) as (connected, _):
        second = connected.open(want(site))
        await second.announced()
        second.release(0, 1)
        second.channel.cancel()
        second.release(0, 1)
        await connected.open(want(site)).announced()


@pytest.mark.parametrize(
    "releases",
    [[(4, 1)], [(3, 2)], [(0, 0)], [(0, 5)], [(1 << 31, 1 << 31)], [(0, (1 << 32) - 1)], [(1, 2), (2, 1)]],
    ids=str,
)
async def test_release_of_blocks_that_are_not_held(site: Site, releases: list[tuple[int, int]]) -> None:
    async with loan(site) as (_, opened):
        for first, count in releases:
            opened.release(first, count)
        assert "that this loan does not hold" in await within(opened.reason)


async def test_a_good_loan_ends_well(site: Site) -> None:
    """That the refusals above are not for another reason."""
    async with loan(site) as (connected, opened):
        opened.release(0, 4)
        opened.channel.cancel()
        await connected.open(want(site)).announced()
        assert not opened.reason.done()
