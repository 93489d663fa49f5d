"""Features of public clients against a router: `features.py BASE_URL`, in the clients' own environment.

Prints one JSON object a line: client, feature, and how it went (empty: it works).
"""

import asyncio
import base64
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOG": "ERROR", "OPENAI_API_KEY": "none"}

import anthropic
import instructor
import litellm
import openai
from pydantic import BaseModel

MODEL, EMBEDDER, ASK = "model", "embedder", "What is the weather in Paris?"
SEEING = "seeing"
"""A model of the sim engine, which makes at least 20 tokens of a picture."""
PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
BASE64 = base64.b64encode(PNG).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"
SHOWN: Any = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": DATA_URL}}],
    }
]
LEAST_TOKENS = 20
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "get_weather", "description": "Current weather of a city.", "parameters": WEATHER}
TOOL: Any = {"type": "function", "function": FUNCTION}
REFUSED: dict[tuple[str, str], str] = {
    ("openai", "audio"): "no model here hears or speaks",
}
"""Cells that are refused with a clear error, and why."""
Feature = Callable[[str], Awaitable[object]]
FEATURES: dict[tuple[str, str], Feature] = {}


class City(BaseModel):
    """A city, as structured output."""

    city: str


def feature(client: str, name: str) -> Callable[[Feature], Feature]:
    def add(function: Feature) -> Feature:
        FEATURES[client, name] = function
        return function

    return add


def by_openai(base: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


# ---------------------------------------------------------------------------------------------------- openai


@feature("openai", "chat")
async def _(base: str) -> None:
    answer = await by_openai(base).chat.completions.create(model=MODEL, messages=STORY, max_tokens=30)
    assert answer.choices[0].message.content


@feature("openai", "chat stream")
async def _(base: str) -> None:
    stream = await by_openai(base).chat.completions.create(
        model=MODEL, messages=STORY, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0


@feature("openai", "reasoning_effort and unknown fields")
async def _(base: str) -> None:
    await by_openai(base).chat.completions.create(
        model=MODEL, messages=STORY, max_tokens=5, reasoning_effort="low", verbosity="low", extra_body={"colour": 1}
    )


@feature("openai", "tools, forced")
async def _(base: str) -> None:
    answer = await by_openai(base).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": ASK}], tools=[TOOL], tool_choice="required", max_tokens=64
    )
    json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"]


@feature("openai", "tools, free")
async def _(base: str) -> None:
    answer = await by_openai(base).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": ASK}], tools=[TOOL], max_tokens=64, temperature=0
    )
    call = answer.choices[0].message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


@feature("openai", "structured output")
async def _(base: str) -> None:
    answer = await by_openai(base).chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": ASK}], response_format=City, max_tokens=64, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, City)


@feature("openai", "completions with logprobs")
async def _(base: str) -> None:
    answer = await by_openai(base).completions.create(model=MODEL, prompt="Once", max_tokens=5, logprobs=2)
    assert len(answer.choices[0].logprobs.tokens) == 5


@feature("openai", "responses")
async def _(base: str) -> None:
    client = by_openai(base)
    first = await client.responses.create(model=MODEL, input=STORY, max_output_tokens=20)
    second = await client.responses.create(
        model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=20
    )
    assert second.output_text


@feature("openai", "responses stream with tools")
async def _(base: str) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    client = by_openai(base)
    async with client.responses.stream(
        model=MODEL, input=ASK, tools=[tool], tool_choice="required", max_output_tokens=64
    ) as events:
        async for _event in events:
            pass
        answer = await events.get_final_response()
    assert answer.output[0].type == "function_call"


@feature("openai", "models")
async def _(base: str) -> None:
    assert [model.id async for model in by_openai(base).models.list()] == [MODEL, EMBEDDER, SEEING]


@feature("openai", "files and batches")
async def _(base: str) -> None:
    client = by_openai(base)
    body = {"model": MODEL, "messages": STORY, "max_tokens": 5}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = await client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(0.1)
        batch = await client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert json.loads((await client.files.content(batch.output_file_id)).text)["custom_id"] == "a"


@feature("openai", "null content of an assistant and of a tool")
async def _(base: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    turns: Any = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": None},
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": None},
    ]
    await by_openai(base).chat.completions.create(model=MODEL, messages=turns, tools=[TOOL], max_tokens=5)


