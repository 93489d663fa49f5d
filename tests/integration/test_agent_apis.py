"""OpenAI's Responses and Anthropic's Messages, as their own Python clients use them, on the storyteller."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import ANY

import anthropic
import openai
import pytest
import pytest_asyncio

from support.openai_http import TOOL_TEMPLATE, call, http_cluster, with_tools
from support.processes import until
from tandem.storyteller import STORYTELLER

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = "Tell me a story about a fox."
PARAMETERS: Any = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "owl"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
FUNCTION: Any = {
    "type": "function",
    "name": "find",
    "description": "Finds one.",
    "parameters": PARAMETERS,
    "strict": True,
}
TOOL: Any = {"name": "find", "description": "Finds one.", "input_schema": PARAMETERS}
THINKING = TOOL_TEMPLATE.replace(
    "<|assistant|>{%- endif -%}",
    "<|assistant|>{%- if enable_thinking is not false -%}<think>{%- endif -%}{%- endif -%}",
)
"""A template that opens reasoning, unless this is switched off."""


@dataclass
class Site:
    """A cluster, and the clients of both makers."""

    http: str
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    model = with_tools(STORYTELLER, tmp_path_factory.mktemp("models") / "teller", THINKING)
    async with http_cluster(model, dtype="float32", decode=1) as cluster:
        http = cluster.router.http_address
        async with (
            openai.AsyncOpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=0) as by_openai,
            anthropic.AsyncAnthropic(base_url=f"http://{http}", api_key="none", max_retries=0) as by_anthropic,
        ):
            yield Site(http, by_openai, by_anthropic)


CALM: Any = {"model": "teller", "temperature": 0, "reasoning": {"effort": "none"}}
QUIET: Any = {"model": "teller", "extra_body": {"temperature": 0}, "max_tokens": 40}


# ------------------------------------------------------------------------------------------------- Responses


async def test_a_response_whole_and_as_a_stream(site: Site) -> None:
    whole = await site.openai.responses.create(**CALM, input=ASK, instructions="Be brief.", max_output_tokens=30)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert len(whole.output_text) > 20
    assert (whole.usage.output_tokens, whole.usage.output_tokens_details.reasoning_tokens) == (30, 0)
    stream = await site.openai.responses.create(
        **CALM, input=ASK, instructions="Be brief.", max_output_tokens=30, stream=True
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert events[-1].response.output_text == whole.output_text  # type: ignore[union-attr]


async def test_a_conversation_goes_on_and_its_prefix_is_cached(site: Site) -> None:
    """Each turn's prompt begins with the whole turn before it, so all of its full blocks are found again."""
    first = await site.openai.responses.create(**CALM, input=ASK * 4, max_output_tokens=200)
    assert first.usage is not None
    asked: Any = CALM | {"input": "And then?", "max_output_tokens": 200}
    await asyncio.sleep(0.5)  # the router learns what the workers hold
    for _ in range(2):
        second = await site.openai.responses.create(**asked, previous_response_id=first.id)
        assert second.previous_response_id == first.id
        could_be = first.usage.total_tokens // 16 * 16
        assert second.usage.input_tokens_details.cached_tokens >= 0.9 * could_be
        await asyncio.sleep(0.5)
        first = second
    kept = await site.openai.responses.retrieve(first.id)
    assert kept.output_text == first.output_text
    items = await site.openai.responses.input_items.list(first.id)
    assert items.data[0].content[0].text == "And then?"  # type: ignore[union-attr]
    await site.openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await site.openai.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await site.openai.responses.create(**asked, previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    not_kept = await site.openai.responses.create(**asked, store=False)
    with pytest.raises(openai.NotFoundError):
        await site.openai.responses.retrieve(not_kept.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_calls_a_function_and_reads_its_output(site: Site, stream: bool) -> None:
    asked: Any = CALM | {"tools": [FUNCTION], "max_output_tokens": 60}
    if stream:
        async with site.openai.responses.stream(**asked, input=ASK, tool_choice="required") as events:
            async for _ in events:
                pass
            answer: Any = await events.get_final_response()
    else:
        answer = await site.openai.responses.create(
            **asked, input=ASK, tool_choice="required", parallel_tool_calls=False
        )
    called = answer.output[0]
    assert (called.type, called.name) == ("function_call", "find")
    assert json.loads(called.arguments)["kind"] in ("fox", "owl")
    items: Any = [
        {"role": "user", "content": ASK},
        *[item.model_dump(exclude_none=True) for item in answer.output],
        {"type": "function_call_output", "call_id": called.call_id, "output": "A red one."},
    ]
    answer = await site.openai.responses.create(**asked, input=items)
    assert answer.usage.input_tokens > 40


async def test_a_custom_tool_is_called_with_a_text(site: Site) -> None:
    tools: Any = [{"type": "custom", "name": "patch", "description": "Changes a file."}, {"type": "web_search"}]
    raw = await site.openai.responses.with_raw_response.create(
        **CALM, input=ASK, tools=tools, tool_choice="required", max_output_tokens=200
    )
    assert raw.headers["x-tandem-ignored"] == "tools[].type=web_search"
    called: Any = raw.parse().output[0]
    assert (called.type, called.name) == ("custom_tool_call", "patch")
    assert isinstance(called.input, str)


async def test_a_response_of_a_schema(site: Site) -> None:
    schema = PARAMETERS | {"x-guidance": {"whitespace_flexible": False}}
    form: Any = {"format": {"type": "json_schema", "name": "animal", "schema": schema, "strict": True}}
    answer = await site.openai.responses.create(**CALM, input=ASK, text=form, max_output_tokens=60)
    assert json.loads(answer.output_text)["kind"] in ("fox", "owl")


async def test_reasoning_is_an_item_of_its_own(site: Site) -> None:
    asked: Any = {"model": "teller", "temperature": 0, "input": ASK, "max_output_tokens": 20}
    stream = await site.openai.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    said = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    answer: Any = events[-1].response  # type: ignore[union-attr]
    assert [item.type for item in answer.output] == ["reasoning"]
    assert answer.output[0].content[0].text == said
    assert answer.usage.output_tokens_details.reasoning_tokens == answer.usage.output_tokens > 0


# -------------------------------------------------------------------------------------------------- Messages


async def test_a_message_whole_and_as_a_stream(site: Site) -> None:
    asked: Any = QUIET | {"thinking": {"type": "disabled"}, "messages": [{"role": "user", "content": ASK}]}
    whole = await site.anthropic.messages.create(**asked, system="Be brief.")
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 40)
    text = whole.content[0].text  # type: ignore[union-attr]
    async with site.anthropic.messages.stream(**asked, system="Be brief.") as stream:
        assert "".join([piece async for piece in stream.text_stream]) == text
        final = await stream.get_final_message()
    assert final.content[0].text == text  # type: ignore[union-attr]
    assert final.stop_reason == "max_tokens"
    stopped = await site.anthropic.messages.create(**asked, system="Be brief.", stop_sequences=[text[10:14]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[10:14])
    counted = await site.anthropic.messages.count_tokens(
        model="teller", messages=asked["messages"], system="Be brief.", tools=[TOOL]
    )
    assert counted.input_tokens > 20


@pytest.mark.parametrize("stream", [False, True])
async def test_a_begun_answer_goes_on_and_the_answer_is_only_what_follows(site: Site, stream: bool) -> None:
    user: Any = {"role": "user", "content": ASK}
    asked: Any = QUIET | {"thinking": {"type": "disabled"}}
    whole = (await site.anthropic.messages.create(**asked, messages=[user])).content[0].text  # type: ignore[union-attr]
    words = whole.split(" ")
    begun, rest = " ".join(words[:6]), "".join(f" {word}" for word in words[6:])
    turns: Any = [user, {"role": "assistant", "content": begun}]
    if stream:
        async with site.anthropic.messages.stream(**asked, messages=turns) as events:
            text = await events.get_final_text()
    else:
        text = (await site.anthropic.messages.create(**asked, messages=turns)).content[0].text  # type: ignore[union-attr]
    assert text.startswith(rest), "greedy, and cut between tokens"
    goes_on: Any = {"continue_final_message": True, "add_generation_prompt": False}
    quiet: Any = {"model": "teller", "temperature": 0, "max_tokens": 40, "reasoning_effort": "none"}
    if stream:
        chunks = await site.openai.chat.completions.create(**quiet, messages=turns, stream=True, extra_body=goes_on)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
    else:
        chat = await site.openai.chat.completions.create(**quiet, messages=turns, extra_body=goes_on)
        text = chat.choices[0].message.content or ""
        counted = await site.anthropic.messages.count_tokens(model="teller", messages=turns)
        status, _, tokens = await asyncio.to_thread(call, site.http, "/tokenize", {"messages": turns, **goes_on})
        assert (status, tokens["count"]) == (200, counted.input_tokens)
        assert chat.usage.prompt_tokens == counted.input_tokens
    assert text.startswith(rest)


async def test_reasoning_that_was_begun_goes_on_as_reasoning(site: Site) -> None:
    turns: Any = [{"role": "user", "content": ASK}, {"role": "assistant", "content": "<think>Once upon"}]
    answer = await site.anthropic.messages.create(**QUIET, messages=turns)
    assert [block.type for block in answer.content] == ["thinking"]


async def test_a_response_after_an_assistants_message_is_a_new_answer(site: Site) -> None:
    items: Any = [{"role": "user", "content": ASK}, {"role": "assistant", "content": "Once"}]
    begun = await site.openai.responses.create(**CALM, input=items, max_output_tokens=5)
    more: Any = [*items, {"role": "user", "content": ""}]
    longer = await site.openai.responses.create(**CALM, input=more, max_output_tokens=5)
    # the other prompt has an empty turn of the user besides: its role and its end
    assert longer.usage.input_tokens == begun.usage.input_tokens + 2


async def test_a_message_uses_a_tool_and_reads_its_result(site: Site) -> None:
    asked: Any = QUIET | {"thinking": {"type": "disabled"}, "tools": [TOOL], "max_tokens": 60}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": ASK, "cache_control": {"type": "ephemeral"}}]}
    ]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    async with site.anthropic.messages.stream(**asked, messages=messages, tool_choice=choice) as stream:
        called = await stream.get_final_message()
    block: Any = called.content[0]
    assert (called.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "find")
    assert block.input["kind"] in ("fox", "owl")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "A red one."}]}
    messages += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    answer = await site.anthropic.messages.create(**asked, messages=messages)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 60


