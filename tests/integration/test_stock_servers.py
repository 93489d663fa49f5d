"""The router over stock servers that answer, fail, stand still and leave."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.errors import InvalidRequest, RevisionGone
from protos import inference_pb2 as pb
from router.config import RouterConfig
from router.runtime import start_router
from support.processes import until
from support.scripted_server import BLOCK, Publisher, ScriptedServer, expected_tokens, stored
from tandem.client import Client
from tandem.storyteller import STORYTELLER

PROMPT = list(range(200, 300))


def prompt_of(number: int) -> list[int]:
    """Return a prompt that shares no block with another: no server is chosen for what it holds."""
    return [number + 2, *range(200, 300)]


@pytest.fixture
def model() -> Path:
    """Return a model with a tokenizer."""
    return STORYTELLER


@asynccontextmanager
async def routed(
    model: Path, servers: Sequence[ScriptedServer], entries: Sequence[dict[str, Any]] | None = None, **settings: Any
) -> AsyncIterator[Client]:
    """Servers, and a router that has met them all."""
    fleet = settings.pop("fleet", {})
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        listed = [{"url": server.url, "kv_events_port": None} for server in servers] if entries is None else entries
        values = {"servers": listed, "model": model, "name": "m"} | fleet
        router = await start_router(RouterConfig.parse({"port": 0, "fleet": values, "worker_silence_s": 2} | settings))
        stack.push_async_callback(router.stop)
        client = Client(router.address)
        stack.push_async_callback(client.close)
        if servers:
            await met(client, *(server.worker_id for server in servers))
        yield client


async def met(client: Client, *worker_ids: str) -> None:
    async def are_there() -> bool:
        (model,) = (await client.cluster_status()).models
        return {worker.worker_id for worker in model.workers if worker.has_reported} == set(worker_ids)

    await until(are_there, f"{worker_ids} are there")


class Answer:
    """All messages of a stream."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.text = ""
        self.finish = pb.Finish()

    async def read(self, client: Client, prompt: Sequence[int] = PROMPT, num: int = 40, **sampling: Any) -> "Answer":
        asked = pb.Sampling(**({"max_tokens": num, "temperature": 0.0} | sampling))
        async for message in client.generate(token_ids=prompt, sampling=asked):
            self.tokens.setdefault(message.index, []).extend(message.token_ids)
            self.text += message.text
            if message.HasField("finish"):
                self.finish = message.finish
        return self


async def ask(client: Client, prompt: Sequence[int] = PROMPT, num: int = 40, **sampling: Any) -> Answer:
    return await Answer().read(client, prompt, num, **sampling)


