"""The console in a real browser, over a real cluster."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from protos import inference_pb2 as pb
from support.media_files import picture
from support.media_models import write_media_model
from support.preprocessors import preprocessor
from support.processes import Stream, finished
from tandem.client import Client
from tandem.storyteller import STORYTELLER

CHROMIUM = shutil.which("chromium")
MARKER = "xylophone"
"""Stands in a prompt."""


async def page_of(url: str, folder: Path) -> str:
    """The document as it stands after some seconds of its own time."""
    assert CHROMIUM is not None
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder}",
    ]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *options,
        f"--user-data-dir={folder}",
        "--virtual-time-budget=4000",
        "--dump-dom",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    document = (await process.stdout.read()).decode()
    await process.wait()
    return document


@pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")
async def test_the_page_shows_workers_links_and_requests(model: Path, cluster_of: Any, tmp_path: Path) -> None:
    router = {"http_port": 0, "decode_prefill_tokens_per_s": 100.0}
    async with cluster_of(model, prefill=1, decode=1, router=router, engine="sim") as cluster:
        url = f"http://{cluster.router.http_address}/console"
        async with Client(cluster.address) as client:
            await finished([Stream(client, [*range(100), number], 5) for number in range(3)])
        page = await page_of(url, tmp_path / "profile")
        for text in ("decode-0", "prefill-0", "serving", "KV moves", "decode-0 ← prefill-0"):
            assert text in page, text
        assert page.count('<div class="request">') == 3
        assert 'role="img"' in page
        assert re.search(r"\d+ moved \([\d.,]+ \w+ over", page), "receipts are shown whole"
        async with aiohttp.ClientSession() as session, session.get(f"{url}/data") as answer:
            said = await answer.text()
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        requests = json.loads(said)["requests"]
        assert [each["number"] for each in requests] == [0, 1, 2]
        chosen, other = requests[0]["ways"]
        assert (chosen["lender"], other["lender"]) == ("prefill-0", "")
        assert chosen["cost_ms"] < other["cost_ms"]
        assert "decode-0 alone: cost" in page, "and what was not chosen"
        assert "% hits" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")
async def test_thumbnails_of_pictures_where_texts_are_kept(cluster_of: Any, tmp_path: Path) -> None:
    model = write_media_model(tmp_path / "seeing")
    async with preprocessor(model=model, processes=1) as (_, role):
        router = {
            "http_port": 0,
            "model": None,
            "models": [{"path": model, "preprocessor": role.address}],
            "records_file": tmp_path / "records.jsonl",
            "record_texts": True,
        }
        async with cluster_of(model, prefill=0, decode=1, router=router, engine="sim") as cluster:
            message = ("user", [MARKER, *({"type": "image", "data": picture(seed)} for seed in range(2))])
            async with Client(cluster.address) as client:
                pieces = client.generate(messages=[message], sampling=pb.Sampling(max_tokens=2))
                assert [piece async for piece in pieces]
            page = await page_of(f"http://{cluster.router.http_address}/console", tmp_path / "profile")
    shown = re.findall(r'<img src="data:image/webp;base64,[^"]+" alt="picture (\d) of the prompt">', page)
    assert shown == ["1", "2"]
    assert MARKER not in page


async def test_each_is_told_once_and_nothing_of_what_was_said(cluster_of: Any) -> None:
    cluster = cluster_of(STORYTELLER, prefill=0, decode=1, engine="sim", router={"http_port": 0})
    numbers, told, texts = [], "", []
    async with cluster, Client(cluster.address) as client, aiohttp.ClientSession() as session:
        url = f"http://{cluster.router.http_address}/console/data"
        for number in range(4):
            prompt, sampling = f"The {MARKER} of {number} foxes", pb.Sampling(max_tokens=12)
            texts.append("".join([piece.text async for piece in client.generate(prompt, sampling=sampling)]))
        for since in ("", "?since=2", "?since=4", "?since=x", "?since=99999999999999999999999"):
            async with session.get(url + since) as answer:
                assert answer.status == 200
                told += await answer.text()
                numbers.append([each["number"] for each in (await answer.json())["requests"]])
    assert numbers == [[0, 1, 2, 3], [2, 3], [], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert MARKER not in told
    assert not any(text.strip() in told for text in texts if len(text.strip()) > 8)
