"""The endpoint picker over real gRPC: a gateway's requests are placed as the router's own."""

import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.router.picker_site import PickerSite, facts_of, picker_site
from cluster.network.rpc import channel
from kvcache.block_keys import block_keys, root_key
from protos import membership_pb2
from router.config import RouterConfig
from router.frontend.envoy.service import NAME
from router.models.config import FleetConfig
from router.models.model_runtimes import ModelRuntimes
from router.runtime import start_router
from router.stock.facts import ServerAccess, ServerApi
from router.stock.member import Joined, Surroundings, hello_of
from router.stock.sources.servers import Server
from support.api_keys import keys_file
from support.gateway import BUFFERED, DUPLEX, NONE, PARTIAL, STREAMED, WHOLE, Gateway, Sent, split
from support.picker_site import ask, body_of, calling, drive, num_counted
from support.processes import until
from support.served_models import write_word_tokenizer
from support.sim_directories import write_sim_model

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
WORDS = " ".join(f"word{number}" for number in range(100))
ANSWER = Sent(split(b'{"choices": []}', [4]))
MODES = (DUPLEX, DUPLEX)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_sim_model(tmp_path / "words", 400, context=2000)
    write_word_tokenizer(path)
    return path


def request_of(
    body: bytes | None, modes: tuple[int, int] = MODES, cuts: Sequence[int] = (7, 90), **options: Any
) -> Gateway:
    return Gateway(Sent([] if body is None else split(body, cuts)), ANSWER, modes, **options)


def keys_of(site: PickerSite, text: str) -> list[bytes]:
    numbers = [int(word.removeprefix("word")) for word in text.split()]
    return block_keys(root_key(site.model.fleet.workers[0].hello.model_fingerprint, "", b""), numbers, 16, ())


def holds(site: PickerSite, worker: Any, text: str) -> None:
    stored = membership_pb2.CacheEvent(stored=b"".join(keys_of(site, text)))
    assert site.model.fleet.cache_changed(worker, membership_pb2.CacheEvents(sequence=0, events=[stored]))


async def is_over(site: PickerSite) -> None:
    """Wait until nothing is counted any more."""
    dispatcher = site.model.dispatcher
    await until(
        lambda: not (dispatcher.admission.num_running or num_counted(site) or dispatcher.num_waiting),
        "the exchange is over for the router, too",
    )


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED, PARTIAL])
async def test_a_prompt_goes_to_the_server_that_holds_its_blocks(folder: Path, mode: int) -> None:
    async with picker_site(folder) as site:
        site.join(A)
        holds(site, site.join(B), WORDS)
        site.join(C)
        body = body_of(prompt=WORDS, max_tokens=8)
        gateway = request_of(body, (mode, DUPLEX))
        async with calling(site.address) as call:
            await drive(call, gateway)
            gateway.check_forwarded(B, body)
            (placed,) = site.model.dispatcher.admission.running
            assert not placed.started
            assert num_counted(site) == 1
            await drive(call, gateway, responds=True)
        assert gateway.response.went_on == ANSWER.body
        await is_over(site)
        assert placed.started
        assert not placed.failed
        assert site.sent == [(B, keys_of(site, WORDS))]


