"""Files and batches as OpenAI's own Python client uses them, on real processes over the sim engine."""

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types import Batch

from conftest import ModelFactory
from router.security.api_keys import entry_for
from support.batch_site import (
    CHATS,
    batch_cluster,
    begin,
    chat,
    client_of,
    completion,
    content_of,
    ended,
    kill_router,
    start_router_again,
    with_chats,
)
from support.openai_http import call, http_cluster
from support.processes import until
from tandem.local.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = {"max_tokens": 20_000, "ignore_eos": True}
"""Body of a request that takes minutes."""


@dataclass
class Site:
    """A cluster without keys, its folder, and a client."""

    cluster: LocalCluster
    folder: Path
    openai: openai.AsyncOpenAI
    expiring: Batch
    """Batch of a minute, with lines that take longer."""

    @property
    def http(self) -> str:
        return self.cluster.router.http_address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory, sim_model: ModelFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("batches") / "made"
    model = with_chats(sim_model(400, speaks=True))
    router = {"max_file_mib": 1, "batch_concurrency": 16}
    cluster = batch_cluster(model, folder, router, sim_step_ms=4)
    async with cluster, client_of(cluster.router.http_address) as client:
        lines = [completion("short"), completion("wrong", temperature=-1), completion("long", **LONG)]
        yield Site(cluster, folder, client, await begin(client, lines, completion_window="1m"))


async def test_a_batch_answers_what_the_endpoint_answers(site: Site) -> None:
    lines: list[Any] = [chat(f"line-{number}", seed=number) for number in range(20)]
    lines += [
        chat("too hot", temperature=-1),
        chat("streamed", stream=True),
        chat("another model", model="another"),
        chat("logs", logprobs=True, top_logprobs=2, n=2),
    ]
    batch = await begin(site.openai, lines, CHATS, metadata={"for": "a test"})
    assert batch.status in ("validating", "in_progress")
    done = await ended(site.openai, batch.id)
    assert done.status == "completed"
    assert done.metadata == {"for": "a test"}
    assert done.request_counts.model_dump() == {"total": 24, "completed": 21, "failed": 3}
    assert done.in_progress_at is not None
    assert done.finalizing_at is not None
    assert done.completed_at is not None
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.expires_at == done.created_at + 86_400
    outputs, errors = (
        await content_of(site.openai, done.output_file_id),
        await content_of(site.openai, done.error_file_id),
    )
    assert [line["custom_id"] for line in outputs] == [f"line-{number}" for number in range(20)] + ["logs"]
    assert len({line["id"] for line in outputs + errors}) == 24
    assert len({line["response"]["body"]["id"] for line in outputs}) == len(outputs)
    for line, asked in zip(outputs, [*lines[:20], lines[23]], strict=True):
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        direct = await site.openai.chat.completions.create(**asked["body"])
        answer = line["response"]["body"]
        expected = json.loads(direct.model_dump_json(exclude_unset=True))
        assert [answer["choices"], answer["model"]] == [expected["choices"], expected["model"]]
        assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert [line["custom_id"] for line in errors] == ["too hot", "streamed", "another model"]
    failures = [(line["response"]["status_code"], line["response"]["body"]["error"]["param"]) for line in errors]
    assert failures == [(400, "temperature"), (400, "stream"), (404, "model")]


@pytest.mark.parametrize("endpoint", ["/v1/responses", "/v1/messages"])
async def test_any_generating_path_may_be_the_endpoint(site: Site, endpoint: str) -> None:
    inputs: Any = {"input": "hello", "max_output_tokens": 4}
    if endpoint == "/v1/messages":
        inputs = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    body = {"model": "simulated", "temperature": 0} | inputs
    lines = [{"custom_id": "a", "method": "POST", "url": endpoint, "body": body}]
    lines.append({"custom_id": "b", "method": "POST", "url": endpoint, "body": body | {"temperature": -1}})
    done = await ended(site.openai, (await begin(site.openai, lines, endpoint)).id)
    status, _, direct = await asyncio.to_thread(call, site.http, endpoint, body)
    refused, _, failure = await asyncio.to_thread(call, site.http, endpoint, body | {"temperature": -1})
    assert (status, refused) == (200, 400)
    (output,) = await content_of(site.openai, done.output_file_id)
    said = output["response"]["body"]
    part = "output" if endpoint == "/v1/responses" else "content"
    assert [block.get("content", block.get("text")) for block in said[part]] == [
        block.get("content", block.get("text")) for block in direct[part]
    ]
    (error,) = await content_of(site.openai, done.error_file_id)
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"] == failure["error"]