async def test_thinking_is_a_block_of_its_own(site: Site) -> None:
    async with site.anthropic.messages.stream(**QUIET, messages=[{"role": "user", "content": ASK}]) as stream:
        answer = await stream.get_final_message()
    assert [block.type for block in answer.content] == ["thinking"]
    assert answer.content[0].thinking  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (400, {"max_tokens": 0}),
        (400, {"temperature": -1}),
        (400, {"messages": []}),
        (400, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (400, {"tool_choice": {"type": "any"}}),
        (404, {"model": "another"}),
    ],
)
async def test_errors_have_each_makers_form(site: Site, status: int, change: dict[str, Any]) -> None:
    body = {"model": "teller", "max_tokens": 40, "messages": [{"role": "user", "content": ASK}]} | change
    got, _, said = await asyncio.to_thread(call, site.http, "/v1/messages", body)
    kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert (got, said["type"], said["error"]["type"]) == (status, "error", kind)
    assert next(iter(change)) in said["error"]["message"]


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("input", {"input": None}),
        ("input[0].content[0].image_url", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input[0].type", {"input": [{"type": "computer_call"}]}),
        ("tools[0].name", {"tools": [{"type": "function"}]}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema"}}}),
        ("background", {"background": True}),
        ("temperature", {"temperature": -1}),
    ],
)
async def test_a_bad_response_names_its_field(site: Site, param: str, change: dict[str, Any]) -> None:
    got, _, said = await asyncio.to_thread(call, site.http, "/v1/responses", CALM | {"input": ASK} | change)
    assert (got, said["error"]["param"]) == (400, param)


