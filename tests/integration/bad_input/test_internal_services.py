"""What peers say to each other inside a cluster: bad input is a typed error there too, and serving goes on."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from cluster.errors import (
    AlreadyThere,
    Incompatible,
    InvalidRequest,
    Overloaded,
    ServiceError,
    from_proto,
)
from cluster.protocol import PROTOCOL
from engine.keys import pack_tokens
from protos import decode_pb2, decode_pb2_grpc, lend_pb2, lend_pb2_grpc, membership_pb2, membership_pb2_grpc
from protos import inference_pb2 as pb
from support.overheard_site import BLOCK, GOOD, MALFORMED, POOL_TOKENS, VOCAB, Site, refusal
from tandem.client import Client

pytestmark = pytest.mark.asyncio(loop_scope="module")


# ------------------------------------------------------------------------------------------------- lending


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
    while (frame := await asyncio.wait_for(call.read(), 10)) is not grpc.aio.EOF:
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
    "half an address for early words": ({"early": bytes(16)}, InvalidRequest, "early"),
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
    await asyncio.wait_for(call.read(), 10)
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


# ------------------------------------------------------------------------------------------------ decoding

DECODES: dict[str, tuple[dict[str, Any], type[ServiceError], str]] = {
    "wrong incarnation": ({"worker_incarnation": b"x" * 16}, Incompatible, "worker_incarnation"),
    "no incarnation": ({"worker_incarnation": b""}, Incompatible, "worker_incarnation"),
    "no prompt": ({"prompt_token_ids": []}, InvalidRequest, "prompt_token_ids"),
    "token out of range": ({"prompt_token_ids": [1, VOCAB]}, InvalidRequest, "prompt_token_ids"),
    "emitted token out of range": ({"emitted_token_ids": [VOCAB]}, InvalidRequest, "emitted_token_ids"),
    "nothing to generate": ({"sampling": pb.Sampling(max_tokens=0)}, InvalidRequest, "sampling.max_tokens"),
    "less than nothing": ({"sampling": pb.Sampling(max_tokens=-5)}, InvalidRequest, "sampling.max_tokens"),
    "all emitted already": ({"emitted_token_ids": [1, 2, 3, 4]}, InvalidRequest, "sampling.max_tokens"),
    "no choice": ({"sampling": pb.Sampling(max_tokens=4, n=0)}, InvalidRequest, "sampling.n"),
    "too many choices": ({"sampling": pb.Sampling(max_tokens=4, n=1 << 30)}, InvalidRequest, "sampling.n"),
    "too many beams": (
        {"sampling": pb.Sampling(max_tokens=4, beam_width=1 << 30)},
        InvalidRequest,
        "sampling.beam_width",
    ),
    "more choices than beams": (
        {"sampling": pb.Sampling(max_tokens=4, n=3, beam_width=2)},
        InvalidRequest,
        "sampling.n",
    ),
    "all choices finished": ({"finished_choices": [0]}, InvalidRequest, "finished_choices"),
    "a choice that there is not": ({"finished_choices": [7]}, InvalidRequest, "emitted_choices"),
    "tokens of a choice that there is not": (
        {"emitted_choices": [decode_pb2.EmittedChoice(index=1, token_ids=[1])]},
        InvalidRequest,
        "emitted_choices",
    ),
    "a token out of range in another choice": (
        {"emitted_choices": [decode_pb2.EmittedChoice(index=0, token_ids=[VOCAB])]},
        InvalidRequest,
        "emitted_choices",
    ),
    "more prompt scores than prompt": ({"emitted_prompt_logprobs": 1 << 20}, InvalidRequest, "emitted_prompt_logprobs"),
    "more than the pool": ({"sampling": pb.Sampling(max_tokens=POOL_TOKENS)}, Overloaded, "max_tokens"),
    "a grammar for the sim engine": (
        {"sampling": pb.Sampling(max_tokens=4, structured=pb.StructuredOutput(json_object=True))},
        InvalidRequest,
        "sampling.structured",
    ),
    "two grammars": (
        {"sampling": pb.Sampling(max_tokens=4, structured=pb.StructuredOutput(regex="a", choice=["a"]))},
        InvalidRequest,
        "sampling.structured",
    ),
}


@pytest.mark.parametrize(("fields", "kind", "name"), DECODES.values(), ids=DECODES)
async def test_placed_requests_that_are_refused(
    site: Site, fields: dict[str, Any], kind: type[ServiceError], name: str
) -> None:
    good = {
        "worker_incarnation": site.decode.incarnation,
        "prompt_token_ids": GOOD,
        "sampling": pb.Sampling(max_tokens=4, temperature=0.0, top_p=1.0),
    }
    stub = decode_pb2_grpc.DecodeStub(site.link(site.decode.address))
    assert [m async for m in stub.Generate(decode_pb2.DecodeRequest(**good))][-1].HasField("finish")
    error = await refusal(stub.Generate(decode_pb2.DecodeRequest(**(good | fields))))
    assert type(error) is kind
    assert error.field == name


@pytest.mark.parametrize("wrong", ["address", "incarnation", "self"])
async def test_a_lender_that_is_not_there_costs_a_recompute_only(site: Site, wrong: str) -> None:
    lender = lend_pb2.Holder(worker_id="prefill-0", address=site.prefill.address, incarnation=site.prefill.incarnation)
    if wrong == "address":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            lender.address = f"127.0.0.1:{unused.getsockname()[1]}"
    elif wrong == "incarnation":
        lender.incarnation = b"x" * 16
    else:
        lender.address, lender.incarnation = site.decode.address, site.decode.incarnation
    request = decode_pb2.DecodeRequest(
        worker_incarnation=site.decode.incarnation,
        prompt_token_ids=GOOD,
        sampling=pb.Sampling(max_tokens=4),
        cache_salt=wrong,
        lender=decode_pb2.Lender(worker=lender, may_compute=True),
    )
    stub = decode_pb2_grpc.DecodeStub(site.link(site.decode.address))
    finish = [message async for message in stub.Generate(request, timeout=10)][-1].finish
    kv = finish.receipt.kv
    assert kv.loan_failure
    # Asked to lend to itself, it may have computed some for the loan, and finds them in its own cache.
    assert kv.computed_blocks + (kv.reused_blocks if wrong == "self" else 0) == 5
    assert kv.moved_blocks == 0


# ------------------------------------------------------------------------------------------------- joining


async def join(site: Site, *messages: membership_pb2.WorkerMessage) -> ServiceError:
    stub = membership_pb2_grpc.MembershipStub(site.link(site.router.address))

    async def outgoing() -> AsyncIterator[membership_pb2.WorkerMessage]:
        for message in messages:
            yield message
        await asyncio.sleep(60)  # a stream that ends would be a worker that leaves

    return await refusal(stub.Join(outgoing()))


def hello(site: Site, **fields: Any) -> membership_pb2.WorkerMessage:
    changed = membership_pb2.Hello()
    changed.CopyFrom(site.decode)
    changed.worker_id = "a-newcomer"
    for name, value in fields.items():
        setattr(changed, name, value)
    return membership_pb2.WorkerMessage(hello=changed)


async def only_one_decode_worker(site: Site) -> None:
    """A newcomer's stream has ended, and the newcomer with it."""
    give_up_at = time.monotonic() + 10
    async with Client(site.router.address) as client:
        while True:
            if (await client.list_models())[0].decode_workers == 1:
                return
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["load", "cache", "empty"])
async def test_joining_without_hello(site: Site, kind: str) -> None:
    first = {
        "load": membership_pb2.WorkerMessage(load=membership_pb2.LoadReport()),
        "cache": membership_pb2.WorkerMessage(cache=membership_pb2.CacheEvents()),
        "empty": membership_pb2.WorkerMessage(),
    }[kind]
    error = await join(site, first)
    assert isinstance(error, InvalidRequest)
    assert error.field == "hello"