async def test_a_server_answers_as_a_worker_does(model: Path) -> None:
    server = ScriptedServer(tells_cached=64)
    async with routed(model, [server]) as client:
        answer = await ask(client)
        assert answer.tokens == {0: expected_tokens(PROMPT, 40)}
        assert (answer.finish.reason, answer.finish.usage.completion_tokens) == (pb.FINISH_REASON_LENGTH, 40)
        kv = answer.finish.receipt.kv
        assert (kv.reused_blocks, kv.computed_tokens, kv.predicted) == (64 // BLOCK, 36, False)
        assert answer.finish.receipt.placement.decode_worker == server.worker_id
        (status,) = (await client.cluster_status()).models[0].workers
        assert status.server == f"vLLM 0.32.0: token ids, blocks of {BLOCK}"
        stopped = await ask(client, stop=[answer.text[20:26]])
        assert stopped.text == answer.text[:20]
        assert stopped.finish.stop_match == answer.text[20:26]
        await until(_nothing_open(server), "the server's request is closed")


def _nothing_open(*servers: ScriptedServer) -> Any:
    async def closed() -> bool:
        return not any(server.num_open for server in servers)

    return closed


async def test_a_stream_goes_on_where_its_server_broke_off(model: Path) -> None:
    servers = [ScriptedServer(breaks_after=7), ScriptedServer(breaks_after=11), ScriptedServer()]
    async with routed(model, servers, max_attempts=20) as client:
        for number in range(6):
            answer = await ask(client, prompt_of(number))
            assert answer.tokens == {0: expected_tokens(prompt_of(number), 40)}
            assert answer.finish.usage.completion_tokens == 40
        for server in servers:
            server.script.breaks_after = None
        whole = await ask(client, prompt_of(5))
        assert whole.text == answer.text


async def test_several_choices_go_on_each_by_itself(model: Path) -> None:
    servers = [ScriptedServer(breaks_after=5), ScriptedServer()]
    async with routed(model, servers, max_attempts=20) as client:
        answers = await asyncio.gather(*(ask(client, prompt_of(number), n=3) for number in range(4)))
        for number, answer in enumerate(answers):
            assert answer.tokens == dict.fromkeys(range(3), expected_tokens(prompt_of(number), 40))
        assert any("n" not in body and len(body["prompt"]) > len(PROMPT) for body in servers[1].bodies)


async def test_servers_that_refuse_are_left_alone_for_a_while(model: Path) -> None:
    servers = [ScriptedServer(refuses_with=500), ScriptedServer()]
    async with routed(model, servers) as client:
        for number in range(0, 40, 4):
            prompts = [prompt_of(number + part) for part in range(4)]
            answers = await asyncio.gather(*(ask(client, prompt, num=3) for prompt in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.tokens == {0: expected_tokens(prompt, 3)}
        assert 0 < len(servers[0].bodies) < 20
        servers[0].script.refuses_with = 0
        numbers = itertools.count(100)

        async def is_back() -> bool:
            before = len(servers[0].bodies)
            fresh = [next(numbers) for _ in range(4)]
            await asyncio.gather(*(ask(client, prompt_of(number), num=3) for number in fresh))
            return len(servers[0].bodies) > before

        await until(is_back, "the server gets requests again")


async def test_a_request_that_every_server_would_refuse_is_refused_once(model: Path) -> None:
    servers = [ScriptedServer(refuses_with=400), ScriptedServer(refuses_with=400)]
    async with routed(model, servers) as client:
        with pytest.raises(InvalidRequest, match="as the script says"):
            await ask(client)
        assert sum(len(server.bodies) for server in servers) == 1


@pytest.mark.parametrize("stands_still", [True, False])
async def test_streams_leave_a_server_that_stands_still(model: Path, stands_still: bool) -> None:
    """Whether all of it does, or only its engine."""
    servers = [ScriptedServer(waits_after=5), ScriptedServer()]
    async with routed(model, servers) as client:
        streams = [asyncio.ensure_future(ask(client, prompt_of(number))) for number in range(4)]

        await until(lambda: servers[0].num_open > 0, "a stream waits")
        servers[0].script.stands_still = stands_still
        for number, stream in enumerate(streams):
            assert (await stream).tokens == {0: expected_tokens(prompt_of(number), 40)}
        servers[0].script.stands_still = False


async def test_options_that_cannot_go_on_exactly(model: Path) -> None:
    servers = [ScriptedServer(breaks_after=3), ScriptedServer(breaks_after=3)]
    async with routed(model, servers) as client:
        with pytest.raises(RevisionGone, match=r"sampling\.presence_penalty"):
            await ask(client, presence_penalty=0.5)
    servers = [ScriptedServer(breaks_after=3), ScriptedServer()]
    async with routed(model, servers, fleet={"continue_approximately": True}) as client:
        for number in range(3):
            answer = await ask(client, prompt_of(number), presence_penalty=0.5)
            assert answer.tokens == {0: expected_tokens(prompt_of(number), 40)}


async def test_a_server_without_token_ids_serves_text(model: Path) -> None:
    server = ScriptedServer(returns_token_ids=False, takes_token_ids=False, is_vllm=False)
    async with routed(model, [server]) as client:
        answer = await ask(client, num=5, stop=["never"])
        assert answer.text.split() == [f"t{token}" for token in expected_tokens([len(server.bodies[0]["prompt"])], 5)]
        assert isinstance(server.bodies[0]["prompt"], str)
        assert server.bodies[0]["stop"] == ["never"]
        assert (answer.finish.reason, answer.finish.usage.completion_tokens) == (pb.FINISH_REASON_LENGTH, 5)
        with pytest.raises(InvalidRequest, match=r"sampling\.top_k"):
            await ask(client, top_k=5)
        server.script.breaks_after = 2
        with pytest.raises(RevisionGone, match="no token ids"):
            await ask(client, num=5)


async def test_servers_come_and_go_with_their_file(model: Path, tmp_path: Path) -> None:
    file, servers = tmp_path / "servers.yaml", [ScriptedServer(), ScriptedServer(), ScriptedServer()]
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        file.write_text(yaml.safe_dump([{"url": servers[0].url}]))
        values = {"servers": [{"file": str(file), "kv_events_port": None}], "model": model, "name": "m"}
        router = await start_router(RouterConfig.parse({"port": 0, "fleet": values}))
        stack.push_async_callback(router.stop)
        asking = Client(router.address)
        stack.push_async_callback(asking.close)
        await met(asking, servers[0].worker_id)
        servers[0].script.waits_after = 5
        stream = asyncio.ensure_future(ask(asking))

        await until(lambda: servers[0].num_open > 0, "the stream waits")
        file.write_text(yaml.safe_dump([{"url": server.url} for server in servers[1:]]))

        async def drains() -> bool:
            (status,) = (await asking.cluster_status()).models
            return {w.worker_id: w.draining for w in status.workers} == {
                server.worker_id: server is servers[0] for server in servers
            }

        await until(drains, "the first server drains")
        for _ in range(3):
            await ask(asking, num=2)
        assert len(servers[0].bodies) == 1
        servers[0].script.go_on.set()
        assert (await stream).tokens == {0: expected_tokens(PROMPT, 40)}
        await met(asking, *(server.worker_id for server in servers[1:]))


async def test_a_fleet_grows_to_forty_servers_and_back_under_load(model: Path, tmp_path: Path) -> None:
    file, servers = tmp_path / "servers.yaml", [ScriptedServer(step_s=0.005) for _ in range(40)]
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        values = {"servers": [{"file": str(file), "kv_events_port": None}], "model": model, "name": "m"}

        async def listed(number: int) -> None:
            file.write_text(yaml.safe_dump([{"url": server.url} for server in servers[:number]]))
            await met(client, *(server.worker_id for server in servers[:number]))

        file.write_text("[]")
        router = await start_router(RouterConfig.parse({"port": 0, "fleet": values}))
        stack.push_async_callback(router.stop)
        client = Client(router.address)
        stack.push_async_callback(client.close)
        await listed(2)
        goes_on, numbers = True, itertools.count()

        async def load() -> int:
            count = 0
            while goes_on:
                prompt = prompt_of(next(numbers))
                assert (await ask(client, prompt)).tokens == {0: expected_tokens(prompt, 40)}
                count += 1
            return count

        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(load()) for _ in range(20)]
            for number in (10, 40, 15, 2):
                await listed(number)
                if number == 40:
                    await until(lambda: sum(bool(server.bodies) for server in servers) > 20, "most of them serve")
            goes_on = False
        assert all(stream.result() > 0 for stream in streams)


async def test_a_server_that_died_comes_back_at_its_address(model: Path) -> None:
    servers = [ScriptedServer(), ScriptedServer()]
    async with routed(model, servers) as client:
        await servers[0].__aexit__(None, None, None)
        await met(client, servers[1].worker_id)
        assert (await ask(client)).tokens == {0: expected_tokens(PROMPT, 40)}
        await servers[0].__aenter__()
        await met(client, *(server.worker_id for server in servers))


async def test_the_key_of_the_servers(model: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    server = ScriptedServer(api_key="secret")
    async with routed(model, [server], fleet={"api_key_file": tmp_path / "key"}) as client:
        assert (await ask(client, num=3)).tokens == {0: expected_tokens(PROMPT, 3)}


async def test_adapters_are_models_of_their_own(model: Path) -> None:
    server = ScriptedServer()
    async with routed(model, [server]) as client:
        sampling = pb.Sampling(max_tokens=2, temperature=0.0)
        async for _ in client.generate(token_ids=PROMPT, sampling=sampling, model="poet"):
            pass
        assert server.bodies[-1]["model"] == "poet"


async def test_a_lender_is_named_to_the_server_that_borrows(model: Path) -> None:
    decode, prefill = ScriptedServer(connector=True), ScriptedServer(connector=True)
    async with decode, prefill:
        entries = [
            {"url": server.url, "role": role, "kv_events_port": None}
            for server, role in ((decode, "decode"), (prefill, "prefill"))
        ]
        settings = {"decode_prefill_tokens_per_s": 100.0, "learn_rates": False}
        async with routed(model, [], entries, **settings) as client:
            await met(client, decode.worker_id, prefill.worker_id)
            answer = await ask(client, list(range(100, 600)), num=3)
        assert decode.bodies[0]["kv_transfer_params"] == {"lender": prefill.url}
        assert not prefill.bodies
        receipt = answer.finish.receipt
        assert (receipt.placement.lender, receipt.kv.predicted) == (prefill.worker_id, True)


async def cached_blocks(client: Client) -> int:
    (status,) = (await client.cluster_status()).models[0].workers
    return status.cached_blocks


@pytest.mark.parametrize("replays", [True, False])
async def test_kv_events_with_gaps(model: Path, replays: bool) -> None:
    """Lost events are asked again, or what was believed is forgotten; blocks stored later are known either way."""
    server = ScriptedServer()
    first, second = list(range(64)), list(range(100, 164))
    async with Publisher(replays) as publisher, server:
        entry = {"url": server.url} | publisher.entry
        async with routed(model, [], [entry]) as client:
            await met(client, server.worker_id)

            async def knows(*counts: int) -> None:
                async def known() -> bool:
                    return await cached_blocks(client) in counts

                await until(known, f"{counts} blocks are known")

            async def published_until(count: int) -> None:
                """Publish a block again and again: the subscription takes a moment."""

                async def known() -> bool:
                    await publisher.publish(stored(first))
                    return await cached_blocks(client) == count

                await until(known, "the subscription stands")

            await published_until(4)
            await publisher.publish(stored(second), lost=True)
            await publisher.publish(stored([*second, *range(32)], first=4))
            await knows(10 if replays else 0)  # without a replay the new blocks follow one that was never seen
            await publisher.publish({"type": "AllBlocksCleared"})
            await knows(0)
            publisher.restart()
            await publisher.publish(stored(second))
            await knows(4)


async def test_a_bad_fleet_is_refused_by_name(model: Path) -> None:
    with pytest.raises(Exception, match=r"fleet\.servers\.0.*exactly one of"):
        RouterConfig.parse({"fleet": {"servers": [{"role": "both"}], "model": model}})
    with pytest.raises(Exception, match=r"fleet\.servers\.0\.url"):
        RouterConfig.parse({"fleet": {"servers": [{"url": "ftp://x"}], "model": model}})