@pytest.mark.parametrize(
    ("kind", "chunks", "status", "asked", "hit", "timed"),
    [
        ("text/event-stream", [b"data: {}", b'data: {"usage": {"cached_tokens": 32}}'], 200, 6, 2, 1),
        ("application/json", [b'{"usage": {"cached_tokens": 32}}'], 200, 6, 2, 0),
        ("text/event-stream", [b""], 200, 0, 0, 0),
        ("application/json", [b'{"error": {}}'], 400, 0, 0, 0),
    ],
)
async def test_placement_learns_from_answers(
    folder: Path, kind: str, chunks: list[bytes], status: int, asked: int, hit: int, timed: int
) -> None:
    """What was cached always; how long prompts take only from streams, whose first bytes are a token."""
    async with picker_site(folder) as site:
        worker = site.join(A)
        gateway = request_of(body_of(prompt=WORDS, max_tokens=64), status=status)
        gateway.response.given = Sent(chunks, trailers=True)
        gateway.response.headers["content-type"] = kind
        await ask(site.address, gateway)
        await is_over(site)
        assert (worker.asked_blocks, worker.hit_blocks) == (asked, hit)
        assert site.model.fleet.ttft_scores.num_seen == timed
        assert not worker.failing


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED, STREAMED])
async def test_a_lender_is_named_in_the_body(folder: Path, mode: int) -> None:
    async with picker_site(folder, decode_prefill_tokens_per_s=10.0) as site:
        site.join(A)
        site.join(B, role="prefill")
        body = body_of(prompt=WORDS, max_tokens=8, kv_transfer_params=None) + b"\n"
        gateway = await ask(site.address, request_of(body, (mode, DUPLEX), at_once=True))
        assert gateway.endpoints == [A]
        forwarded = gateway.request.went_on
        assert json.loads(forwarded) == json.loads(body) | {"kv_transfer_params": {"lender": f"http://{B}"}}
        assert forwarded.startswith(body.rstrip()[:-1])
        gateway.check_forwarded(A, forwarded)
        own = body_of(prompt=WORDS, max_tokens=8, kv_transfer_params={"do_remote_decode": True})
        gateway = await ask(site.address, request_of(own, (mode, DUPLEX), at_once=True))
        gateway.check_forwarded(A, own)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"not JSON", {}),
        (b"\xff\xfe", {}),
        (b"[" * 4000, {}),
        (body_of(prompt=WORDS, best_of=3), {}),
        (json.dumps({"model": "another", "prompt": "word1"}).encode(), {}),
        (
            body_of(messages=[{"role": "user", "content": "a model without a template"}]),
            {":path": "/v1/chat/completions"},
        ),
        (body_of(prompt=WORDS), {":path": "/v1/audio/speech"}),
        (None, {":path": "/v1/models", ":method": "GET"}),
    ],
)
async def test_what_cannot_be_read_goes_where_least_runs(folder: Path, body: bytes | None, headers: Any) -> None:
    async with picker_site(folder) as site:
        holds(site, site.join(A, running=5, decoding=5), WORDS)
        site.join(B, running=1, decoding=1)
        site.join(C, running=9, decoding=9)
        gateway = await ask(site.address, request_of(body, headers=headers))
        gateway.check_forwarded(B, body or b"")
        await is_over(site)


@pytest.mark.parametrize("mode", [STREAMED, NONE])
async def test_a_mode_that_hides_the_body_is_picked_for_by_load(folder: Path, mode: int) -> None:
    async with picker_site(folder) as site:
        holds(site, site.join(A, running=5, decoding=5), WORDS)
        site.join(B, running=1, decoding=1)
        gateway = await ask(site.address, request_of(body_of(prompt=WORDS), (mode, NONE)))
        gateway.check_forwarded(B, body_of(prompt=WORDS))
        await is_over(site)


async def test_only_endpoints_of_the_subset_are_picked(folder: Path) -> None:
    def within(*endpoints: str) -> Any:
        hint = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": list(endpoints)}}
        return request_of(body_of(prompt=WORDS), metadata=hint)

    async with picker_site(folder) as site:
        holds(site, site.join(A), WORDS)
        site.join(B, running=5)
        site.join(C, running=2)
        assert (await ask(site.address, request_of(body_of(prompt=WORDS)))).endpoints == [A]
        assert (await ask(site.address, within(B, "10.9.9.9:8000"))).endpoints == [B]
        assert (await ask(site.address, within(B, C))).endpoints == [C]
        for nobody in (within(), within("10.9.9.9:8000")):
            gateway = await ask(site.address, nobody)
            assert gateway.immediate.status.code == 503
            assert b"endpoints that the gateway allows is ready" in gateway.immediate.body
        await is_over(site)


async def test_fallbacks_are_the_next_best_and_no_lender(folder: Path) -> None:
    async with picker_site(folder, epp_fallbacks=2, decode_prefill_tokens_per_s=10.0) as site:
        holds(site, site.join(A), WORDS)
        site.join(B, running=3)
        site.join(C, running=1)
        gateway = await ask(site.address, request_of(body_of(prompt="word1 word2")))
        (listed,) = gateway.endpoints
        assert sorted(listed.split(",")) == [A, B, C]
        gateway.check_forwarded(listed, gateway.request.given.body)


async def test_the_lowest_priority_is_shed_first(folder: Path) -> None:
    """One runs, one may wait: the newcomer of a higher priority takes its place. vLLM's lower numbers go first."""
    async with picker_site(folder, max_queued=1) as site:
        site.join(A, num_blocks=8)
        large = {"prompt": WORDS, "max_tokens": 20}
        async with calling(site.address) as first, calling(site.address) as second, calling(site.address) as third:
            running = request_of(body_of(**large))
            await drive(first, running)
            low, high = request_of(body_of(**large, priority=1)), request_of(body_of(**large, priority=-1))
            waiting = asyncio.ensure_future(drive(second, low))

            await until(lambda: site.model.dispatcher.num_waiting == 1, "the second waits")
            preferred = asyncio.ensure_future(drive(third, high))
            await waiting
            assert low.immediate.status.code == 429
            headers = {each.header.key: each.header.raw_value for each in low.immediate.headers.set_headers}
            assert int(headers["retry-after"]) >= 1
            assert b"displaced from a full queue" in low.immediate.body
            assert await second.read() is grpc.aio.EOF
            assert not preferred.done()
            await drive(first, running, responds=True)
            await preferred
            assert high.endpoints == [A]
            await drive(third, high, responds=True)
        await is_over(site)


