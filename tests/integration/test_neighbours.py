"""One tenant within its limits, and another one that attacks: what it is refused, and that the first is served.

Each test fails where limits come after reading, or where one bound counts all tenants together.
"""

import asyncio
import http.client
import json
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.errors import Forbidden, InvalidRequest, Overloaded
from cluster.network.rpc import MAX_OPEN_CALLS
from conftest import Ask
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from router.models.prompts.prompts import PromptEncoder
from router.security.api_keys import entry_for
from support.openai_http import RawConnection, http_cluster
from support.processes import PATIENCE_S
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.storyteller import STORYTELLER

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "Once upon a time there was a fox"
LIMITS = {"mallory": {"requests_per_s": 50, "burst": 40, "max_running": 2, "max_priority": 0}}


class Site:
    """A cluster with keys of three tenants, with small bounds."""

    def __init__(self, folder: Path) -> None:
        keys = folder / "keys.yaml"
        entries = [entry_for(f"tk-{name}", name, name, [], None) for name in ("alice", "mallory")]
        keys.write_text("".join(entries) + entry_for("tk-op", "op", "", [], None, operator=True))
        models = [{"path": STORYTELLER, "name": "live"}, {"path": _other_model(folder), "name": "dead"}]
        settings: dict[str, Any] = {
            "api_keys_file": keys,
            "internal_port": 0,
            "isolate_tenants": True,
            "models": models,
            "model": None,
            "default_model": "live",
            "tenants": LIMITS,
            "max_queued": 64,
            "max_queued_per_tenant": 32,
            "max_bodies_mib": 16,
            "records_file": folder / "records.jsonl",
        }
        self.folder = folder
        self.cluster: LocalCluster = http_cluster(STORYTELLER, 1, settings, engine="sim", sim_step_ms=2)

    @property
    def address(self) -> str:
        return self.cluster.router.http_address

    def client(self, name: str) -> Client:
        return Client(self.cluster.address, api_key=f"tk-{name}")

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.cluster.address)


def _other_model(folder: Path) -> Path:
    """Another model of the same tokenizer, which nobody serves."""
    path = folder / "other"
    path.mkdir()
    for file in STORYTELLER.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    made = Site(tmp_path_factory.mktemp("neighbours"))
    async with made.cluster:
        yield made


async def served(client: Client, ask: Ask, **options: Any) -> None:
    token_ids = await client.tokenize(PROMPT, model="live")
    answer = await asyncio.wait_for(ask(client, token_ids, max_tokens=4, **options), PATIENCE_S)
    assert len(answer.token_ids) == 4


