"""The calls of the public API beside Generate, over a real cluster; and the commands that use them."""

import asyncio
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.errors import InvalidRequest, NotConfigured, StartError
from protos import inference_pb2 as pb
from support.processes import Stream, finished, until
from tandem.cli.client.batch import run_batch
from tandem.cli.client.status import view
from tandem.client import Client, Target, error_of
from tandem.client.sync_client import SyncClient
from tandem.storyteller import STORYTELLER


def request_of(*token_ids: int, max_tokens: int = 4, **more: Any) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=max_tokens, temperature=0)
    return pb.GenerateRequest(token_ids=token_ids, sampling=sampling, **more)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


async def test_a_batch_gives_each_its_own_result_and_its_own_error(model: Path, cluster_of: Any) -> None:
    async with cluster_of(model, prefill=1, decode=1, engine="sim") as cluster, Client(cluster.address) as client:
        requests = [request_of(*range(start, start + 40)) for start in range(30)]
        requests[7] = request_of(5000)
        requests[9].sampling.n = 3
        results = {result.index: result async for result in client.generate_batch(requests, max_concurrent=8)}
        assert sorted(results) == list(range(30))
        wrong = error_of(results[7])
        assert (type(wrong), wrong.field) == (InvalidRequest, "token_ids")
        assert [len(results[9].choices), len(results[3].choices)] == [3, 1]
        assert [results[number].finish.usage.completion_tokens for number in (9, 3)] == [12, 4]
        alone = (await finished([Stream(client, list(range(3, 43)), 4)]))[0]
        assert list(results[3].choices[0].token_ids) == alone.token_ids
        assert results[3].choices[0].reason == pb.FINISH_REASON_LENGTH
        assert results[3].finish.receipt.placement.decode_worker == "decode-0"
        for bad, field in (([], "requests"), (requests[:1] * 5000, "requests")):
            with pytest.raises(InvalidRequest, match=field):
                [result async for result in client.generate_batch(bad)]
        with pytest.raises(InvalidRequest, match="max_concurrent"):
            [result async for result in client.generate_batch(requests[:1], max_concurrent=257)]


async def test_leaving_a_batch_leaves_nothing_under_way(model: Path, cluster_of: Any, audit: Any) -> None:
    async with cluster_of(model, prefill=0, decode=1, engine="sim", sim_step_ms=20) as cluster:
        async with Client(cluster.address) as client:
            requests = [request_of(number, max_tokens=2000) for number in range(10)]
            requests[0].sampling.max_tokens = 1
            async for result in client.generate_batch(requests, max_concurrent=10):
                assert result.index == 0
                break
        await audit([worker.address for worker in cluster.workers])


async def test_tokens_are_those_that_the_model_gets(cluster_of: Any) -> None:
    async with cluster_of(STORYTELLER, prefill=0, decode=1, engine="sim") as cluster, Client(cluster.address) as client:
        text = "Once upon a time, a fox"
        tokens = await client.tokenize(text)
        pieces = [piece async for piece in client.generate(text, sampling=pb.Sampling(max_tokens=2))]
        assert len(tokens) == pieces[-1].finish.usage.prompt_tokens
        chat = await client.tokenize(messages=[("user", text)])
        assert len(chat) > len(tokens)
        with pytest.raises(InvalidRequest, match="model"):
            await client.tokenize(text, model="auto")
        with pytest.raises(InvalidRequest):
            await client.tokenize(text, messages=[("user", text)])

        def without_asyncio() -> str:
            with SyncClient(cluster.address) as sync:
                assert sync.tokenize(text) == tokens
                assert sync.list_models()[0].has_tokenizer
                sampling = pb.Sampling(max_tokens=8, temperature=0)
                whole = "".join(piece.text for piece in sync.generate(text, sampling=sampling))
                for _ in sync.generate(text, sampling=pb.Sampling(max_tokens=500)):
                    break  # and the rest is cancelled
                (result,) = sync.generate_batch([pb.GenerateRequest(text=text, sampling=sampling)])
                assert result.choices[0].text == whole
                with pytest.raises(InvalidRequest, match="temperature"):
                    list(sync.generate(text, sampling=pb.Sampling(temperature=-1)))
                return whole

        assert await asyncio.to_thread(without_asyncio)


async def test_the_status_is_what_there_is(model: Path, cluster_of: Any) -> None:
    async with cluster_of(model, prefill=1, decode=2, engine="sim") as cluster, Client(cluster.address) as client:
        before = await client.cluster_status()
        await finished([Stream(client, list(range(start, start + 64)), 5) for start in (0, 200)])

        async def cached() -> bool:
            (now,) = (await client.cluster_status()).models
            return sum(worker.cached_blocks for worker in now.workers if worker.role == "decode") == 2 * 4

        await until(cached, "the caches have been heard of")
        status = await client.cluster_status()
        (served,) = status.models
        assert [(worker.worker_id, worker.role) for worker in served.workers] == [
            ("decode-0", "decode"),
            ("decode-1", "decode"),
            ("prefill-0", "prefill"),
        ]
        assert (served.requests, served.input_tokens, served.output_tokens) == (2, 128, 10)
        assert {link.borrower for link in served.links} == {"decode-0", "decode-1"}
        assert len(served.links) == 4
        console = quiet()
        console.print(view(status, before))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "prefill-0" in shown
        assert "2 over" in shown
        with pytest.raises(NotConfigured, match="records_file"):
            await client.feedback("r1", rating=1)


