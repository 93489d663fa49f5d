"""What a lender answers to borrowers that are wrong: a typed error, and nothing is held for them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from cluster.errors import Incompatible, InvalidRequest, Overloaded, ServiceError
from cluster.network.error_status import from_proto
from kvcache.block_keys import pack_tokens
from protos import lend_pb2, lend_pb2_grpc
from support.observed_cluster import BLOCK, GOOD, MALFORMED, POOL_TOKENS, VOCAB, Site, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


def want(site: Site, number: int = 1, **fields: Any) -> lend_pb2.BorrowerFrame:
    good = {
        "lender_incarnation": site.prefill.incarnation,
        "model_fingerprint": site.prefill.model_fingerprint,
        "token_ids": GOOD[: 4 * BLOCK],
        "may_compute": True,
    }
    wanted = good | fields
    if not isinstance(wanted["token_ids"], bytes):
        wanted["token_ids"] = pack_tokens(wanted["token_ids"])
    return lend_pb2.BorrowerFrame(requests=[lend_pb2.LoanRequest(number=number, want=lend_pb2.Want(**wanted))])


def release(first: int, count: int, number: int = 1) -> lend_pb2.BorrowerFrame:
    released = lend_pb2.Release(first=first, count=count)
    return lend_pb2.BorrowerFrame(requests=[lend_pb2.LoanRequest(number=number, release=released)])


def nothing_of(number: int) -> lend_pb2.BorrowerFrame:
    return lend_pb2.BorrowerFrame(requests=[lend_pb2.LoanRequest(number=number)])


def open_lend(site: Site) -> Any:
    return lend_pb2_grpc.LendStub(site.link(site.prefill.address)).Lend()


async def responses(call: Any) -> AsyncIterator[lend_pb2.LoanResponse]:
    while (frame := await asyncio.wait_for(call.read(), 60)) is not grpc.aio.EOF:
        for response in frame.responses:
            yield response


async def announced(call: Any, number: int = 1, blocks: int = 4) -> None:
    """Returns when so many blocks of that loan were."""
    async for response in responses(call):
        assert not response.refused
        if response.number == number and (blocks := blocks - len(response.blocks_ready.block_ids)) <= 0:
            return
    raise AssertionError("the stream ended")


async def refused(call: Any, number: int = 1) -> ServiceError:
    """Why that loan is; the stream goes on."""
    async for response in responses(call):
        if response.refused:
            assert response.number == number
            return from_proto(status_pb2.Status.FromString(response.refused))
    raise AssertionError("the stream ended")


@asynccontextmanager
async def loan(site: Site, **fields: Any) -> AsyncIterator[Any]:
    """A loan of four blocks, all of them announced."""
    call = open_lend(site)
    try:
        await call.write(want(site, **fields))
        await announced(call)
        yield call
    finally:
        call.cancel()


WANTS: dict[str, tuple[dict[str, Any], type[ServiceError], str]] = {
    "wrong incarnation": ({"lender_incarnation": b"x" * 16}, Incompatible, "lender_incarnation"),
    "no incarnation": ({"lender_incarnation": b""}, Incompatible, "lender_incarnation"),
    "wrong fingerprint": ({"model_fingerprint": b"x" * 32}, Incompatible, "model_fingerprint"),
    "no tokens": ({"token_ids": []}, InvalidRequest, "first_block"),
    "less than a block": ({"token_ids": GOOD[:15]}, InvalidRequest, "first_block"),
    "first block beyond the last": ({"first_block": 4}, InvalidRequest, "first_block"),
    "first block far beyond": ({"first_block": (1 << 32) - 1}, InvalidRequest, "first_block"),
    "half a token": ({"token_ids": bytes(259)}, InvalidRequest, "token_ids"),
    "token out of range": ({"token_ids": [VOCAB] * 64}, InvalidRequest, "token_ids"),
    "half an address for early words": ({"fast_path": bytes(16)}, InvalidRequest, "fast_path"),
    "more than the pool": ({"token_ids": [1] * (POOL_TOKENS + BLOCK)}, Overloaded, ""),
}


@pytest.mark.parametrize(("fields", "kind", "name"), WANTS.values(), ids=WANTS)
async def test_loans_that_are_refused(site: Site, fields: dict[str, Any], kind: type[ServiceError], name: str) -> None:
    """And nothing else of their stream is."""
    async with loan(site) as call:
        await call.write(want(site, 2, **fields))
        error = await refused(call, 2)
        await call.write(want(site, 3))
        await announced(call, 3)
    assert type(error) is kind
    assert error.field == name


FRAMES: dict[str, tuple[Callable[[Site], lend_pb2.BorrowerFrame], str]] = {
    "nothing of a loan": (lambda _: nothing_of(2), "message"),
    "nothing of the loan there is": (lambda _: nothing_of(1), "message"),
    "the same loan again": (want, "number"),
    "a number below": (lambda site: want(site, 0), "number"),
}


@pytest.mark.parametrize(("frame", "name"), FRAMES.values(), ids=FRAMES)
async def test_what_no_borrower_says(site: Site, frame: Callable[[Site], lend_pb2.BorrowerFrame], name: str) -> None:
    """It ends the stream: what else is meant by it nobody knows."""
    async with loan(site) as call:
        await call.write(frame(site))
        error = await refusal(call, under_way=True)
    assert isinstance(error, InvalidRequest)
    assert error.field == name


async def test_what_concerns_a_loan_that_is_over_or_never_was(site: Site) -> None:
    """Borrower and lender may end it at once."""
    async with loan(site) as call:
        await call.write(release(0, 1, number=7))
        await call.write(want(site, 8))
        await announced(call, 8)
        close = lend_pb2.LoanRequest(number=8, close=lend_pb2.Close())
        await call.write(lend_pb2.BorrowerFrame(requests=[close, *release(0, 1, number=8).requests, close]))
        await call.write(want(site, 9))
        await announced(call, 9)


@pytest.mark.parametrize(("first", "count"), [(4, 1), (3, 2), (0, 0), (0, 5), (1 << 31, 1 << 31), (0, (1 << 32) - 1)])
async def test_release_of_blocks_that_are_not_held(site: Site, first: int, count: int) -> None:
    async with loan(site) as call:
        await call.write(release(first, count))
        error = await refused(call)
    assert isinstance(error, InvalidRequest)
    assert error.field == "release"


async def test_a_release_given_twice(site: Site) -> None:
    async with loan(site) as call:
        await call.write(release(1, 2))
        await call.write(release(2, 1))
        error = await refused(call)
    assert isinstance(error, InvalidRequest)
    assert error.field == "release"


async def test_bytes_that_are_no_message_in_the_middle_of_a_loan(site: Site) -> None:
    """The stream is the lease: it must end, or the blocks would be held for as long as the borrower keeps it open."""
    call = site.link(site.prefill.address).stream_stream("/tandem.internal.v1.Lend/Lend")()
    await call.write(want(site).SerializeToString())
    await asyncio.wait_for(call.read(), 60)
    await call.write(MALFORMED)
    try:
        error = await refusal(call, under_way=True)
    finally:
        call.cancel()
    assert isinstance(error, InvalidRequest)
    assert error.field == "frame"


async def test_a_good_loan_ends_well(site: Site) -> None:
    """That the refusals above are not for another reason."""
    async with loan(site) as call:
        await call.write(release(0, 4))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await call.code() is grpc.StatusCode.OK