# ----------------------------------------------------------------------------------------------- other paths


async def test_tokens_and_back(site: Site) -> None:
    text = "Once upon a time"
    asked = {"model": "teller", "prompt": text, "return_token_strs": True}
    status, _, said = await asyncio.to_thread(call, site.http, "/tokenize", asked)
    assert (status, said["count"], said["max_model_len"]) == (200, len(said["tokens"]), 2048)
    assert "".join(said["token_strs"][1:]) == text
    status, _, back = await asyncio.to_thread(
        call, site.http, "/detokenize", {"model": "teller", "tokens": said["tokens"][1:]}
    )
    assert (status, back["prompt"]) == (200, text)
    status, _, error = await asyncio.to_thread(call, site.http, "/detokenize", {"model": "teller", "tokens": [1 << 20]})
    assert (status, error["error"]["param"]) == (400, "tokens")


async def test_input_tokens_are_those_that_a_response_has(site: Site) -> None:
    first = await site.openai.responses.create(**CALM, input=ASK, max_output_tokens=8)
    asked: Any = {"model": "teller", "input": "And then?", "instructions": "Be brief.", "tools": [FUNCTION]}
    asked |= {"previous_response_id": first.id, "reasoning": {"effort": "none"}}
    counted = await site.openai.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    response = await site.openai.responses.create(**asked, max_output_tokens=1)
    assert counted.input_tokens == response.usage.input_tokens > 30
    with pytest.raises(openai.BadRequestError) as caught:
        await site.openai.responses.input_tokens.count(model="teller", input=[{"type": "computer_call"}])  # type: ignore[list-item]
    assert caught.value.param == "input[0].type"


