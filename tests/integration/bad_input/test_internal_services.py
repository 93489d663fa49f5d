"""What peers say to each other inside a cluster: bad input is a typed error there too, and serving goes on."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.errors import AlreadyExists, Incompatible, InvalidRequest, Overloaded, ServiceError, Unavailable
from cluster.network.mux_stream import MuxServer, MuxStream
from cluster.network.rpc import PROTOCOL
from protos import decode_pb2, loans_pb2, membership_pb2, membership_pb2_grpc
from protos import inference_pb2 as pb
from support.observed_cluster import GOOD, MALFORMED, POOL_TOKENS, VOCAB, Site, decode, refusal
from support.ports import free_port
from tandem.client import Client

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    "beam search": ({"sampling": pb.Sampling(max_tokens=4, beam_width=2)}, InvalidRequest, "sampling.beam_width"),
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
    assert (await decode(site.decode, decode_pb2.DecodeRequest(**good)))[-1].HasField("finish")
    with pytest.raises(ServiceError) as refused:
        await decode(site.decode, decode_pb2.DecodeRequest(**(good | fields)))
    assert type(refused.value) is kind
    assert refused.value.field == name


@pytest.mark.parametrize("wrong", ["address", "incarnation", "self"])
async def test_a_lender_that_is_not_there_costs_a_recompute_only(site: Site, wrong: str) -> None:
    lender = loans_pb2.Holder(
        worker_id="prefill-0", loan_address=site.prefill.loan_address, incarnation=site.prefill.incarnation
    )
    if wrong == "address":
        lender.loan_address, lender.incarnation = f"127.0.0.1:{free_port()}", b"y" * 16  # no connection to it stands
    elif wrong == "incarnation":
        lender.incarnation = b"x" * 16
    else:
        lender.loan_address, lender.incarnation = site.decode.loan_address, site.decode.incarnation
    request = decode_pb2.DecodeRequest(
        worker_incarnation=site.decode.incarnation,
        prompt_token_ids=GOOD,
        sampling=pb.Sampling(max_tokens=4),
        cache_salt=wrong,
        lender=decode_pb2.Lender(worker=lender, may_compute=True),
    )
    finish = (await decode(site.decode, request))[-1].finish
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


@asynccontextmanager
async def sending(*events: membership_pb2.WorkerMessage) -> AsyncIterator[str]:
    """Serve connections that bring these events; yield the address."""

    def accept(stream: MuxStream, opening: bytes) -> None:
        for event in events:
            stream.mux.note(event.SerializeToString())

    server = MuxServer(accept)
    yield f"127.0.0.1:{await server.start('127.0.0.1', 0, 'port')}"
    server.close()


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
    assert (type(error), error.field) == (InvalidRequest, "hello")


async def test_two_hellos(site: Site) -> None:
    error = await join(site, hello(site), hello(site))
    assert (type(error), error.field) == (InvalidRequest, "hello")
    async with sending(hello(site)) as address:
        error = await join(site, hello(site, stream_address=address))
    assert (type(error), error.field) == (InvalidRequest, "hello")


async def test_an_event_that_says_nothing_and_one_that_is_no_message(site: Site) -> None:
    async with sending(membership_pb2.WorkerMessage()) as address:
        error = await join(site, hello(site, stream_address=address))
    assert (type(error), error.field) == (InvalidRequest, "load")

    def accept(stream: MuxStream, opening: bytes) -> None:
        stream.mux.note(MALFORMED)

    server = MuxServer(accept)
    port = await server.start("127.0.0.1", 0, "port")
    error = await join(site, hello(site, stream_address=f"127.0.0.1:{port}"))
    assert isinstance(error, Unavailable)
    assert "not a valid message" in error.message
    server.close()
    await only_one_decode_worker(site)


ANOTHER_OF_ITS_NAME = {"worker_id": "decode-0", "incarnation": b"x" * 16, "address": "x:1"}
VERSIONS = f"this router version {PROTOCOL}"
HELLOS: list[tuple[dict[str, Any], type[ServiceError], str, str]] = [
    # A worker that joins with one of these would fail every client's request, not only its own.
    ({"worker_id": ""}, InvalidRequest, "worker_id", ""),
    ({"address": ""}, InvalidRequest, "address", ""),
    ({"incarnation": b""}, InvalidRequest, "incarnation", ""),
    ({"role": membership_pb2.ROLE_UNSPECIFIED}, InvalidRequest, "role", ""),
    ({"role": 77}, InvalidRequest, "role", ""),
    ({"model_fingerprint": b""}, InvalidRequest, "model_fingerprint", ""),
    ({"block_tokens": 0}, InvalidRequest, "block_tokens", ""),
    ({"num_blocks": 0}, InvalidRequest, "num_blocks", ""),
    ({"block_bytes": 0}, InvalidRequest, "block_bytes", ""),
    ({"stream_address": ""}, Incompatible, "stream_port", ""),
    ({"stream_address": "127.0.0.1:1"}, Unavailable, "", "(stream_port)"),  # nobody listens there
    ({"protocol": 0}, Incompatible, "protocol", VERSIONS),  # of before versions were told
    ({"protocol": PROTOCOL + 1}, Incompatible, "protocol", VERSIONS),
    # With its name, the worker has another revision of this model, and is asked for its files.
    ({"config_fingerprint": b"x" * 16, "model": "another"}, Incompatible, "model", ""),
    (ANOTHER_OF_ITS_NAME, AlreadyExists, "worker_id", "x:1"),
]


@pytest.mark.parametrize(("fields", "kind", "field", "said"), HELLOS, ids=[str(fields)[:40] for fields, *_ in HELLOS])
async def test_joining_with_a_hello_that_is_refused(
    site: Site, fields: dict[str, Any], kind: type[ServiceError], field: str, said: str
) -> None:
    error = await join(site, hello(site, **fields))
    assert type(error) is kind
    assert field in ("", error.field)
    assert said in error.message
    assert fields is not ANOTHER_OF_ITS_NAME or site.decode.address in error.message
    await only_one_decode_worker(site)


async def test_cache_events_that_make_no_sense_ask_for_a_snapshot(site: Site) -> None:
    """Keys that are no whole keys, sequences from elsewhere: nothing breaks, and a resync is asked for."""
    stub = membership_pb2_grpc.MembershipStub(site.link(site.router.address))
    call = stub.Join()
    events = [membership_pb2.CacheEvent(parent=b"", stored=b"odd", removed=b"never stored")]
    cache = membership_pb2.CacheEvents(sequence=1 << 60, events=events)
    async with sending(membership_pb2.WorkerMessage(cache=cache)) as address:
        await call.write(hello(site, stream_address=address))
        assert (await call.read()).HasField("welcome")
        assert (await asyncio.wait_for(call.read(), 60)).HasField("resync")
    call.cancel()
    await only_one_decode_worker(site)
