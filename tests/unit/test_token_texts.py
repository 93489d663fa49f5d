"""Bytes and places of tokens: bytes of all tokens joined are the text, and the text goes on with a token at its offset.

From the engine's tokens through the decode worker to the answers, whole and streamed.
"""

import codecs
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseCompletedEvent as ResponseCompleted
from tokenizers import Tokenizer

from cluster.errors import InvalidRequest
from engine.core_types import FinishReason, TokenLogprobs
from engine.messages.from_engine import Token
from engine.model.model_dir import ModelDir
from loans.account import KvAccount
from protos import decode_pb2 as internal_pb
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import IgnoredFields
from router.frontend.http.errors import Caller
from router.frontend.http.generation import PromptInfo
from router.frontend.openai.answers import ChatAnswer, CompletionAnswer, OpenAiAnswer
from router.frontend.openai.request import ApiRequest
from router.frontend.openai.responses.responses import LOGPROBS, read_response
from router.frontend.openai.responses.responses_answer import OutputLogprobs, ResponsesAnswer
from router.models.output.output_format import OutputFormat
from router.models.output.token_texts import TokenForm, TokensInText, pieces_by_offsets
from router.models.prompts.prompts import PromptEncoder
from support.small_tokenizers import byte_level, with_byte_fallback
from worker.requests.output_stream import OutputStream

DRAWS = 1000
MAKERS = {"byte level": byte_level, "byte fallback": with_byte_fallback}
SOMES = "the END cafe\u0301 e\u0301 \u00e9 🦊 👩‍👩‍👧 🇳🇴 日本 \u0301 to, 😀 \u2028"
TEXTS = st.lists(st.sampled_from([*SOMES, *SOMES.split()]), min_size=1, max_size=12).map("".join)


@dataclass
class Served:
    """A model's tokenizer, and its reader of prompts."""

    tokenizer: Tokenizer
    encoder: PromptEncoder


@pytest.fixture(scope="module", params=MAKERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = tmp_path_factory.mktemp("model")
    tokenizer = MAKERS[request.param]()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"vocab_size": 500, "max_position_embeddings": 4096}))
    return Served(tokenizer, PromptEncoder(ModelDir.open(path)))


@dataclass
class Drawn:
    """A request, and what its engine samples."""

    prompt: str
    tokens: list[int]
    tops: list[int]
    ends: bool = False
    """Whether the model's end token comes last."""
    stops: list[str] = field(default_factory=list)
    keeps_special: bool = False
    includes: bool = False
    """Whether a stop string and the end token are part of the text."""
    echo: bool = False
    by_ids: bool = False
    """Whether the prompt is given as token ids."""
    together: int = 1
    """Tokens that one message has."""


def boundaries(served: Served, tokens: list[int]) -> list[int]:
    """The places before, between and after characters."""
    ends = codecs.getincrementaldecoder("utf-8")()
    places = [0]
    for place, token_id in enumerate(tokens, start=1):
        ends.decode(served.encoder.token(token_id).raw)
        if not ends.getstate()[0]:
            places.append(place)
    return places


def scored(token_id: int, tops: list[int]) -> TokenLogprobs:
    return TokenLogprobs(-1.0, tuple(dict.fromkeys([token_id, *tops])), tuple([-1.0] * len({token_id, *tops})))


def messages_of(served: Served, drawn: Drawn, prompt: list[int]) -> list[pb.GenerateResponse]:
    """The decode worker's messages."""
    tokens = drawn.tokens + [served.tokenizer.token_to_id("<end>")] * drawn.ends
    sampling = pb.Sampling(
        max_tokens=len(tokens),
        stop=drawn.stops,
        keep_special_tokens=drawn.keeps_special,
        include_stop_str_in_output=drawn.includes,
        logprobs=3,
    )
    request = internal_pb.DecodeRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling)
    stream = OutputStream(request, served.tokenizer, "d", 4)
    messages: list[pb.GenerateResponse] = []
    for place, token_id in enumerate(tokens):
        last = place == len(tokens) - 1
        finish = (FinishReason.STOP if drawn.ends else FinishReason.LENGTH) if last else None
        account = KvAccount(times={"admitted": 0.0}) if place == 0 else None
        stream.absorb(Token("r", token_id, scored(token_id, drawn.tops), account, finish))
        if place % drawn.together == 0 or stream.finished:
            while (message := stream.take()) is not None:
                messages.append(message)
        if stream.finished:
            break
    return messages