async def test_a_server_that_fails_is_left_alone(folder: Path) -> None:
    async with picker_site(folder) as site:
        worker = site.join(A)
        holds(site, worker, WORDS)
        site.join(B)
        body = body_of(prompt=WORDS)
        assert (await ask(site.address, request_of(body, status=503))).endpoints == [A]
        await is_over(site)
        assert worker.failing
        link: Any = site.model.links.to(worker)
        assert link.failed.is_set()
        assert (await ask(site.address, request_of(body))).endpoints == [B]


async def test_a_request_that_another_endpoint_served_counts_as_failed(folder: Path) -> None:
    async with picker_site(folder, epp_fallbacks=1) as site:
        worker = site.join(A)
        holds(site, worker, WORDS)
        site.join(B)
        served = {"envoy.lb": {"x-gateway-destination-endpoint-served": B}}
        assert (await ask(site.address, request_of(body_of(prompt=WORDS), metadata=served))).endpoints == [f"{A},{B}"]
        await is_over(site)
        assert worker.failing


@pytest.mark.parametrize("when", ["body", "queue", "picked", "answering"])
async def test_a_gateway_that_dies_leaves_nothing_behind(folder: Path, when: str) -> None:
    async with picker_site(folder) as site:
        site.join(A, num_blocks=8, available_blocks=0 if when == "queue" else 8)
        gateway = request_of(body_of(prompt=WORDS, max_tokens=20))
        async with calling(site.address) as call:
            if when == "body":
                await call.write(gateway.next(gateway.request))
                await call.write(gateway.next(gateway.request))
            elif when == "queue":
                waiting = asyncio.ensure_future(drive(call, gateway))

                await until(lambda: site.model.dispatcher.num_waiting == 1, "it waits")
                waiting.cancel()
            else:
                await drive(call, gateway)
                assert site.model.dispatcher.admission.num_running == 1
            if when == "answering":
                await drive(call, gateway, responds=True, limit=lambda: bool(gateway.response.went_on))
        await is_over(site)
        site.model.fleet.reported(
            site.model.fleet.workers[0], membership_pb2.LoadReport(step=2, available_blocks=8, num_blocks=8)
        )
        assert (await ask(site.address, request_of(body_of(prompt=WORDS, max_tokens=20)))).endpoints == [A]


async def test_a_gateway_that_ends_its_call_leaves_the_queue(folder: Path) -> None:
    async with picker_site(folder) as site, calling(site.address) as call:
        site.join(A, num_blocks=8, available_blocks=0)
        gateway = request_of(body_of(prompt=WORDS, max_tokens=20))
        while (message := gateway.next(gateway.request)) is not None:
            await call.write(message)

        await until(lambda: site.model.dispatcher.num_waiting == 1, "it waits")
        await call.done_writing()
        await until(lambda: site.model.dispatcher.num_waiting == 0, "it has left")
        assert await call.read() is grpc.aio.EOF


async def test_a_filter_may_answer_while_the_request_waits(folder: Path) -> None:
    async with picker_site(folder) as site, calling(site.address) as call:
        site.join(A, num_blocks=8, available_blocks=0)
        gateway = request_of(body_of(prompt=WORDS, max_tokens=20))
        while (message := gateway.next(gateway.request)) is not None:
            await call.write(message)
        await drive(call, gateway, responds=True)
        assert gateway.response.went_on == ANSWER.body


async def test_an_order_that_is_wrong_ends_the_call(folder: Path) -> None:
    async with picker_site(folder) as site, calling(site.address) as call:
        gateway = request_of(body_of(prompt=WORDS))
        await call.write(message := gateway.next(gateway.request))
        await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError, match="request_headers: came a second time"):
            await call.read()
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_picker_that_stops_lets_answers_go_on(folder: Path) -> None:
    async with picker_site(folder) as site, calling(site.address) as answering, calling(site.address) as waiting:
        site.join(A, num_blocks=8)
        await drive(answering, request_of(body_of(prompt=WORDS, max_tokens=20)))
        late = request_of(body_of(prompt=WORDS, max_tokens=20))
        while (message := late.next(late.request)) is not None:
            await waiting.write(message)

        await until(lambda: site.model.dispatcher.num_waiting == 1, "the second waits")
        site.drain.begin()
        async with calling(site.address) as new:
            assert await new.code() == grpc.StatusCode.UNAVAILABLE
        site.drain.end_all()
        assert await answering.code() == grpc.StatusCode.OK
        assert await waiting.code() == grpc.StatusCode.UNAVAILABLE
        await is_over(site)