@feature("openai", "continue_final_message")
async def _(base: str) -> None:
    turns: Any = [*STORY, {"role": "assistant", "content": "Once upon a time"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await by_openai(base).chat.completions.create(
        model=MODEL, messages=turns, max_tokens=20, temperature=0, extra_body=goes_on
    )
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.content.startswith("Once upon a time")


@feature("openai", "images")
async def _(base: str) -> None:
    client = by_openai(base)
    answer = await client.chat.completions.create(model=SEEING, messages=SHOWN, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > LEAST_TOKENS
    shown: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": DATA_URL, "detail": "auto"}]}]
    first = await client.responses.create(model=SEEING, input=shown, max_output_tokens=2)
    second = await client.responses.create(
        model=SEEING, input="And now?", previous_response_id=first.id, max_output_tokens=2
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens > LEAST_TOKENS


@feature("openai", "an uploaded picture")
async def _(base: str) -> None:
    client = by_openai(base)
    file = await client.files.create(file=("a.png", PNG), purpose="vision")
    shown: Any = [{"role": "user", "content": [{"type": "input_image", "file_id": file.id, "detail": "auto"}]}]
    answer = await client.responses.create(model=SEEING, input=shown, max_output_tokens=2)
    assert answer.usage is not None
    assert answer.usage.input_tokens > LEAST_TOKENS


@feature("openai", "audio")
async def _(base: str) -> None:
    await by_openai(base).chat.completions.create(
        model=MODEL, messages=STORY, modalities=["text", "audio"], audio={"voice": "a", "format": "wav"}
    )


@feature("openai", "embeddings")
async def _(base: str) -> None:
    client = by_openai(base)
    found = await client.embeddings.create(model=EMBEDDER, input=["Once", "A king"])
    assert [len(each.embedding) for each in found.data] == [256, 256]
    assert found.usage.prompt_tokens > 0
    short = await client.embeddings.create(model=EMBEDDER, input="Once", dimensions=8, encoding_format="float")
    assert len(short.data[0].embedding) == 8


# ------------------------------------------------------------------------------------------------- anthropic


def by_anthropic(base: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0)


@feature("anthropic", "messages")
async def _(base: str) -> None:
    answer = await by_anthropic(base).messages.create(model=MODEL, messages=STORY, max_tokens=20)
    assert answer.content[0].text


@feature("anthropic", "messages stream")
async def _(base: str) -> None:
    async with by_anthropic(base).messages.stream(model=MODEL, messages=STORY, max_tokens=20) as stream:
        assert "".join([text async for text in stream.text_stream])


@feature("anthropic", "tools and results")
async def _(base: str) -> None:
    client = by_anthropic(base)
    tool: Any = {"name": "get_weather", "description": "Current weather of a city.", "input_schema": WEATHER}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    asked: Any = {"model": MODEL, "tools": [tool], "max_tokens": 64}
    called = await client.messages.create(**asked, messages=messages, tool_choice={"type": "any"})
    result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": "Sunny, 21 degrees."}
    messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    await client.messages.create(**asked, messages=messages)


@feature("anthropic", "a begun answer goes on")
async def _(base: str) -> None:
    turns: Any = [*STORY, {"role": "assistant", "content": "Once upon a time"}]
    answer = await by_anthropic(base).messages.create(
        model=MODEL, messages=turns, max_tokens=20, extra_body={"temperature": 0}
    )
    assert answer.content[0].text
    assert not answer.content[0].text.startswith("Once upon a time")


@feature("anthropic", "count_tokens")
async def _(base: str) -> None:
    assert (await by_anthropic(base).messages.count_tokens(model=MODEL, messages=STORY)).input_tokens > 5


# ------------------------------------------------------------------------------------------------ frameworks


@feature("anthropic", "images")
async def _(base: str) -> None:
    client = anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    turns: Any = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "see"}]}]
    counted = await client.messages.count_tokens(model=SEEING, messages=turns)
    answer = await client.messages.create(model=SEEING, max_tokens=2, messages=turns)
    assert counted.input_tokens > LEAST_TOKENS
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens


@feature("langchain-openai", "images")
async def _(base: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=SEEING, base_url=f"{base}/v1", api_key="none", max_tokens=2)
    image = {"type": "image", "base64": BASE64, "mime_type": "image/png"}
    answer = await chat.ainvoke([HumanMessage(content=[{"type": "text", "text": "see"}, image])])
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] > LEAST_TOKENS


@feature("langchain-openai", "chat and stream")
async def _(base: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, base_url=f"{base}/v1", api_key="none", max_tokens=20)
    assert (await chat.ainvoke("Tell me a story.")).content
    assert "".join([str(chunk.content) async for chunk in chat.astream("Tell me a story.")])