async def test_two_hellos(site: Site) -> None:
    error = await join(site, hello(site), hello(site))
    assert isinstance(error, InvalidRequest)
    assert error.field == "hello"


async def test_a_message_that_says_nothing(site: Site) -> None:
    error = await join(site, hello(site), membership_pb2.WorkerMessage())
    assert isinstance(error, InvalidRequest)
    assert error.field == "load"
    await only_one_decode_worker(site)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_id", ""),
        ("address", ""),
        ("incarnation", b""),
        ("role", membership_pb2.ROLE_UNSPECIFIED),
        ("role", 77),
        ("model_fingerprint", b""),
        ("block_tokens", 0),
        ("num_blocks", 0),
        ("block_bytes", 0),
    ],
)
async def test_a_hello_that_would_break_placement(site: Site, name: str, value: Any) -> None:
    """A worker that joins with it would fail every client's request, not only its own."""
    error = await join(site, hello(site, **{name: value}))
    assert isinstance(error, InvalidRequest)
    assert error.field == name


@pytest.mark.parametrize("other", [0, PROTOCOL + 1])
async def test_joining_with_another_protocol(site: Site, other: int) -> None:
    """0: of before versions were told."""
    error = await join(site, hello(site, protocol=other))
    assert isinstance(error, Incompatible)
    assert error.field == "protocol"
    assert f"this router version {PROTOCOL}" in error.message
    await only_one_decode_worker(site)


async def test_joining_with_another_models_config(site: Site) -> None:
    error = await join(site, hello(site, config_fingerprint=b"x" * 16))
    assert isinstance(error, Incompatible)
    assert error.field == "model"


async def test_joining_by_the_name_of_a_worker_that_is_there(site: Site) -> None:
    error = await join(site, hello(site, worker_id=site.decode.worker_id, incarnation=b"x" * 16, address="x:1"))
    assert isinstance(error, AlreadyThere)
    assert error.field == "worker_id"
    assert site.decode.address in error.message
    assert "x:1" in error.message
    await only_one_decode_worker(site)


async def test_cache_events_that_make_no_sense_ask_for_a_snapshot(site: Site) -> None:
    """Keys that are no whole keys, sequences from elsewhere: nothing breaks, and a resync is asked for."""
    stub = membership_pb2_grpc.MembershipStub(site.link(site.router.address))
    call = stub.Join()
    await call.write(hello(site))
    assert (await call.read()).HasField("welcome")
    events = [membership_pb2.CacheEvent(parent=b"", stored=b"odd", removed=b"never stored")]
    await call.write(membership_pb2.WorkerMessage(cache=membership_pb2.CacheEvents(sequence=1 << 60, events=events)))
    assert (await asyncio.wait_for(call.read(), 10)).HasField("resync")
    call.cancel()
    await only_one_decode_worker(site)