async def test_every_mode_split_and_end_over_grpc(folder: Path) -> None:
    seeds = random.Random(1)
    async with picker_site(folder) as site:
        site.join(A)
        for mode in (NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX):
            for response_mode in (NONE, STREAMED, BUFFERED, DUPLEX):
                body = body_of(prompt=" ".join(f"word{seeds.randrange(300)}" for _ in range(60)))
                given = Sent(split(body, [seeds.randrange(len(body)) for _ in range(seeds.randrange(4))]))
                answer = Sent(split(seeds.randbytes(90), [seeds.randrange(90) for _ in range(seeds.randrange(3))]))
                given.trailers = answer.trailers = mode in (*WHOLE, DUPLEX) and seeds.random() < 0.5
                at_once = seeds.random() < 0.5
                gateway = await ask(site.address, Gateway(given, answer, (mode, response_mode), at_once=at_once))
                gateway.check_forwarded(A, body)
                await is_over(site)


async def test_health_tells_by_the_service_and_by_the_servers(folder: Path) -> None:
    async with picker_site(folder, no_worker_grace_s=0.01) as site, channel(site.address) as to_picker:
        health = health_pb2_grpc.HealthStub(to_picker)

        async def status(service: str) -> int:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            return int(answer.status)

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert [await status(each) for each in ("", NAME, "liveness")] == [serving] * 3

        async def is_unready() -> bool:
            return await status("readiness") == not_serving

        async def is_ready() -> bool:
            return await status("readiness") == serving

        await until(is_unready, "it is not ready without servers")
        gateway = await ask(site.address, request_of(body_of(prompt=WORDS)))
        assert gateway.immediate.status.code == 503
        site.join(A)
        await until(is_ready, "it is ready")


async def test_keys_of_clients_are_checked(folder: Path, tmp_path: Path) -> None:
    sha256 = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"  # of "foo"
    keys = keys_file(tmp_path, {"name": "k", "sha256": sha256})
    async with picker_site(folder, api_keys_file=keys, internal_port=0) as site:
        site.join(A)
        assert (await ask(site.address, request_of(body_of(prompt=WORDS)))).immediate.status.code == 401
        with_key = request_of(body_of(prompt=WORDS), headers={"authorization": "Bearer foo"})
        assert (await ask(site.address, with_key)).endpoints == [A]


async def test_a_router_serves_its_picker(folder: Path) -> None:
    """The whole router, with a fleet whose only server is away."""
    fleet = {"model": folder, "name": "m", "servers": [{"url": "http://127.0.0.1:9"}]}
    settings = {"fleet": fleet, "port": 0, "epp_port": 0, "no_worker_grace_s": 0.01}
    router = await start_router(RouterConfig.parse(settings))
    try:
        assert router.addresses.picker
        async with channel(router.addresses.picker) as to_picker:
            answer = await health_pb2_grpc.HealthStub(to_picker).Check(health_pb2.HealthCheckRequest(service=NAME))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await router.stop()


async def test_requests_of_a_gateway_count_in_reports_of_a_server(folder: Path) -> None:
    """As the router joins stock servers itself; of two requests without blocks each is told apart."""
    async with picker_site(folder) as site:
        config = FleetConfig.parse({"servers": [{"url": f"http://{A}"}]})
        access = ServerAccess(None, {})  # type: ignore[arg-type] # the server is never called
        around = Surroundings(config, ModelRuntimes([site.model], ""), access, 10.0, lambda model: None)
        server = Server(f"http://{A}", config.servers[0], "both")
        hello = hello_of(facts_of("m"), server, site.model, A)
        joined = Joined(facts_of("m"), hello, server, site.model, ServerApi(server.url, access), around)
        joined.report_now()
        site.model.on_worker_report()
        gets = [request_of(None, headers={":method": "GET", ":path": "/v1/models"}) for _ in range(2)]
        asks = request_of(body_of(prompt=WORDS, max_tokens=20))
        async with contextlib.AsyncExitStack() as stack:
            calls = [await stack.enter_async_context(calling(site.address)) for _ in range(3)]
            for call, gateway in zip(calls, [*gets, asks], strict=True):
                await drive(call, gateway)
            load = joined.worker.load
            assert (load.running, load.decoding) == (3, 0)
            assert load.queued_prefill_tokens > 10
            assert not joined.worker.unreported_decodes
            for call, gateway in zip(calls, [*gets, asks], strict=True):
                await drive(call, gateway, responds=True)
        await is_over(site)
        load = joined.worker.load
        assert (load.running, load.decoding, load.queued_prefill_tokens) == (0, 0, 0)
        hits = site.model.fleet.hits(keys_of(site, WORDS))
        assert hits.held.tolist() == [6]  # it has no events, so what it was sent counts as cached
        joined.left()
        around.zmq.destroy(linger=0)
