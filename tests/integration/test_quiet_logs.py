"""At debug level too no log has a prompt, an answer, or a secret."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ServiceError
from conftest import ModelFactory
from protos import inference_pb2 as pb
from router.security.api_keys import hash_of
from support.api_keys import keys_file
from support.openai_http import call, http_cluster
from support.processes import kill_worker
from tandem.client import Client

VOCAB = 400
MARKER = "xyzzy-plugh-4711"
KEY = "tk-for-the-quiet"
SALT = "salt-8472"


async def _generate(client: Client, **fields: Any) -> str:
    text = ""
    async for piece in client.generate(sampling=pb.Sampling(max_tokens=40, temperature=0), cache_salt=SALT, **fields):
        text += piece.text
    return text


async def _refused(client: Client, **fields: Any) -> None:
    with pytest.raises(ServiceError):
        async for _ in client.generate(timeout_s=5, **fields):
            pass


async def test_no_log_has_what_is_private(
    sim_model: ModelFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TANDEM_LOG", "debug")
    keys = keys_file(tmp_path, {"name": "somebody", "sha256": hash_of(KEY), "tenant": "t"})
    model: Path = sim_model(VOCAB, speaks=True)
    answers = []
    async with http_cluster(model, 2, {"api_keys_file": keys}, engine="sim", sim_step_ms=2.0) as cluster:
        async with Client(cluster.address, api_key=KEY) as client:
            answers.append(await _generate(client, text=MARKER))
            structured = pb.Sampling(structured=pb.StructuredOutput(regex=f"({MARKER}"))
            await _refused(client, text=MARKER, sampling=structured)
            await _refused(client, text=MARKER, sampling=pb.Sampling(stop=[MARKER * 20]))
            await _refused(client, messages=[("user", MARKER)], chat_template_kwargs=f'{{"{MARKER}"')
            going = [asyncio.ensure_future(_generate(client, text=f"{MARKER} {number}")) for number in range(8)]
            await asyncio.sleep(0.05)
            kill_worker(cluster.decode[0])
            answers += await asyncio.gather(*going)
        body = {"prompt": MARKER, "max_tokens": 40, "temperature": 0, "cache_salt": SALT}
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "cmpl-in-the-log"}
        for content in (
            body,
            body | {"tools": [MARKER]},
            {"messages": [{"role": MARKER, "content": MARKER}]},
            {MARKER: 1},
        ):
            path = "/v1/completions" if "prompt" in content else "/v1/chat/completions"
            status, _, said = await asyncio.to_thread(call, cluster.router.http_address, path, content, headers)
            if status == 200:
                answers.append(said["choices"][0]["text"])
        wrong = {"authorization": "Bearer tk-a-wrong-one"}
        assert (await asyncio.to_thread(call, cluster.router.http_address, "/v1/completions", body, wrong))[0] == 401
    logged = capsys.readouterr().err
    assert "DEBUG router" in logged
    assert " [cmpl-in-the-log]: attempt 1 at " in logged
    assert not re.search(r"(DEBUG|INFO) \S+ grpc\._cython", logged), "libraries stay at warning"
    assert "joined" in logged
    assert len(answers) == 10
    tokens = json.dumps([ord(letter) for letter in MARKER])
    private = {text[:24] for text in answers} | {MARKER, KEY, hash_of(KEY), SALT, "tk-a-wrong-one", tokens}
    assert "" not in private
    found = [line for line in logged.splitlines() if any(text in line for text in private)]
    assert not found, found[:5]