async def test_records_and_feedback_are_kept(cluster_of: Any, tmp_path: Path) -> None:
    kept = tmp_path / "records.jsonl"
    router = {"records_file": str(kept), "record_texts": True}
    started = cluster_of(STORYTELLER, prefill=0, decode=1, engine="sim", router=router)
    async with started as cluster, Client(cluster.address) as client:
        sampling = pb.Sampling(max_tokens=6, temperature=0)
        pieces = [piece async for piece in client.generate("Once", sampling=sampling, request_id="r1", tenant="t")]
        await client.feedback("r1", rating=-0.5, corrected_text="Twice")
        with pytest.raises(InvalidRequest, match="rating"):
            await client.feedback("r1", rating=2)
        with pytest.raises(InvalidRequest, match="request_id"):
            await client.feedback("")
        with pytest.raises(InvalidRequest, match="one of rating, corrected_text and comment"):
            await client.feedback("r1")
        three = pb.Sampling(max_tokens=6, n=3, temperature=0)
        [piece async for piece in client.generate("Twice", sampling=three, request_id="r2")]

        await until(lambda: kept.read_text().count("\n") == 3, "all are written")
    first, second, third = (json.loads(line) for line in kept.read_text().splitlines())
    assert first["request"]["request_id"] == second["feedback"]["request_id"] == "r1"
    assert first["request"]["output"] == ["".join(piece.text for piece in pieces)]
    assert first["request"]["prompt"] == {"text": "Once"}
    assert first["request"]["receipt"]["kv"]["computed_blocks"] == 1
    assert second["feedback"]["corrected_text"] == "Twice"
    assert (second["feedback"]["tenant"], second["feedback"]["key"]) == ("", "")
    assert third["request"]["completion_tokens"] == 18, "of all choices"


async def test_a_batch_file_is_worked_through_however_often_it_is_begun(
    model: Path, cluster_of: Any, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": f"q{n}", "token_ids": [n, n + 1], "sampling": {"max_tokens": 3}} for n in range(20)]
    lines[4]["sampling"] = {"max_tokens": 3, "temprature": 1}
    texts = [json.dumps(line) for line in lines]
    texts[6] = "{broken"
    source.write_text("\n".join(texts) + "\n")
    async with cluster_of(model, prefill=0, decode=1, engine="sim", sim_step_ms=5) as cluster:
        running = asyncio.ensure_future(run_batch(quiet(), Target(cluster.address), source, target, 2, 60))

        await until(lambda: target.exists() and target.read_text().count("\n") >= 5, "five are done")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with target.open("a") as file:
            file.write('{"id": "q19", "text": "cut o')  # as a machine that lost its power leaves it
        second = await run_batch(quiet(), Target(cluster.address), source, target, 4, 60)
        assert second.done_before >= 3
        assert (second.finished + second.done_before, second.failed) == (18, 2)
        answers = {answer["id"]: answer for answer in map(json.loads, target.read_text().splitlines())}
        assert len(answers) == 20
        assert "temprature" in answers["q4"]["error"]["message"]
        assert answers["line 7"]["error"]["message"].startswith("line 7: is not JSON")
        assert all(len(answers[f"q{n}"]["token_ids"]) == 3 for n in range(20) if n not in (4, 6))
        texts[4], texts[6] = (json.dumps(lines[n] | {"sampling": {"max_tokens": 3}}) for n in (4, 6))
        source.write_text("\n".join(texts) + "\n")
        third = await run_batch(quiet(), Target(cluster.address), source, target, 4, 60)
        assert (third.done_before, third.finished, third.failed) == (18, 2, 0)
        assert target.read_text().count("\n") == 20


async def test_a_batch_waits_for_a_router_that_is_away(model: Path, cluster_of: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"token_ids": [1], "sampling": {"max_tokens": 2}}) + "\n")
    async with cluster_of(model, prefill=0, decode=1, engine="sim") as cluster:
        os.kill(cluster.router.pid, signal.SIGSTOP)
        running = asyncio.ensure_future(run_batch(quiet(), Target(cluster.address), source, target, 1, 1.0))
        await asyncio.sleep(0.5)
        os.kill(cluster.router.pid, signal.SIGCONT)
        outcome = await running
    assert outcome.finished == 1


@pytest.mark.parametrize(
    ("content", "out", "said"),
    [
        ("", "", "has no lines"),
        ('{"id": "a"}\n{"id": "a"}\n', "", "two lines have the id 'a'"),
        ('{"id": "a"}\n', "something else\n", "not an answer of an earlier run"),
    ],
)
async def test_files_that_cannot_be_used_are_left_alone(tmp_path: Path, content: str, out: str, said: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(content)
    if out:
        target.write_text(out)
    with pytest.raises(StartError, match=said):
        await run_batch(quiet(), Target("127.0.0.1:1"), source, target, 1, 1)
    assert not out or target.read_text() == out