async def test_files_are_listed_read_and_deleted(site: Site) -> None:
    content = b'{"custom_id": "\xc3\xa9"}\r\n\r\nno boundary --x'
    made = [
        await site.openai.files.create(
            file=(f"{number} é.jsonl", content),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        for number in range(3)
    ]
    assert [file.filename for file in made] == [f"{number} é.jsonl" for number in range(3)]
    assert made[0].bytes == len(content)
    assert made[0].expires_at == made[0].created_at + 3600
    assert (await site.openai.files.content(made[1].id)).content == content
    assert (await site.openai.files.retrieve(made[1].id)) == made[1]
    page = await site.openai.files.list(limit=2, purpose="batch")
    assert [file.id for file in page.data] == [made[2].id, made[1].id]
    assert page.has_more
    listed = [file.id async for file in site.openai.files.list(limit=1, order="asc")]
    assert listed[-3:] == [file.id for file in made]
    assert (await site.openai.files.delete(made[1].id)).deleted
    for gone in (site.openai.files.retrieve(made[1].id), site.openai.files.content(made[1].id)):
        with pytest.raises(openai.NotFoundError):
            await gone
    modes = {stat.S_IMODE(path.stat().st_mode) for path in site.folder.rglob("*") if path.is_file()}
    assert modes == {0o600}


async def test_a_deleted_input_stays_until_its_batch_has_ended(site: Site) -> None:
    batch = await begin(site.openai, [completion(f"{number}") for number in range(40)])
    await site.openai.files.delete(batch.input_file_id)
    done = await ended(site.openai, batch.id)
    assert done.status == "completed"
    assert len(await content_of(site.openai, done.output_file_id)) == 40
    folder = next(site.folder.rglob(batch.id))

    await until(lambda: all(path.suffix == ".json" for path in folder.iterdir()), "the input and the logs are gone")


async def test_a_cancelled_batch_has_the_answers_that_were_given(site: Site) -> None:
    lines = [completion("quick"), *(completion(f"long-{number}", **LONG) for number in range(30))]
    batch = await begin(site.openai, lines)

    async with asyncio.timeout(20):
        while True:
            running = await site.openai.batches.retrieve(batch.id)
            if running.request_counts is not None and running.request_counts.completed:
                break
            await asyncio.sleep(0.05)
    assert (await site.openai.batches.cancel(batch.id)).status == "cancelling"
    done = await ended(site.openai, batch.id, 20)
    assert done.status == "cancelled"
    assert done.cancelling_at is not None
    assert done.cancelled_at is not None
    assert [line["custom_id"] for line in await content_of(site.openai, done.output_file_id)] == ["quick"]
    errors = await content_of(site.openai, done.error_file_id)
    assert [line["custom_id"] for line in errors] == [f"long-{number}" for number in range(30)]
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert (await site.openai.batches.cancel(batch.id)).status == "cancelled", "again, it changes nothing"


async def test_a_bad_input_fails_with_its_lines(site: Site) -> None:
    content = b"".join(
        [
            json.dumps(completion("good")).encode() + b"\n",
            b"no json\n",
            json.dumps({**completion("x"), "custom_id": None}).encode() + b"\n",
            json.dumps(completion("good")).encode() + b"\n",
            json.dumps(chat("elsewhere")).encode() + b"\n\n\n",
        ]
    )
    done = await ended(site.openai, (await begin(site.openai, content)).id)
    assert done.status == "failed"
    assert [(fault.line, fault.code, fault.param) for fault in done.errors.data] == [
        (2, "invalid_json_line", None),
        (3, "missing_required_parameter", "custom_id"),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "mismatched_url", "url"),
    ]
    assert done.failed_at is not None
    with pytest.raises(openai.ConflictError, match="failed already"):
        await site.openai.batches.cancel(done.id)


