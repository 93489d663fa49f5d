"""Pictures through a whole cluster with the sim engine: each API's requests, refusals, and preprocessors that die."""

import asyncio
import base64
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import anthropic
import grpc
import openai
import pytest
import pytest_asyncio
from PIL import Image

from cluster.errors import InvalidRequest, Unavailable
from cluster.network.rpc import channel
from cluster.network.tls import ClientIdentity
from preprocessor.config import PreprocessorConfig
from protos import inference_pb2 as pb
from protos import preprocess_pb2, preprocess_pb2_grpc
from support.certificates import Authority
from support.media_files import picture
from support.media_models import STRINGS_TEMPLATE, place_of, write_media_model
from support.openai_http import call, http_cluster
from support.ports import free_port
from support.preprocessors import overheard, preprocessor
from support.processes import (
    Stream,
    assert_equal_answers,
    busiest_decoder,
    engine_of,
    finished,
    kill_worker,
    pause,
    until,
)
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, RoleProcess, start_role, stop_process

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 1.0, "kv_memory_mib": 64}
FIRST, SECOND = picture(1), picture(2, 90, 40)
LEAST, SPREAD = 20, 13
"""A file of n bytes becomes LEAST + n % SPREAD tokens of the sim engine."""


def num_tokens(*files: bytes) -> int:
    return sum(LEAST + len(file) % SPREAD for file in files)


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