@feature("langchain-openai", "bind_tools")
async def _(base: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: str) -> str:
        """Return the current weather of a city."""
        return "sunny"

    chat = ChatOpenAI(model=MODEL, base_url=f"{base}/v1", api_key="none", max_tokens=64, temperature=0)
    called = await chat.bind_tools([get_weather]).ainvoke(ASK)
    assert called.tool_calls[0]["args"] == {"city": "Paris"}


@feature("langchain-openai", "with_structured_output")
async def _(base: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, base_url=f"{base}/v1", api_key="none", max_tokens=64, temperature=0)
    assert isinstance(await chat.with_structured_output(City).ainvoke(ASK), City)


@feature("langchain-openai", "embeddings")
async def _(base: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    # its own splitting into tokens is of OpenAI's models
    options: Any = {"base_url": f"{base}/v1", "api_key": "none", "check_embedding_ctx_length": False}
    found = OpenAIEmbeddings(model=EMBEDDER, **options)
    assert len(await found.aembed_documents(["Once", "A king"])) == 2
    assert len(await found.aembed_query("Once")) == 256


@feature("litellm", "embeddings and rerank")
async def _(base: str) -> None:
    import litellm

    found = await litellm.aembedding(model=f"openai/{EMBEDDER}", input=["Once"], api_base=f"{base}/v1", api_key="none")
    assert len(found.data[0]["embedding"]) == 256
    ranked: Any = await litellm.arerank(
        model=f"hosted_vllm/{EMBEDDER}", query="Once", documents=["A king", "Once"], api_base=base, api_key="none"
    )
    assert ranked.results[0]["index"] == 1


@feature("litellm", "chat, stream, tools")
async def _(base: str) -> None:
    where: Any = {"model": f"openai/{MODEL}", "api_base": f"{base}/v1", "api_key": "none", "max_tokens": 64}
    assert (await litellm.acompletion(messages=STORY, **where)).choices[0].message.content
    stream = await litellm.acompletion(messages=STORY, stream=True, **where)
    assert [chunk async for chunk in stream]
    asked = [{"role": "user", "content": ASK}]
    called = await litellm.acompletion(messages=asked, tools=[TOOL], tool_choice="required", **where)
    assert called.choices[0].message.tool_calls


@feature("litellm", "images, by chats and by Messages")
async def _(base: str) -> None:
    by_chat: Any = {"model": f"openai/{SEEING}", "api_base": f"{base}/v1"}
    for where in (by_chat, {"model": f"anthropic/{SEEING}", "api_base": base}):
        answer = await litellm.acompletion(messages=SHOWN, api_key="none", max_tokens=2, **where)
        assert answer.usage.prompt_tokens > LEAST_TOKENS


@feature("litellm", "anthropic messages")
async def _(base: str) -> None:
    answer = await litellm.acompletion(
        model=f"anthropic/{MODEL}", api_base=base, api_key="none", messages=STORY, max_tokens=20
    )
    assert answer.choices[0].message.content


@feature("instructor", "tools and JSON modes")
async def _(base: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(by_openai(base), mode=mode)
        found = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": ASK}],
            response_model=City,
            max_tokens=64,
            temperature=0,
            max_retries=0,
        )
        assert isinstance(found, City)


@feature("pydantic-ai", "chat, tools, structured output")
async def _(base: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=by_openai(base)))
    settings: Any = {"max_tokens": 64, "temperature": 0}
    assert (await Agent(model, model_settings=settings).run("Tell me a story.")).output
    found = await Agent(model, output_type=City, model_settings=settings).run(ASK)
    assert isinstance(found.output, City)


@feature("openai-agents", "responses with a tool")
async def _(base: str) -> None:
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool

    called: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """Return the current weather of a city."""
        called.append(city)
        return "Sunny, 21 degrees."

    agent = Agent(
        "teller",
        model=OpenAIResponsesModel(MODEL, by_openai(base)),
        tools=[get_weather],
        model_settings=ModelSettings(tool_choice="required", max_tokens=64),
    )
    answer = await Runner.run(agent, ASK)
    assert called
    assert answer.raw_responses


@feature("llama-index", "chat and stream")
async def _(base: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(model=MODEL, api_base=f"{base}/v1", api_key="none", is_chat_model=True, max_tokens=20)
    messages = [ChatMessage(role="user", content="Tell me a story.")]
    assert (await llm.achat(messages)).message.content
    assert [piece async for piece in await llm.astream_chat(messages)]


async def main(base: str) -> None:
    for (client, name), function in FEATURES.items():
        try:
            await asyncio.wait_for(function(base), 120)
            failure = ""
        except Exception as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"[:300]
        cell = {"client": client, "feature": name, "failure": failure, "expected": REFUSED.get((client, name), "")}
        print(json.dumps(cell), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