async def test_batches_are_listed_by_pages(site: Site) -> None:
    made = [(await begin(site.openai, [completion(f"{number}")])).id for number in range(3)]
    page = await site.openai.batches.list(limit=2)
    assert [batch.id for batch in page.data] == [made[2], made[1]]
    assert page.has_more
    every = [batch.id async for batch in site.openai.batches.list(limit=1)]
    assert every[:3] == made[::-1]
    assert len(every) == len(set(every))
    for batch_id in made:
        await ended(site.openai, batch_id)


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("endpoint", {"endpoint": "/v1/models"}),
        ("input_file_id", {"input_file_id": "file-../../x"}),
        ("metadata", {"metadata": {"a": 1}}),
        ("metadata", {"metadata": {"a": "x" * 513}}),
    ],
)
async def test_a_wrong_field_of_a_batch_is_named(site: Site, param: str, change: dict[str, Any]) -> None:
    file = await site.openai.files.create(file=b"{}", purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"} | change
    status, _, said = await asyncio.to_thread(call, site.http, "/v1/batches", body)
    assert (status, said["error"]["param"]) == (400, param), said


async def test_wrong_uploads_are_refused_by_name(site: Site) -> None:
    before = (await site.openai.files.list()).data
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await site.openai.files.create(file=b"{}", purpose="fine-tune")
    with pytest.raises(openai.APIStatusError, match="max_file_mib") as refused:
        await site.openai.files.create(file=b"x" * (3 << 20), purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")
    form = {"content-type": "multipart/form-data; boundary=x"}
    part = b'--x\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\nbatch\r\n'
    for body, said in (
        (part % (b"purpose", b"") + b"--x--\r\n", "file: is missing"),
        (part % (b"file", b'; filename="a"') * 2 + b"--x--\r\n", "twice"),
        (part % (b"file", b"") + part % (b"a", b"") * 20 + b"--x--\r\n", "16 parts"),
    ):
        status, _, answer = await asyncio.to_thread(call, site.http, "/v1/files", body, form)
        assert status == 400, answer
        assert said in answer["error"]["message"]
    assert (await site.openai.files.list()).data == before
    assert not list(site.folder.rglob("*.tmp")), "nothing of them is left"


async def test_every_line_is_answered_once_though_the_router_is_killed_twice(site: Site) -> None:
    lines = [completion(f"line-{number}", max_tokens=40, seed=number) for number in range(400)]
    lines[7]["body"]["temperature"] = -1
    batch = await begin(site.openai, lines)
    for share in (0.2, 0.6):
        async with asyncio.timeout(30):
            while True:
                running = await site.openai.batches.retrieve(batch.id)
                if running.request_counts.completed >= share * 400:
                    break
                await asyncio.sleep(0.02)
        assert running.status == "in_progress", "the kill comes in the middle"
        await kill_router(site.cluster)
        await start_router_again(site.cluster)
    logs = list(next(site.folder.rglob(batch.id)).glob("answers-*.jsonl"))
    logged = sum(log.read_bytes().count(b"\n") for log in logs)
    assert logged >= 0.6 * 400, "what was answered is kept"
    done = await ended(site.openai, batch.id)
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"total": 400, "completed": 399, "failed": 1}
    outputs = await content_of(site.openai, done.output_file_id)
    names = [line["custom_id"] for line in outputs]
    assert names == [line["custom_id"] for line in lines if line["custom_id"] != "line-7"]
    (error,) = await content_of(site.openai, done.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("line-7", 400)
    for number in (0, 100, 398):
        (asked,) = (line for line in lines if line["custom_id"] == names[number])
        direct = await site.openai.completions.create(**asked["body"])
        assert outputs[number]["response"]["body"]["choices"][0]["text"] == direct.choices[0].text


async def test_an_expired_batch_has_the_answers_that_were_given(site: Site) -> None:
    done = await ended(site.openai, site.expiring.id, 90)
    assert done.status == "expired"
    assert done.expired_at is not None
    assert done.expires_at == done.created_at + 60 <= done.expired_at
    assert [line["custom_id"] for line in await content_of(site.openai, done.output_file_id)] == ["short"]
    wrong, late = await content_of(site.openai, done.error_file_id)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("wrong", 400)
    assert (late["custom_id"], late["response"], late["error"]["code"]) == ("long", None, "batch_expired")


async def test_tenants_do_not_see_each_other(tmp_path: Path, sim_model: ModelFactory) -> None:
    keys = tmp_path / "keys.yaml"
    alice, bob = (
        entry_for("tk-alice", "alice", "a", ["simulated"], None),
        entry_for("tk-bob", "bob", "b", ["other"], None),
    )
    keys.write_text(alice + bob + entry_for("tk-op", "op", "", [], None, operator=True))
    router = {"api_keys_file": keys, "internal_port": 0, "max_files_mib_per_tenant": 1}
    router |= {"tenants": {"a": {"requests_per_s": 20, "burst": 20}}}
    model = with_chats(sim_model(400, speaks=True))
    async with (
        batch_cluster(model, tmp_path / "made", router) as cluster,
        client_of(cluster.router.http_address, "tk-alice", max_retries=9) as a,
        client_of(cluster.router.http_address, "tk-bob") as b,
        client_of(cluster.router.http_address, "tk-op") as operator,
    ):
        # More lines than Alice's rate allows at once: those refused are tried again.
        batch = await begin(a, [chat(f"{number}", max_tokens=2) for number in range(60)], CHATS)
        for refused in (
            b.files.retrieve(batch.input_file_id),
            b.files.content(batch.input_file_id),
            b.files.delete(batch.input_file_id),
            b.batches.retrieve(batch.id),
            b.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await refused
        with pytest.raises(openai.BadRequestError, match="input_file_id"):
            await b.batches.create(input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h")
        assert (await b.files.list()).data == []
        assert (await b.batches.list()).data == []
        done = await ended(operator, batch.id)
        assert done.request_counts.model_dump() == {"total": 60, "completed": 60, "failed": 0}
        assert [one.id for one in (await operator.batches.list()).data] == [batch.id]
        assert len((await operator.files.list()).data) == 2
        assert len(await content_of(operator, done.output_file_id)) == 60
        # Bob's key is not for the model.
        denied = await ended(operator, (await begin(b, [chat("x")], CHATS)).id)
        (line,) = await content_of(b, denied.error_file_id)
        assert line["response"]["status_code"] == 403
        # A tenant's space is bounded, whatever another one uses.
        with pytest.raises(openai.BadRequestError, match="max_files_mib_per_tenant"):
            await a.files.create(file=b"x" * (1 << 20), purpose="batch")
        await b.files.create(file=b"x" * (1 << 19), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="max_files_mib_per_tenant"):
            await b.files.create(file=b"x" * (1 << 19), purpose="batch")
        # A key that is withdrawn ends what its batches may do.
        last = await begin(a, [chat(f"{number}", max_tokens=500, ignore_eos=True) for number in range(100)], CHATS)
        keys.write_text(bob + entry_for("tk-op", "op", "", [], None, operator=True))
        os.utime(keys)
        done = await ended(operator, last.id)
        errors = await content_of(operator, done.error_file_id)
        assert {line["response"]["status_code"] for line in errors} == {401}


async def test_without_a_folder_the_setting_is_named(sim_model: ModelFactory) -> None:
    async with http_cluster(sim_model(400, speaks=True), engine="sim") as cluster:
        for path, body in (("/v1/files", None), ("/v1/batches", None), ("/v1/batches", {})):
            status, _, said = await asyncio.to_thread(call, cluster.router.http_address, path, body)
            assert (status, said["error"]["code"]) == (501, "not_configured")
            assert "batches_folder" in said["error"]["message"]