async def test_message_tokens_are_those_that_an_answer_has(site: Site) -> None:
    plain: Any = {"type": "text", "media_type": "text/plain", "data": ASK * 3}
    content: Any = [{"type": "document", "source": plain, "title": "Fox"}, {"type": "text", "text": "Who?"}]
    asked: Any = {
        "model": "teller",
        "messages": [{"role": "user", "content": content}],
        "thinking": {"type": "disabled"},
    }
    counted = await site.anthropic.messages.count_tokens(**asked)
    answer = await site.anthropic.messages.create(**asked, max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/responses/compact", "POST"),
        ("/v1/responses/resp_1/cancel", "POST"),
        ("/v1/responses/resp_1", "PATCH"),
        ("/v1/responses/resp_1/other", "GET"),
    ],
)
async def test_what_is_not_offered_below_responses_says_its_name(site: Site, path: str, method: str) -> None:
    async with openai.DefaultAsyncHttpxClient() as web:
        response = await web.request(method, f"http://{site.http}{path}", json={})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == f"{method} {path}: is not offered here"


async def test_the_load_is_what_is_under_way(site: Site) -> None:
    async def is_idle() -> bool:
        return await asyncio.to_thread(call, site.http, "/load") == (200, ANY, {"server_load": 0})

    await until(is_idle, "no call of an earlier test is under way")
    stream = await site.openai.responses.create(**CALM, input=ASK, max_output_tokens=1000, stream=True)
    await anext(aiter(stream))
    assert (await asyncio.to_thread(call, site.http, "/load"))[2] == {"server_load": 1}
    await stream.close()
    await until(is_idle, "the call that was left is over")


async def test_the_description_names_what_is_read(site: Site) -> None:
    status, _, said = await asyncio.to_thread(call, site.http, "/openapi.json")
    assert status == 200
    body = said["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schemas = said["components"]["schemas"]
    chat = schemas[body["$ref"].removeprefix("#/components/schemas/")]
    assert chat["required"] == ["messages"]
    assert {"reasoning_effort", "tools", "max_completion_tokens", "stream"} <= set(chat["properties"])
    assert chat["properties"]["temperature"]["anyOf"] == [{"type": "number"}, {"type": "null"}]
    assert "additionalProperties" not in chat, "other fields are accepted, and named"
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(said)))
    assert named == set(schemas), "each schema is there, and is used"
    status, _, said = await asyncio.to_thread(call, site.http, "/version")
    assert (status, set(said)) == (200, {"version"})


# ------------------------------------------------------------------------------------ tools, turn after turn

QUESTIONS = ["What is the weather in Paris?", "And in Rome?", "Find it for Oslo.", "What about Lima?"]
BLOCK = 16


@dataclass
class Turns:
    """Prompt and cached tokens of a conversation's requests."""

    could: int = 0
    """Tokens of full blocks that the request before had in its prompt or output."""
    cached: int = 0
    known: int = 0

    def add(self, num_prompt: int, num_cached: int, num_output: int) -> None:
        self.could += min(self.known, num_prompt - 1) // BLOCK * BLOCK
        self.cached += num_cached
        self.known = num_prompt + num_output - 1  # nobody computes the last token

    def check(self) -> None:
        assert self.could > 300
        assert self.cached >= 0.9 * self.could


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def teller() -> AsyncIterator[Site]:
    """A cluster of the demo model as it is."""
    async with http_cluster(STORYTELLER, router={"model": STORYTELLER}, dtype="float32") as cluster:
        http = cluster.router.http_address
        async with (
            openai.AsyncOpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=0) as by_openai,
            anthropic.AsyncAnthropic(base_url=f"http://{http}", api_key="none", max_retries=0) as by_anthropic,
        ):
            yield Site(http, by_openai, by_anthropic)