def answers_of(
    served: Served, drawn: Drawn, kind: type[OpenAiAnswer], **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only choice of the whole answer, and the same put together from a stream."""
    prompt = served.tokenizer.encode(drawn.prompt).ids
    given = None if drawn.by_ids else drawn.prompt
    echo = "" if not drawn.echo else served.encoder.decode(prompt) if given is None else given
    sampling = pb.Sampling(stop=drawn.stops, keep_special_tokens=drawn.keeps_special, logprobs=3)
    messages = messages_of(served, drawn, prompt)

    def begun(stream: bool) -> OpenAiAnswer:
        asked = ApiRequest("r", [pb.GenerateRequest(sampling=sampling)], {}, stream=stream, echo=drawn.echo, **options)
        answer = kind(asked, "r")
        pieces = served.encoder.pieces
        info = PromptInfo(
            "m", prompt, echo, served.encoder.token, lambda: None, lambda: pieces(prompt, given), drawn.keeps_special
        )
        answer.begin(0, info)
        return answer

    whole = begun(stream=False)
    if options.get("echo_logprobs"):
        values = [pb.TokenLogprobs(logprob=-2.0, top_token_ids=drawn.tops, top_logprobs=[-3.0] * len(drawn.tops))]
        whole.absorb(0, pb.GenerateResponse(prompt_logprobs=values * (len(prompt) - 1)))
    for message in messages:
        whole.absorb(0, message)
    streaming = begun(stream=True)
    events = b"".join(streaming.chunk(0, message) for message in messages).decode()
    assert events.splitlines() == events.split("\n")[:-1], "no other line breaks, which clients may split at"
    chunks = [json.loads(line[6:])["choices"][0] for line in events.split("\n\n") if line[6:7] == "{"]
    return json.loads(whole.whole())["choices"][0], _put_together(chunks)


def _put_together(chunks: list[Any]) -> dict[str, Any]:
    texts = [chunk["text"] if "text" in chunk else chunk["delta"].get("content", "") for chunk in chunks]
    parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    lists: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in part.items():
            lists.setdefault(name, []).extend(values or ())
    return {"text": "".join(texts), "logprobs": lists, "finish_reason": chunks[-1]["finish_reason"]}


def check_chat(served: Served, drawn: Drawn, exact: bool = True) -> dict[str, Any]:
    whole, streamed = answers_of(served, replace(drawn, echo=False), ChatAnswer)
    text, entries = whole["message"]["content"], whole["logprobs"]["content"]
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert (raw == text.encode()) if exact else (raw.decode(errors="replace") == text)
    assert (streamed["text"], streamed["logprobs"]["content"]) == (text, entries)
    assert streamed["finish_reason"] == whole["finish_reason"]
    for entry in entries:
        names = [top["token"] for top in entry["top_logprobs"]]
        raws = [tuple(top["bytes"]) for top in entry["top_logprobs"]]
        assert len(set(names)) == len(set(raws)), "equal only where the bytes are"
        assert entry["token"] in names
    return whole


def check_completion(served: Served, drawn: Drawn) -> dict[str, Any]:
    whole, streamed = answers_of(served, drawn, CompletionAnswer)
    check_places(whole)
    assert streamed["text"] == whole["text"]
    assert streamed["logprobs"] == whole["logprobs"]
    if drawn.echo:
        echoed, _ = answers_of(served, drawn, CompletionAnswer, echo_logprobs=True)
        check_places(echoed)
        assert "".join(echoed["logprobs"]["tokens"]) == echoed["text"] == whole["text"]
        assert echoed["logprobs"]["tokens"][-len(whole["logprobs"]["tokens"]) :] == whole["logprobs"]["tokens"]
    return whole


def check_places(choice: Any) -> None:
    lists = choice["logprobs"]
    for token, offset, tops in zip(lists["tokens"], lists["text_offset"], lists["top_logprobs"], strict=True):
        assert choice["text"][offset:].startswith(token)
        assert tops is None or token in tops
    assert lists["text_offset"] == sorted(lists["text_offset"])


@settings(max_examples=DRAWS, deadline=None)
@given(data=st.data())
def test_any_text(served: Served, data: st.DataObject) -> None:
    text = data.draw(TEXTS, "output")
    tokens = served.tokenizer.encode(text, add_special_tokens=False).ids
    tokens = tokens[: data.draw(st.integers(1, len(tokens)), "length")]  # perhaps within a character
    if data.draw(st.booleans(), "has special"):
        special = data.draw(st.sampled_from(boundaries(served, tokens)), "special")
        tokens.insert(special, served.tokenizer.token_to_id("<end>"))
    begin = data.draw(st.integers(0, len(text) - 1), "stop")
    stops = [text[begin : begin + data.draw(st.integers(1, 4), "chars")]]
    drawn = Drawn(
        prompt=data.draw(TEXTS, "prompt"),
        tokens=tokens,
        tops=data.draw(st.lists(st.integers(3, served.tokenizer.get_vocab_size() - 1), max_size=5), "tops"),
        ends=data.draw(st.booleans(), "ends"),
        stops=data.draw(st.sampled_from([[], stops, [*stops, "END"]]), "stops"),
        keeps_special=data.draw(st.booleans(), "keeps"),
        # an end token in the text makes U+FFFD of the beginning of a character before it
        includes=data.draw(st.booleans(), "includes") and boundaries(served, tokens)[-1] == len(tokens),
        echo=data.draw(st.booleans(), "echo"),
        by_ids=data.draw(st.booleans(), "by ids"),
        together=data.draw(st.integers(1, 3), "together"),
    )
    check_chat(served, drawn)
    check_completion(served, drawn)


@settings(max_examples=DRAWS // 4, deadline=None)
@given(data=st.data())
def test_any_tokens_keep_their_places(served: Served, data: st.DataObject) -> None:
    """Bytes that are no characters: an output needs not be one that a tokenizer would make."""
    ids = st.integers(0, served.tokenizer.get_vocab_size() - 1)
    drawn = Drawn("to 🦊", data.draw(st.lists(ids, min_size=1, max_size=12)), [], echo=data.draw(st.booleans()))
    check_completion(served, drawn)


def test_an_emoji_has_its_bytes_and_its_tokens_names_of_their_own(served: Served) -> None:
    tokens = served.tokenizer.encode("a\U0001f9b7b", add_special_tokens=False).ids
    tokens = tokens[tokens.index(served.tokenizer.encode("ta", add_special_tokens=False).ids[-1]) :]
    entries = check_chat(served, Drawn("t", tokens, tops=[]))["logprobs"]["content"]
    parts = {4: [b"\xf0\x9f", b"\xa6", b"\xb7"], 5: [b"\xf0", b"\x9f", b"\xa6", b"\xb7"]}[len(entries) - 1]
    assert [bytes(entry["bytes"]) for entry in entries] == [b"a", *parts, b"b"]
    names = ["bytes:" + "".join(f"\\x{byte:x}" for byte in part) for part in parts]
    assert [entry["token"] for entry in entries] == ["a", *names, "b"]
    lists = check_completion(served, Drawn("t", tokens, tops=tokens[1:-1]))["logprobs"]
    assert lists["tokens"] == ["a", *([""] * (len(parts) - 1)), "\U0001f9b7", "b"]
    assert lists["text_offset"] == [0, *([1] * len(parts)), 2]
    assert set(lists["top_logprobs"][0]) == {"a", *names}


def test_spaces_before_words_are_part_of_tokens(served: Served) -> None:
    tokens = served.tokenizer.encode("the the", add_special_tokens=False).ids[-1:]
    (entry,) = check_chat(served, Drawn("the", tokens, tops=[]))["logprobs"]["content"]
    assert (entry["token"], bytes(entry["bytes"])) == (" the", b" the")


def test_a_prompt_that_ends_within_a_character(served: Served) -> None:
    ids = served.tokenizer.encode("x😀y", add_special_tokens=False).ids[-5:]
    tokens = TokensInText(served.encoder.token, before=ids[:2])
    placed = tokens.add(ids[2:], [None] * 3, "😀y", ends=True)
    assert b"".join(token.raw for token in placed).decode() == "😀y"
    assert [token.text for token in placed] == ["", "😀", "y"]


def test_tokens_wait_for_their_text_and_lose_what_a_stop_cuts_off() -> None:
    forms = [TokenForm.of(raw) for raw in (b"a ", b"EN", b"Dx", b"\xf0\x9f")]
    tokens = TokensInText(lambda token_id: forms[token_id], num_chars=5)
    assert [token.offset for token in tokens.add([0, 1], "pq", "a ")] == [5]
    assert tokens.waits
    cut = tokens.add([2, 3], "rs", "E", ends=True)
    assert [(token.value, token.text, token.raw, token.offset) for token in cut] == [
        ("q", "E", b"E", 7),
        ("r", "", b"", 8),
        ("s", "", b"", 8),
    ]
    assert not tokens.waits


def test_parts_of_a_text_by_offsets() -> None:
    assert pieces_by_offsets("a b😀c", [(0, 0), (0, 1), (2, 3), (3, 4), (3, 4), (4, 5)]) == [
        "",
        "a",
        " b",
        "",
        "😀",
        "c",
    ]
    assert pieces_by_offsets("e\u0301 e\u0301", [(0, 1), (2, 4)]) == ["e\u0301", " e\u0301"]


def test_names_by_id(served: Served) -> None:
    drawn = Drawn("t", served.tokenizer.encode("the", add_special_tokens=False).ids[-1:], tops=[7])
    name = f"token_id:{drawn.tokens[0]}"
    whole, streamed = answers_of(served, drawn, CompletionAnswer, tokens_as_ids=True)
    assert whole["logprobs"]["tokens"] == streamed["logprobs"]["tokens"] == [name]
    assert whole["logprobs"]["top_logprobs"] == [{name: -1.0, "token_id:7": -1.0}]
    chat, _ = answers_of(served, drawn, ChatAnswer, tokens_as_ids=True)
    (entry,) = chat["logprobs"]["content"]
    assert [one["token"] for one in (entry, *entry["top_logprobs"])] == [name, name, "token_id:7"]
    assert bytes(entry["bytes"]).decode() == chat["message"]["content"]


async def test_a_text_gets_special_tokens_unless_told_otherwise(served: Served) -> None:
    text = pb.GenerateRequest(text="the")
    plain = served.tokenizer.encode("the", add_special_tokens=False).ids
    begin = served.tokenizer.token_to_id("<s>")
    assert await served.encoder.encode(text) == ([] if begin is None else [begin]) + plain
    assert await served.encoder.encode(text, adds_special=False) == plain


def test_forms_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "max_position_embeddings": 64}))
    assert PromptEncoder(ModelDir.open(tmp_path)).token(3) == TokenForm("", b"")


# ------------------------------------------------------------------------------------------------ Responses

PARSERS = {"text": lambda: None, "parsed": lambda: OutputFormat("hermes", "qwen3").parser(parses_calls=True)}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
OUTPUTS = (
    "a 🦊 b",
    "<think>\nwhy 🦊</think>\n\nso 👩‍👩‍👧!",
    f" first {CALL}",
    f"<think>so</think>so {CALL} \n{CALL}",
    "e\u0301 <tool_ no call, END",
    " \n",
)


def response_of(served: Served, drawn: Drawn, parser: Any) -> tuple[Any, list[Any]]:
    """The whole response, and the events of a stream."""
    prompt = served.tokenizer.encode(drawn.prompt).ids
    asked = {"input": "hi", "include": [LOGPROBS], "top_logprobs": 2}
    info = PromptInfo("m", prompt, "", served.encoder.token, parser, keeps_special=drawn.keeps_special)
    made = [ResponsesAnswer(read_response(asked, Caller("", "r")), "r") for _ in range(2)]
    for answer in made:
        answer.begin(0, info)
    messages = messages_of(served, drawn, prompt)
    for message in messages:
        made[0].absorb(0, message)
    events = b"".join(made[1].chunk(0, message) for message in messages).decode()
    return json.loads(made[0].whole()), [json.loads(line[6:]) for line in events.split("\n") if line[:5] == "data:"]


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=DRAWS // 4, deadline=None)
@given(data=st.data())
def test_the_texts_of_a_response(served: Served, parser: str, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(OUTPUTS) | TEXTS, "output")
    tokens = served.tokenizer.encode(text, add_special_tokens=False).ids
    tokens = tokens[: data.draw(st.integers(1, len(tokens)), "length")]
    stops, together = data.draw(st.sampled_from([[], ["END"], ["so"]])), data.draw(st.integers(1, 9))
    drawn = Drawn("t", tokens, [5, 9], stops=stops, together=together, ends=data.draw(st.booleans()))
    whole, events = response_of(served, drawn, PARSERS[parser])
    ResponseCompleted.model_validate(events[-1] | {"type": "response.completed"})
    parts = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    for part in parts:
        assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]) == part["text"].encode()
    streamed = [event for event in events if event["type"] == "response.output_text.delta"]
    done = [event for event in events if event["type"] == "response.output_text.done"]
    entries = [entry for event in streamed for entry in event["logprobs"]]
    assert entries == [entry for part in parts for entry in part["logprobs"]]
    assert [(event["text"], event["logprobs"]) for event in done] == [
        (part["text"], part["logprobs"]) for part in parts
    ]


def test_log_probabilities_of_responses_need_to_be_included() -> None:
    def read(**fields: Any) -> pb.Sampling:
        return read_response({"input": "hi"} | fields, Caller("", "r")).requests[0].sampling

    assert not read().HasField("logprobs")
    assert read(include=[LOGPROBS]).logprobs == 0
    assert read(include=[LOGPROBS, "reasoning.encrypted_content"], top_logprobs=20).logprobs == 20
    for fields, name in (
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read(**fields)
        assert caught.value.field == name
    with pytest.raises(InvalidRequest, match="may have"):
        read_response({"input": "hi", "include": ["other"]}, Caller("", "r"), IgnoredFields(strict=True))


def test_a_token_that_two_pieces_of_a_text_share_is_one_entry() -> None:
    """A parser holds whitespace back until more text of its region follows."""
    forms = [TokenForm.of(raw) for raw in (b"why</think>\n\nso ", b"be", b" \n<tool_call>")]
    dealt = OutputLogprobs(PromptInfo("m", [], "", lambda token_id: forms[token_id]))
    one = [pb.TokenLogprobs(logprob=-1.0)]
    dealt.add(pb.GenerateResponse(text="why</think>\n\nso ", token_ids=[0], logprobs=one))
    assert dealt.of("so") == []
    dealt.add(pb.GenerateResponse(text="be", token_ids=[1], logprobs=one))
    assert [bytes(entry["bytes"]) for entry in dealt.of(" be")] == [b"so ", b"be"]
    dealt.add(pb.GenerateResponse(text=" \n<tool_call>", token_ids=[2], logprobs=one))
    assert dealt.close() == []