async def test_bodies_that_never_end_leave_room_for_others(site: Site, ask: Ask) -> None:
    """40 requests that lack their last byte: the tenant's share of memory and of places is used up, and no more."""
    body = json.dumps({"model": "live", "prompt": "a " * (1 << 19), "max_tokens": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer tk-mallory\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    async with AsyncExitStack() as stack:
        connections = []
        for _ in range(12):
            connection = stack.enter_context(closing(RawConnection(site.address)))
            await asyncio.to_thread(connection.send, head.encode() + body[:-1])
            connections.append(connection)
        first_lines = [await asyncio.to_thread(connection.first_line, 1.0) for connection in connections]
        refused = [line for line in first_lines if line]
        assert len(refused) >= 8, "a quarter of 16 MiB holds three of them"
        assert all(" 429 " in line for line in refused)
        async with site.client("alice") as alice:
            await served(alice, ask)


async def test_requests_for_a_model_without_workers_refuse_none_for_another(site: Site, ask: Ask) -> None:
    async with site.client("mallory") as mallory, site.client("alice") as alice:
        token_ids = await mallory.tokenize(PROMPT, model="live")
        waiting = [
            asyncio.ensure_future(_outcome(mallory, token_ids=token_ids, model="dead", max_ttft_ms=60_000))
            for _ in range(36)
        ]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        early = [task.result() for task in waiting if task.done()]
        assert early, "more than its share"
        assert all(isinstance(error, Overloaded) and "tenant 'mallory'" in str(error) for error in early)
        await served(alice, ask)
        others = [asyncio.ensure_future(_outcome(alice, token_ids=token_ids, model="dead")) for _ in range(5)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in others), "they wait for a worker like the first ones"
        for task in (*waiting, *others):
            task.cancel()
        await asyncio.gather(*waiting, *others, return_exceptions=True)


async def _outcome(client: Client, model: str, **request: Any) -> Exception | None:
    try:
        async for _ in client.generate(model=model, sampling=pb.Sampling(max_tokens=1), **request):
            pass
    except Exception as error:
        return error
    return None


async def test_what_is_refused_is_charged(site: Site) -> None:
    """Prompts that cannot fit, one after the other: the rate ends it."""
    async with site.client("mallory") as mallory:
        outcomes: list[Exception | None] = []
        for _ in range(40):
            asked = (_outcome(mallory, model="live", text="a " * 4000) for _ in range(10))
            outcomes += await asyncio.gather(*asked)
        assert {type(error) for error in outcomes} == {InvalidRequest, Overloaded}
        assert any("requests_per_s" in str(error) for error in outcomes)
        for call in ("tokenize", "explain"):
            calls = [getattr(mallory, call)("a", model="live") for _ in range(150)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert any("requests_per_s" in str(result) for result in results), call
        await asyncio.sleep(1.0)


async def test_priorities_are_limited(site: Site, ask: Ask) -> None:
    async with site.client("mallory") as mallory, site.client("op") as operator:
        error = await _outcome(mallory, model="live", text=PROMPT, priority=1)
        assert (type(error), error.field) == (Forbidden, "priority")
        assert await _outcome(mallory, model="live", text=PROMPT, priority=-1) is None
        assert await _outcome(operator, model="live", text=PROMPT, priority=7) is None


async def test_sequences_count_and_not_requests(site: Site) -> None:
    async with site.client("mallory") as mallory:
        with pytest.raises(Overloaded, match="3 sequences: it can never be admitted"):
            async for _ in mallory.generate(PROMPT, model="live", sampling=pb.Sampling(max_tokens=2, n=3)):
                pass
        async for _ in mallory.generate(PROMPT, model="live", sampling=pb.Sampling(max_tokens=2, n=2)):
            pass


async def test_limits_of_messages_and_names_hold_for_grpc_too(site: Site) -> None:
    async with site.client("alice") as alice:
        too_many = [("user", "")] * 4097
        error = await _outcome(alice, model="live", messages=too_many)
        assert (type(error), error.field) == (InvalidRequest, "messages")
        for size in (257, 5000, 20_000):
            name = "x" * size
            for outcome in (
                _outcome(alice, model=name, text=PROMPT),
                _outcome(alice, model="live", messages=[(name, "hello")]),
                _outcome(alice, model="live", text=PROMPT, request_id=name),
                _outcome(alice, model="live", text=PROMPT, tenant=name),
            ):
                assert isinstance(error := await outcome, InvalidRequest | Forbidden), error
            with pytest.raises(InvalidRequest, match="model"):
                await alice.tokenize(PROMPT, model=name)
            with pytest.raises(InvalidRequest, match="request_id"):
                await alice.decisions(name)


async def test_stop_tokens_and_whole_answers_are_bounded(site: Site) -> None:
    async with site.client("alice") as alice:
        sampling = pb.Sampling(max_tokens=4, stop_token_ids=range(257))
        with pytest.raises(InvalidRequest, match="at most 256 token ids"):
            async for _ in alice.generate(PROMPT, model="live", sampling=sampling):
                pass
    body = {"model": "live", "prompt": [PROMPT] * 16, "n": 64, "max_tokens": 1500, "logprobs": 5}
    status, said = await asyncio.to_thread(_post, site, body)
    assert status == 400
    assert "can be kept: stream it" in said["error"]["message"]


async def test_bodies_of_many_values_are_refused_before_they_are_parsed(site: Site) -> None:
    status, said = await asyncio.to_thread(_post, site, b'{"prompt": [' + b"[]," * 500_000 + b"[]]}")
    assert status == 400
    assert "JSON values" in said["error"]["message"]
    commas = {"model": "live", "prompt": "a," * 200_000, "max_tokens": 1}
    status, said = await asyncio.to_thread(_post, site, commas)
    assert status == 400
    assert said["error"]["param"] == "prompt", "texts may hold as many commas as they like"


def _post(site: Site, body: Any) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection(site.address, timeout=20)) as connection:
        content = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", "/v1/completions", content, {"authorization": "Bearer tk-alice"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


async def test_calls_without_a_key_are_bounded(site: Site, ask: Ask) -> None:
    async with site.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_OPEN_CALLS + 20)]
        firsts = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        refused = [each for each in firsts if isinstance(each, grpc.aio.AioRpcError)]
        assert len(refused) >= 20
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        async with site.client("alice") as alice:
            await served(alice, ask)
        for watch in watches:
            watch.cancel()


async def test_loads_of_workers_are_for_operators(site: Site, ask: Ask) -> None:
    async with site.client("alice") as alice, site.client("op") as operator:
        assert len((await alice.explain(PROMPT * 8, model="live")).candidates) == 1
        assert len((await operator.explain(PROMPT * 8, model="live")).candidates) > 1


async def test_files_with_prompts_are_readable_by_their_owner_only(site: Site, ask: Ask) -> None:
    async with site.client("alice") as alice:
        await served(alice, ask)
    assert stat.S_IMODE((site.folder / "records.jsonl").stat().st_mode) == 0o600


async def test_a_broken_off_stream_has_a_typed_status(site: Site) -> None:
    """A batch of many requests that are refused at once: each has its own error, and the call goes on."""
    async with site.channel() as channel:
        stub = pb_grpc.InferenceStub(channel)
        requests = [pb.GenerateRequest(text="a " * 4000, model="live") for _ in range(400)]
        batch = pb.GenerateBatchRequest(requests=requests, max_concurrent=256)
        results = [each async for each in stub.GenerateBatch(batch, metadata=[("authorization", "Bearer tk-mallory")])]
        assert len(results) == 400
        assert all(each.status for each in results)


async def test_the_loop_turns_while_a_long_text_is_tokenised() -> None:
    """With a tokenizer that keeps the GIL it turns once or twice, whatever thread it is on."""
    encoder = PromptEncoder(ModelDir.open(STORYTELLER))
    encoder.max_chars = None
    text = "the cat sat on " * (1 << 17)  # 2 MB
    turns = 0
    encoding = asyncio.ensure_future(encoder.encode(pb.GenerateRequest(text=text)))
    while not encoding.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert len(encoding.result()) > 100_000
    assert turns > 20


async def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    encoder = PromptEncoder(ModelDir.open(STORYTELLER))
    with pytest.raises(InvalidRequest, match="characters, at most"):
        await encoder.encode(pb.GenerateRequest(text="the cat sat on " * (1 << 17)))