async def test_chats_with_tools_are_cached_from_turn_to_turn(teller: Site) -> None:
    tool: Any = {"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}
    messages: list[Any] = []
    turns = Turns()
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for choice in ("required", "none"):
            answer = await teller.openai.chat.completions.create(
                model="model", messages=messages, tools=[tool], tool_choice=choice, max_tokens=64, temperature=0,
                parallel_tool_calls=False,
            )  # fmt: skip
            usage = answer.usage
            turns.add(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)  # type: ignore[union-attr,arg-type]
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "A red one."} for call in said.tool_calls or ()
            ]
            await asyncio.sleep(0.3)  # the router learns what the workers hold
    turns.check()


async def test_responses_with_tools_are_cached_from_turn_to_turn(teller: Site) -> None:
    turns, previous = Turns(), None
    for question in QUESTIONS:
        given: Any = question
        for choice in ("required", "none"):
            asked: Any = {"model": "model", "tools": [FUNCTION], "tool_choice": choice, "temperature": 0}
            answer: Any = await teller.openai.responses.create(
                **asked, input=given, previous_response_id=previous, max_output_tokens=64, parallel_tool_calls=False
            )
            usage = answer.usage
            turns.add(usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens)
            previous = answer.id
            calls = [item for item in answer.output if item.type == "function_call"]
            given = [
                {"type": "function_call_output", "call_id": call.call_id, "output": "A red one."} for call in calls
            ]
            await asyncio.sleep(0.3)
    turns.check()


async def test_messages_with_tools_are_cached_from_turn_to_turn(teller: Site) -> None:
    messages: list[Any] = []
    turns = Turns()
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "none"}):
            asked: Any = {"model": "model", "max_tokens": 64, "extra_body": {"temperature": 0}, "tools": [TOOL]}
            answer = await teller.anthropic.messages.create(**asked, messages=messages, tool_choice=choice)
            cached = answer.usage.cache_read_input_tokens or 0
            turns.add(answer.usage.input_tokens + cached, cached, answer.usage.output_tokens)
            messages.append({"role": "assistant", "content": answer.content})
            used = [block for block in answer.content if block.type == "tool_use"]
            if used:
                result = {"type": "tool_result", "tool_use_id": used[0].id, "content": "A red one."}
                messages.append({"role": "user", "content": [result]})
            await asyncio.sleep(0.3)
    turns.check()


# ---------------------------------------------------------------------------------------- prompts that are kept


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        ("/v1/chat/completions", {"prompt_cache_retention": "24h"}, True),
        ("/v1/chat/completions", {"prompt_cache_retention": "in_memory"}, False),
        ("/v1/chat/completions", {"cache_retention_s": 5}, True),
        ("/v1/chat/completions", {}, False),
    ],
)
async def test_a_prompt_is_kept_as_openais_clients_ask(site: Site, path: str, body: dict[str, Any], kept: bool) -> None:
    asked = {"messages": [{"role": "user", "content": ASK * 8}], "max_tokens": 2, "receipt": True}
    status, _, answer = await asyncio.to_thread(call, site.http, path, asked | body)
    assert status == 200, answer
    blocks = answer["tandem"]["kv"].get("pinned_blocks", 0)
    assert blocks == (answer["usage"]["prompt_tokens"] // 16 if kept else 0)


async def test_marks_of_anthropics_clients_keep_the_prompt_and_bad_ones_are_refused(site: Site) -> None:
    marked: Any = {"type": "text", "text": ASK * 8, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    await site.anthropic.messages.create(**QUIET, messages=[{"role": "user", "content": [marked]}])
    bad = marked | {"cache_control": {"type": "ephemeral", "ttl": "2h"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].cache_control.ttl"):
        await site.anthropic.messages.create(**QUIET, messages=[{"role": "user", "content": [bad]}])
