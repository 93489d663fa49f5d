"""Stops and calls over HTTP and gRPC, as clients see them on a real cluster."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from protos import inference_pb2 as pb
from support.openai_http import http_cluster, with_tools
from tandem.client import Client
from tandem.storyteller import STORYTELLER

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = "Tell me a story about a fox."
PARAMETERS: Any = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"enum": ["fox", "owl"]}, "minItems": 6, "maxItems": 8}},
    "required": ["words"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}
FUNCTION: Any = {"type": "function", "name": "find", "parameters": PARAMETERS}
CALM: Any = {"model": "teller", "temperature": 0}
FORCED: Any = CALM | {"messages": [{"role": "user", "content": ASK}], "tools": [TOOL], "tool_choice": "required"}


@dataclass
class Site:
    """A cluster and its clients."""

    http: str
    openai: openai.AsyncOpenAI
    grpc: Client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    model = with_tools(STORYTELLER, tmp_path_factory.mktemp("models") / "teller")
    async with http_cluster(model, dtype="float32") as cluster:
        http = cluster.router.http_address
        async with (
            openai.AsyncOpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=0) as by_openai,
            Client(cluster.router.address) as by_grpc,
        ):
            yield Site(http, by_openai, by_grpc)


@pytest.mark.parametrize("reason", ["length", "stop", "tool_calls"])
async def test_a_forced_call_is_streamed_and_cut_off_calls_go_on(site: Site, reason: str) -> None:
    asked: Any = FORCED | {"max_tokens": 30 if reason == "length" else 120}
    if reason == "stop":
        complete: Any = (await site.openai.chat.completions.create(**asked)).choices[0].message.tool_calls
        asked["stop"] = complete[0].function.arguments[20:26]
    whole = (await site.openai.chat.completions.create(**asked)).choices[0]
    calls: Any = whole.message.tool_calls
    assert whole.finish_reason == reason
    pieces, finish = [], None
    async for chunk in await site.openai.chat.completions.create(**asked, stream=True):
        finish = chunk.choices[0].finish_reason or finish
        pieces += [each.function.arguments for each in chunk.choices[0].delta.tool_calls or () if each.index == 0]  # type: ignore[union-attr]
    assert finish == reason
    assert "".join(piece or "" for piece in pieces) == calls[0].function.arguments
    assert len([piece for piece in pieces if piece]) > 3, "arguments come as they are generated"
    turns: Any = [*FORCED["messages"], whole.message.model_dump(exclude_none=True), {"role": "user", "content": "So?"}]
    assert (await site.openai.chat.completions.create(**CALM, messages=turns, max_tokens=4)).choices[0].message.content


async def test_only_allowed_tools_are_called(site: Site) -> None:
    tools: Any = [FUNCTION, FUNCTION | {"name": "say"}]
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "say"}]}
    answer: Any = await site.openai.responses.create(
        **CALM, input=ASK, tools=tools, tool_choice=choice, max_output_tokens=200
    )
    assert {item.name for item in answer.output} == {"say"}
    assert answer.tool_choice.mode == "required"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_ends_a_text_is_part_of_it_on_demand(site: Site, stream: bool) -> None:
    async def text_of(**options: Any) -> str:
        asked: Any = CALM | {"prompt": "Once upon a time", "max_tokens": 30, "stream": stream}
        made: Any = await site.openai.completions.create(**asked, extra_body=options)
        if not stream:
            return str(made.choices[0].text)
        return "".join([chunk.choices[0].text async for chunk in made])

    whole = await text_of()
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    stop = whole[10:14]
    end = whole.index(stop)
    assert await text_of(stop=stop) == whole[:end]
    assert await text_of(stop=stop, include_stop_str_in_output=True) == whole[: end + len(stop)]
    sampling, token_ids = pb.Sampling(temperature=0, max_tokens=30), list[int]()
    async for message in site.grpc.generate("Once upon a time", sampling=sampling):
        token_ids += message.token_ids
    last = next(place for place in range(5, 30) if token_ids[place] not in token_ids[:place])
    before, upto = (tokenizer.decode(list(token_ids[:count])) for count in (last, last + 1))
    for skips in (True, False):
        options: Any = {"stop_token_ids": [token_ids[last]], "skip_special_tokens": skips}
        assert (await text_of(**options)).strip() == before.strip()
        assert (await text_of(**options, include_stop_str_in_output=True)).strip() == upto.strip()


async def test_grpc_has_deltas_of_calls_on_demand(site: Site) -> None:
    options: Any = {"messages": [("user", ASK)], "tools": [TOOL], "tool_choice": "required", "parse_output": True}
    sampling = pb.Sampling(temperature=0, max_tokens=20)
    for streams in (False, True):
        parts: list[pb.OutputPart] = []
        stream = site.grpc.stream(**options, sampling=sampling, stream_tool_calls=streams)
        async with stream as pieces:
            async for piece in pieces:
                parts += piece.parts
        (made,) = [part.tool_call for part in parts if part.HasField("tool_call")]
        deltas = [part.tool_call_delta for part in parts if part.HasField("tool_call_delta")]
        assert (made.name, made.incomplete) == ("find", True)
        assert "".join(delta.arguments for delta in deltas) == (made.arguments if streams else "")
        with pytest.raises(json.JSONDecodeError):
            json.loads(made.arguments)