@dataclass
class Site:
    cluster: LocalCluster
    preprocessor: RoleProcess
    model: Path
    folder: Path
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    @property
    def http(self) -> str:
        return self.cluster.router.http_address

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        return call(self.http, path, body)

    async def tokens(self, *content: Any) -> int:
        """Tokens of a chat with one message of the user, without its media."""
        status, _, said = await asyncio.to_thread(
            self.post, "/tokenize", {"messages": [{"role": "user", "content": "".join(content)}]}
        )
        assert status == 200, said
        return int(said["count"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("pictures")
    model = write_media_model(folder / "seeing")
    strings = write_media_model(folder / "strings", STRINGS_TEMPLATE, context=50_000)
    blind = write_media_model(folder / "blind", context=40_000)
    async with AsyncExitStack() as parts:
        models = {"seeing": model, "strings": strings}
        _, role = await parts.enter_async_context(
            preprocessor(models=models, max_items=4, max_item_mib=1, metrics_port=0)
        )
        entries = [
            {"path": model, "preprocessor": role.address},
            {"path": strings, "preprocessor": role.address},
            {"path": blind},
        ]
        router = {
            "model": None,
            "models": entries,
            "default_model": "seeing",
            "batches_folder": folder / "batches",
            "records_file": folder / "records.jsonl",
            "record_texts": True,
        }
        cluster = await parts.enter_async_context(http_cluster(model, router=router, **SIM))
        http = cluster.router.http_address
        made = openai.AsyncOpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=0)
        other = anthropic.AsyncAnthropic(base_url=f"http://{http}", api_key="none", max_retries=0)
        by_openai, by_anthropic = await parts.enter_async_context(made), await parts.enter_async_context(other)
        yield Site(cluster, role, model, folder, by_openai, by_anthropic)


# ------------------------------------------------------------------------------------------------ each API


async def test_a_chat_sees_its_pictures(site: Site) -> None:
    content: Any = [
        {"type": "text", "text": "what is "},
        {"type": "image_url", "image_url": {"url": data_url(FIRST)}},
        {"type": "text", "text": " beside "},
        {"type": "image_url", "image_url": {"url": data_url(SECOND), "detail": "low"}},
    ]
    plain = await site.tokens("what is ", " beside ")
    raw = await site.openai.chat.completions.with_raw_response.create(
        model="seeing", max_tokens=5, messages=[{"role": "user", "content": content}]
    )
    answer = raw.parse()
    assert answer.usage.prompt_tokens == plain + num_tokens(FIRST, SECOND)
    assert raw.headers["x-tandem-ignored"] == "messages[].content[].image_url.detail"
    stream = await site.openai.chat.completions.create(
        model="seeing", max_tokens=5, messages=[{"role": "user", "content": content}], stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    usages = [chunk.usage async for chunk in stream if chunk.usage is not None]
    assert usages[-1].prompt_tokens == answer.usage.prompt_tokens


async def test_a_response_sees_its_pictures_and_those_of_earlier_turns(site: Site) -> None:
    shown: Any = [{"role": "user", "content": [
        {"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": data_url(FIRST), "detail": "auto"},
    ]}]  # fmt: skip
    first = await site.openai.responses.create(model="seeing", input=shown, max_output_tokens=5)
    assert first.usage.input_tokens == await site.tokens("see") + num_tokens(FIRST)
    more: Any = [{"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                 {"type": "function_call_output", "call_id": "c",
                  "output": [{"type": "input_image", "image_url": data_url(SECOND)}]}]  # fmt: skip
    second = await site.openai.responses.create(
        model="seeing", input=more, previous_response_id=first.id, max_output_tokens=5
    )
    assert second.usage.input_tokens > first.usage.input_tokens + num_tokens(SECOND)
    kept = await site.openai.responses.input_items.list(second.id)
    assert len(kept.data) == 2


async def test_a_message_sees_its_pictures_and_those_of_its_tools(site: Site) -> None:
    def image(file: bytes) -> Any:
        data = base64.b64encode(file).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    turns: Any = [
        {"role": "user", "content": [image(FIRST), {"type": "text", "text": "see"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image(SECOND)]}]},
    ]
    counted = await site.anthropic.messages.count_tokens(model="seeing", messages=turns)
    answer = await site.anthropic.messages.create(model="seeing", max_tokens=5, messages=turns)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens
    blank = [turns[0] | {"content": "see"}, turns[1], {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": ""}]}]  # fmt: skip
    bare = await site.anthropic.messages.count_tokens(model="seeing", messages=blank)
    assert counted.input_tokens == bare.input_tokens + num_tokens(FIRST, SECOND)


async def test_an_uploaded_file_is_a_picture(site: Site) -> None:
    file = await site.openai.files.create(file=("a.png", FIRST), purpose="vision")
    parts: Any = [{"type": "text", "text": "see"}, {"type": "file", "file": {"file_id": file.id}}]
    answer = await site.openai.chat.completions.create(
        model="seeing", max_tokens=2, messages=[{"role": "user", "content": parts}]
    )
    assert answer.usage.prompt_tokens == await site.tokens("see") + num_tokens(FIRST)
    shown: Any = [{"role": "user", "content": [{"type": "input_image", "file_id": file.id, "detail": "auto"}]}]
    first = await site.openai.responses.create(model="seeing", input=shown, max_output_tokens=2)
    await site.openai.files.delete(file.id)
    again = await site.openai.responses.create(
        model="seeing", input="and", previous_response_id=first.id, max_output_tokens=2
    )
    assert again.usage.input_tokens > first.usage.input_tokens, "an earlier turn keeps what it saw"
    status, _, said = site.post("/v1/responses", {"model": "seeing", "input": shown})
    assert (status, said["error"]["param"]) == (404, "input[0].content[0].file_id")
    text = await site.openai.files.create(file=("a.txt", b"hello"), purpose="user_data")
    parts[1]["file"]["file_id"] = text.id
    status, _, said = site.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert (status, said["error"]["param"]) == (400, "messages[0].content[1].file.file_id")


async def test_a_line_of_a_batch_sees_its_picture(site: Site) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(FIRST)}}
    body = {"model": "seeing", "max_tokens": 2, "messages": [{"role": "user", "content": [part]}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = await site.openai.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = await site.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    async def done() -> bool:
        return (await site.openai.batches.retrieve(batch.id)).status == "completed"

    await until(done, "the batch is completed")
    output = (await site.openai.batches.retrieve(batch.id)).output_file_id
    assert output is not None
    (answered,) = (await site.openai.files.content(output)).text.splitlines()
    usage = json.loads(answered)["response"]["body"]["usage"]
    assert usage["prompt_tokens"] == await site.tokens("") + num_tokens(FIRST)


async def test_the_python_client_sends_pictures(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(FIRST)
    message = ("user", ["see", {"type": "image", "path": path}, {"type": "image", "data": SECOND}])
    sampling = pb.Sampling(max_tokens=2)
    async with Client(site.cluster.address) as client:
        token_ids = await client.tokenize(messages=[message], model="seeing")
        *_, last = [piece async for piece in client.generate(messages=[message], model="seeing", sampling=sampling)]
        assert last.finish.usage.prompt_tokens == len(token_ids)
        assert len(token_ids) == await site.tokens("see") + num_tokens(FIRST, SECOND)
        place = place_of(site.model)
        ids = [5, place, 6]
        for prompt in ({"token_ids": ids}, {"text": "a<image>"}):
            stream = client.generate(
                **prompt, media=[{"type": "image", "path": path}], model="seeing", sampling=sampling
            )
            *_, last = [piece async for piece in stream]
            assert last.finish.usage.prompt_tokens == len(ids) - 1 - ("text" in prompt) + num_tokens(FIRST)
        explained = await client.explain(messages=[message], model="seeing", sampling=sampling)
        assert explained.candidates
        with pytest.raises(InvalidRequest) as refused:
            await client.warm(messages=[message], model="seeing")
        assert refused.value.field == "messages[0].parts[1]"
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await client.tokenize(messages=[("user", [{"type": "image", "path": tmp_path / "none"}])])


async def test_a_template_of_texts_gets_placeholders(site: Site) -> None:
    async with Client(site.cluster.address) as client:
        message = ("user", ["see<image>", {"type": "image", "data": FIRST}])
        token_ids = await client.tokenize(messages=[message], model="strings")
        lines = await client.tokenize(messages=[("user", "\nsee<image>")], model="strings")
        assert len(token_ids) == len(lines) + num_tokens(FIRST)
        place = place_of(site.model)
        assert token_ids.count(place) == num_tokens(FIRST), "the client's own words made no placeholder"


async def test_commands_send_pictures(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(FIRST)

    async def command(*arguments: str | Path, said: str = "") -> str:
        where = "--address", site.cluster.address, "--model", "seeing", "--max-tokens", "2", "--image", path
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tandem.cli", *arguments, *where, "--receipt",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        shown, _ = await process.communicate(said.encode())
        assert not process.returncode, shown
        return shown.decode()

    assert "media" in await command("generate", "a<image>")
    turns = (await command("chat", said="see\nand\n\n")).split("media")
    assert len(turns) == 3, "its picture goes with each turn"


async def test_auto_takes_a_model_that_reads_pictures(site: Site) -> None:
    message = ("user", ["see", {"type": "image", "data": FIRST}])
    sampling = pb.Sampling(max_tokens=2)
    async with Client(site.cluster.address) as client:
        explained = await client.explain(messages=[message], model="auto", sampling=sampling)
        verdicts = {candidate.model: candidate for candidate in explained.models}
        assert not verdicts["blind"].fit
        pieces = client.generate(messages=[message], model="auto", sampling=sampling)
        last = [piece async for piece in pieces][-1].finish
        assert last.receipt.model == explained.model != "blind"
        assert last.usage.prompt_tokens > num_tokens(FIRST)


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model", "urls", "status", "param"),
    [
        ("blind", [data_url(FIRST)], 400, "messages[0].content[0].image_url.url"),
        ("seeing", [data_url(FIRST), data_url(b"<svg/>")], 400, "messages[0].content[1].image_url.url"),
        ("seeing", [data_url(FIRST)] * 5, 400, "messages[0].content[4].image_url.url"),
        ("seeing", [data_url(FIRST), data_url(FIRST + bytes(1 << 20))], 400, "messages[0].content[1].image_url.url"),
        ("seeing", ["https://pictures.example.org/a.png"], 400, "messages[0].content[0].image_url.url"),
        ("seeing", ["http://127.0.0.1/a.png"], 400, "messages[0].content[0].image_url.url"),
        ("seeing", ["file:///etc/passwd"], 400, "messages[0].content[0].image_url.url"),
    ],
)
async def test_refusals_name_the_part(site: Site, model: str, urls: list[str], status: int, param: str | None) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    got, _, said = await asyncio.to_thread(site.post, "/v1/chat/completions", body)
    assert (got, said["error"]["param"]) == (status, param), said


async def test_pictures_fit_into_the_context_as_tokens(site: Site) -> None:
    """The prompt is small before its pictures have their tokens."""
    content = [{"type": "image_url", "image_url": data_url(FIRST)}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 100_000 - 30}
    status, _, said = await asyncio.to_thread(site.post, "/v1/chat/completions", body)
    assert status == 400
    assert f"prompt of {await site.tokens('') + num_tokens(FIRST)} tokens" in said["error"]["message"]


async def test_records_keep_a_thumbnail_and_no_picture(site: Site) -> None:
    file = picture(99)
    async with Client(site.cluster.address) as client:
        message = ("user", ["sampled", {"type": "image", "data": file}])
        pieces = client.generate(
            messages=[message], model="seeing", sampling=pb.Sampling(max_tokens=2), request_id="sampled-1"
        )
        assert [piece async for piece in pieces]

    def line() -> dict[str, Any] | None:
        for each in (site.folder / "records.jsonl").read_text().splitlines():
            sample: dict[str, Any] = json.loads(each).get("request", {})
            if sample.get("request_id") == "sampled-1":
                return sample
        return None

    await until(lambda: line() is not None, "the sample is written")
    sample = line()
    assert sample["prompt"]["messages"][0]["parts"] == [{"text": "sampled"}, {"media": {"kind": "image"}}]
    (medium,) = sample["media"]
    thumbnail = medium.pop("thumbnail")
    assert medium == {"kind": "image", "bytes": len(file)}
    with Image.open(BytesIO(base64.b64decode(thumbnail.removeprefix("data:image/webp;base64,")))) as small:
        assert small.size == (96, 96)
    status, _, said = await asyncio.to_thread(call, site.http, "/console/data")
    assert status == 200
    assert said["requests"][-1]["thumbnails"] == [thumbnail]
    assert [item["tokens"] for item in sample["items"]] == [num_tokens(file)]
    assert len(sample["items"][0]["identifier"]) == 32


@pytest.mark.parametrize(
    ("settings", "wanted", "is_old"),
    [
        ({}, False, False),
        ({"records_file": "records.jsonl"}, False, False),
        ({"record_texts": True}, False, False),
        ({"records_file": "records.jsonl", "record_texts": True, "record_share": 1e-9}, False, False),
        ({"records_file": "records.jsonl", "record_texts": True}, True, False),
        ({"records_file": "records.jsonl", "record_texts": True}, True, True),
    ],
)
async def test_thumbnails_are_made_only_where_texts_are_kept(
    site: Site, tmp_path: Path, settings: dict[str, Any], wanted: bool, is_old: bool
) -> None:
    """A preprocessor of before knows no thumbnails, and makes none."""
    asked: list[preprocess_pb2.ProcessRequest] = []
    samples = tmp_path / "records.jsonl"
    if "records_file" in settings:
        settings = settings | {"records_file": samples}
    async with overheard(site.preprocessor.address, asked, is_old) as address:
        router = {"model": None, "models": [{"path": site.model, "preprocessor": address}]} | settings
        async with http_cluster(site.model, router=router, **SIM) as cluster:
            content = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in (FIRST, SECOND)]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            http = cluster.router.http_address
            assert (await asyncio.to_thread(call, http, "/v1/chat/completions", body))[0] == 200
            told = (await asyncio.to_thread(call, http, "/console/data"))[2]["requests"]
    assert [each.thumbnails for each in asked] == [wanted]
    num = 2 if wanted and not is_old else 0
    assert len(set(told[-1]["thumbnails"])) == num
    kept = samples.read_text() if samples.exists() else ""
    assert kept.count("thumbnail") == (json.dumps(told).count("data:image/webp")) == num


async def test_nothing_is_held_when_all_is_over(site: Site) -> None:
    """After all requests of the tests above, refused ones among them."""

    async def none_held() -> bool:
        return await media_metric(site.preprocessor, "leased_bytes") == 0

    await until(none_held, "no items are held")
    assert await media_metric(site.preprocessor, "items_total") > 10


# ------------------------------------------------------------------------------------------------- failures


async def test_large_pictures_where_the_settings_allow_them(tmp_path: Path) -> None:
    """Above the limit of ordinary messages between processes."""
    model, large = write_media_model(tmp_path / "seeing"), FIRST + bytes(18 << 20)
    async with preprocessor(model=model, max_item_mib=32) as (_, role):
        router = {"model": None, "models": [{"path": model, "preprocessor": role.address}], "max_body_mib": 64}
        async with http_cluster(model, router=router, **SIM) as cluster, Client(cluster.address) as client:
            message = ("user", [{"type": "image", "data": large}])
            pieces = client.generate(messages=[message], sampling=pb.Sampling(max_tokens=2))
            usage = [piece async for piece in pieces][-1].finish.usage
            content = [{"type": "image_url", "image_url": {"url": data_url(large)}}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            status, _, said = await asyncio.to_thread(call, cluster.router.http_address, "/v1/chat/completions", body)
            assert status == 200, said
            assert said["usage"]["prompt_tokens"] == usage.prompt_tokens > num_tokens(large)


async def test_requests_go_on_with_another_preprocessor_and_end_without_any(tmp_path: Path) -> None:
    model = write_media_model(tmp_path / "seeing")
    config = PreprocessorConfig.parse({"model": model, "engine": "sim", "port": 0, "drain_s": 0.0})
    roles = [await start_role("preprocessor", f"preprocessor-{number}", config) for number in range(2)]
    addresses = ", ".join(role.address for role in roles)
    router = {"model": None, "models": [{"path": model, "preprocessor": addresses}]}
    try:
        async with http_cluster(model, router=router, **SIM) as cluster, Client(cluster.address) as client:

            async def ask(seed: int) -> int:
                message = ("user", ["see", {"type": "image", "data": picture(seed)}])
                pieces = client.generate(messages=[message], sampling=pb.Sampling(max_tokens=2), timeout_s=30.0)
                return [piece async for piece in pieces][-1].finish.usage.prompt_tokens

            before = [await ask(seed) for seed in range(8)]
            os.kill(roles[0].pid, signal.SIGKILL)
            assert [await ask(seed) for seed in range(8)] == before
            os.kill(roles[1].pid, signal.SIGKILL)
            with pytest.raises(Unavailable, match="preprocessor"):
                await ask(0)
            text = client.generate("word1", sampling=pb.Sampling(max_tokens=2))
            assert [piece async for piece in text][-1].HasField("finish"), "texts need no preprocessor"
    finally:
        for role in roles:
            await stop_process(role.process)


async def media_metric(role: RoleProcess, name: str) -> float:
    """One number that a preprocessor tells Prometheus."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{role.metrics_address}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    lines = (await asyncio.to_thread(read)).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"tandem_media_{name} "))


async def test_items_are_held_while_their_request_runs_and_made_anew_when_they_are_lost(tmp_path: Path) -> None:
    """The preprocessor dies, and another takes its place; then the worker dies, too."""
    model = write_media_model(tmp_path / "seeing")
    settings = {"model": model, "engine": "sim", "port": free_port(), "metrics_port": 0, "drain_s": 0.0}
    config = PreprocessorConfig.parse(settings)
    role = await start_role("preprocessor", "preprocessor", config)
    models = [{"path": model, "preprocessor": role.address}]
    router = {"model": None, "models": models, "worker_silence_s": 600.0}
    try:
        async with (
            http_cluster(model, 2, router, **(SIM | {"sim_step_ms": 10.0})) as cluster,
            Client(cluster.address) as client,
        ):

            def begin(max_tokens: int) -> Stream:
                place = place_of(model)
                prompt = [5, *range(100), place, 6]
                return Stream(client, prompt, max_tokens, media=[{"type": "image", "data": FIRST}])

            async def held(num_bytes: int) -> None:
                async def is_so() -> bool:
                    return await media_metric(role, "leased_bytes") == num_bytes

                await until(is_so, f"{num_bytes} bytes are held")

            undisturbed = begin(300)
            await undisturbed.reached(1)
            await held(len(FIRST))
            await finished([undisturbed])
            await held(0)
            left = begin(5000)
            await left.reached(1)
            await left.cancel()
            await held(0)

            disturbed = begin(300)
            await disturbed.reached(20)
            worker, _ = await busiest_decoder(cluster)
            await pause(engine_of(worker))  # the stream waits while processes end and start
            os.kill(role.pid, signal.SIGKILL)
            await role.process.wait()
            role = await start_role("preprocessor", "preprocessor", config)
            assert await media_metric(role, "items_total") == 0
            kill_worker(worker)
            await finished([disturbed])
            assert_equal_answers([disturbed], [undisturbed])
            assert disturbed.receipt.placement.attempt > 1
            assert await media_metric(role, "items_total") == 1
            await held(0)
    finally:
        await stop_process(role.process)


async def test_only_members_of_a_cluster_with_certificates_use_its_preprocessor(tmp_path: Path) -> None:
    authority, strangers = Authority(tmp_path, "cluster"), Authority(tmp_path, "strangers")
    model, member = write_media_model(tmp_path / "seeing"), authority.issue("member")
    tls = {"tls_cert": member.cert, "tls_key": member.key, "tls_ca": authority.path}
    role = await start_role(
        "preprocessor",
        "preprocessor",
        PreprocessorConfig.parse({"model": model, "engine": "sim", "port": 0, "drain_s": 0.0} | tls),
    )
    router = {"model": None, "models": [{"path": model, "preprocessor": role.address}]} | tls
    try:
        async with (
            http_cluster(model, router=router, **SIM, **tls) as cluster,
            Client(cluster.address, tls=ClientIdentity(authority.path)) as client,
        ):
            message = ("user", ["see", {"type": "image", "data": FIRST}])
            pieces = client.generate(messages=[message], sampling=pb.Sampling(max_tokens=2))
            last = [piece async for piece in pieces][-1]
            assert last.finish.usage.prompt_tokens > num_tokens(FIRST)
            names = [stage.name for stage in last.finish.receipt.stages]
            assert names[:3] == ["tokenise", "media", "router queue"]
        stranger = strangers.issue("stranger")
        identity = ClientIdentity(authority.path, stranger.cert, stranger.key)
        async with channel(role.address, identity) as link:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await preprocess_pb2_grpc.PreprocessStub(link).Describe(preprocess_pb2.DescribeRequest(), timeout=60)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        await stop_process(role.process)
