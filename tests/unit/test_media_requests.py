"""Pictures, sounds and videos in requests: how each API gives them, and what is refused by name."""

import base64
import random
from collections.abc import Callable
from typing import Any

import pytest

from protos import inference_pb2 as pb
from router.frontend.anthropic.messages import read_messages
from router.frontend.http.body.fields import IgnoredFields
from router.frontend.http.body.media import PIECE_CHARS, media_names
from router.frontend.http.errors import Caller
from router.frontend.http.generation import Generation
from router.frontend.openai.chat import read_chat
from router.frontend.openai.completions import read_completion
from router.frontend.openai.responses.responses import read_response, refer
from router.models.config import ModelEntry
from router.models.media import drop_data, sources_of
from router.validation import MAX_MEDIA, check_media, check_names
from support.refusals import refusal_of

CALLER = Caller("somebody", "r-1")
DATA = b"\x89PNG and more"
BASE64 = base64.b64encode(DATA).decode()
URL = "https://pictures.example.org/a.png"
DATA_URL = f"data:image/png;base64,{BASE64}"
PNG = pb.Media(kind="image", data=DATA)
LINKED = pb.Media(kind="image", url=URL)


def chat(*content: Any, **fields: Any) -> Generation:
    return read_chat({"messages": [{"role": "user", "content": list(content)}]} | fields, CALLER)


def response(*content: Any) -> Generation:
    return read_response({"input": [{"role": "user", "content": list(content)}]}, CALLER)


def anthropic(*content: Any) -> Generation:
    return read_messages({"max_tokens": 1, "messages": [{"role": "user", "content": list(content)}]}, CALLER)


def media_of(asked: Generation) -> list[pb.Media]:
    return [source.medium for source in sources_of(asked.requests[0])]


IMAGE_URL = {"type": "image_url", "image_url": {"url": DATA_URL}}
READ: list[tuple[Callable[..., Generation], dict[str, Any], pb.Media, str]] = [
    (chat, IMAGE_URL, PNG, "messages[0].content[1].image_url.url"),
    (chat, {"type": "image_url", "image_url": DATA_URL}, PNG, "messages[0].content[1].image_url"),
    (chat, {"type": "image_url", "image_url": {"url": URL}}, LINKED, "messages[0].content[1].image_url.url"),
    (
        chat,
        {"type": "video_url", "video_url": {"url": URL}},
        pb.Media(kind="video", url=URL),
        "messages[0].content[1].video_url.url",
    ),
    (
        chat,
        {"type": "audio_url", "audio_url": {"url": URL}},
        pb.Media(kind="audio", url=URL),
        "messages[0].content[1].audio_url.url",
    ),
    (
        chat,
        {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}},
        pb.Media(kind="audio", data=DATA),
        "messages[0].content[1].input_audio.data",
    ),
    (
        chat,
        {"type": "file", "file": {"file_data": DATA_URL, "filename": "a.png"}},
        PNG,
        "messages[0].content[1].file.file_data",
    ),
    (chat, {"type": "file", "file": {"file_id": "file-1"}}, pb.Media(), "messages[0].content[1].file.file_id"),
    (response, {"type": "input_image", "image_url": DATA_URL}, PNG, "input[0].content[1].image_url"),
    (response, {"type": "input_image", "file_id": "file-1"}, pb.Media(kind="image"), "input[0].content[1].file_id"),
    (
        response,
        {"type": "input_file", "file_data": f"data:audio/wav;base64,{BASE64}"},
        pb.Media(kind="audio", data=DATA),
        "input[0].content[1].file_data",
    ),
    (
        anthropic,
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
        PNG,
        "messages[0].content[1].source.data",
    ),
    (anthropic, {"type": "image", "source": {"type": "url", "url": URL}}, LINKED, "messages[0].content[1].source.url"),
    (
        anthropic,
        {"type": "image", "source": {"type": "file", "file_id": "file-1"}},
        pb.Media(kind="image"),
        "messages[0].content[1].source.file_id",
    ),
]


@pytest.mark.parametrize(("ask", "part", "expected", "path"), READ)
def test_parts_are_read_in_their_order(
    ask: Callable[..., Generation], part: dict[str, Any], expected: pb.Media, path: str
) -> None:
    kind = "input_text" if ask is response else "text"
    asked = ask({"type": kind, "text": "a"}, part, {"type": kind, "text": "b"})
    (message,) = asked.requests[0].messages
    text = pb.ContentPart(text="a")
    if expected.kind:
        assert list(message.parts) == [text, pb.ContentPart(media=expected), pb.ContentPart(text="b")]
    assert not message.content
    assert media_of(asked) == [expected]
    assert media_names(asked.requests[0].messages, asked.media) == {"messages[0].parts[1]": path, "media": path}
    assert [each.file_id for each in asked.media] == ["file-1" if "file_id" in path else ""]
    assert not asked.ignored


@pytest.mark.parametrize(
    ("ask", "part", "path"),
    [
        (chat, {"type": "image_url"}, "messages[0].content[0].image_url"),
        (chat, {"type": "image_url", "image_url": {"url": 5}}, "messages[0].content[0].image_url.url"),
        (chat, {"type": "image_url", "image_url": "ftp://a/b"}, "messages[0].content[0].image_url"),
        (chat, {"type": "image_url", "image_url": "file:///etc/passwd"}, "messages[0].content[0].image_url"),
        (chat, {"type": "image_url", "image_url": f"https://{'a' * 9000}"}, "messages[0].content[0].image_url"),
        (chat, {"type": "image_url", "image_url": "data:image/png,abc"}, "messages[0].content[0].image_url"),
        (chat, {"type": "image_url", "image_url": "data:image/png;base64,a$"}, "messages[0].content[0].image_url"),
        (chat, {"type": "image_url", "image_url": "data:image/png;base64,aaa$"}, "messages[0].content[0].image_url"),
        (chat, {"type": "image_url", "image_url": "data:image/png;base64,aa==aaaa"},
         "messages[0].content[0].image_url"),
        (chat, {"type": "image_url", "image_url": "data:image/png;base64,"}, "messages[0].content[0].image_url"),
        (chat, {"type": "input_audio", "input_audio": {"format": "wav"}}, "messages[0].content[0].input_audio.data"),
        (chat, {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA=="}},
         "messages[0].content[0].file.file_data"),
        (chat, {"type": "file", "file": {}}, "messages[0].content[0].file.file_data"),
        (chat, {"type": "image_embeds"}, "messages[0].content[0].type"),
        (response, {"type": "input_image"}, "input[0].content[0].image_url"),
        (response, {"type": "computer_screenshot"}, "input[0].content[0].type"),
        (anthropic, {"type": "image"}, "messages[0].content[0].source"),
        (anthropic, {"type": "image", "source": {"data": BASE64}}, "messages[0].content[0].source.type"),
        (anthropic, {"type": "image", "source": {"type": "base64", "data": "%"}},
         "messages[0].content[0].source.data"),
        (anthropic, {"type": "document"}, "messages[0].content[0].source"),
        (anthropic, {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
         "messages[0].content[0].source.type"),
        (anthropic, {"type": "document", "source": {"type": "url", "url": URL}}, "messages[0].content[0].source.type"),
        (anthropic, {"type": "document", "source": {"type": "file", "file_id": "f"}},
         "messages[0].content[0].source.type"),
        (anthropic, {"type": "document", "source": {"type": "text", "media_type": "text/html", "data": "a"}},
         "messages[0].content[0].source.media_type"),
        (anthropic, {"type": "document", "source": {"type": "text", "media_type": "text/plain"}},
         "messages[0].content[0].source.data"),
        (anthropic, {"type": "document", "source": {"type": "content", "content": [{"type": "audio"}]}},
         "messages[0].content[0].source.content[0].type"),
        (anthropic, {"type": "document", "source": {"type": "content"}}, "messages[0].content[0].source.content"),
        (anthropic, {"type": "search_result"}, "messages[0].content[0].type"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(ask: Callable[..., Generation], part: dict[str, Any], path: str) -> None:
    with refusal_of(path):
        ask(part)


@pytest.mark.parametrize("size", [1, 2, 3, PIECE_CHARS // 4 * 3, PIECE_CHARS + 1, 3 * PIECE_CHARS + 2])
def test_files_of_any_size_are_decoded(size: int) -> None:
    data = random.Random(size).randbytes(size)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    assert media_of(chat({"type": "image_url", "image_url": url})) == [pb.Media(kind="image", data=data)]


def test_detail_has_no_effect_and_is_named_so() -> None:
    part, ignored = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}, IgnoredFields()
    read_chat({"messages": [{"role": "user", "content": [part]}]}, CALLER, ignored)
    assert list(ignored.names) == ["messages[].content[].image_url.detail"]


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
def test_options_of_processors_are_refused(name: str) -> None:
    with refusal_of(name):
        chat(IMAGE_URL, **{name: {"num_frames": 4}})
    assert media_of(chat(IMAGE_URL, **{name: {}})) == [PNG]
    with refusal_of(name):
        read_completion({"prompt": "a", name: {"a": 1}}, CALLER)


def test_a_tools_picture_is_in_its_message() -> None:
    """In Anthropic's API results come before the user's own words, wherever these stand."""
    image = {"type": "image", "source": {"type": "url", "url": URL}}
    own = {"type": "image", "source": {"type": "base64", "data": BASE64}}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True,
              "content": [{"type": "text", "text": "no"}, image]}  # fmt: skip
    asked = anthropic(own, {"type": "text", "text": "a"}, result)
    tool, user = asked.requests[0].messages
    assert tool.tool_call_id == "c"
    expected = [pb.ContentPart(text="Error: "), pb.ContentPart(text="no"), pb.ContentPart(media=LINKED)]
    assert list(tool.parts) == expected
    assert list(user.parts) == [pb.ContentPart(media=PNG), pb.ContentPart(text="a")]
    assert media_names(asked.requests[0].messages, asked.media) == {
        "messages[0].parts[2]": "messages[0].content[2].content[1].source.url",
        "messages[1].parts[0]": "messages[0].content[0].source.data",
        "media": "messages[0].content[2].content[1].source.url",
    }
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URL}]}
    asked = read_response({"input": [output]}, CALLER)
    assert list(asked.requests[0].messages[0].parts) == [pb.ContentPart(media=LINKED)]


def test_documents_are_read_as_text_and_pictures() -> None:
    """What follows a document does not run into it, and citations, which no answer has, are named as ignored."""
    plain = {"type": "text", "media_type": "text/plain", "data": "The fox slept."}
    document = {"type": "document", "source": plain, "title": "Fox", "context": "A story."}
    document |= {"citations": {"enabled": False}, "cache_control": {"type": "ephemeral"}}
    asked = anthropic(document, {"type": "text", "text": "Who?"})
    (message,) = asked.requests[0].messages
    assert message.content == "Fox\nA story.\nThe fox slept.\n\nWho?"
    assert asked.requests[0].cache_retention_s == 300
    image = {"type": "image", "source": {"type": "url", "url": URL}}
    made = {"type": "content", "content": [{"type": "text", "text": "See"}, image]}
    cited = {"type": "document", "source": made, "citations": {"enabled": True}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [cited]}
    ignored = IgnoredFields()
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [result]}]}
    asked = read_messages(body, CALLER, ignored)
    (tool,) = asked.requests[0].messages
    expected = [pb.ContentPart(text="See"), pb.ContentPart(media=LINKED), pb.ContentPart(text="\n\n")]
    assert list(tool.parts) == expected
    assert list(ignored.names) == ["messages[].content[].content[].citations"]
    whole = anthropic({"type": "document", "source": {"type": "content", "content": "All of it."}})
    assert whole.requests[0].messages[0].content == "All of it.\n\n"


def test_media_of_earlier_turns_are_those_of_the_earlier_response() -> None:
    asked = read_response({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}, CALLER)
    earlier = pb.ChatMessage(role="user", parts=[pb.ContentPart(media=PNG)])
    messages = [earlier, *asked.requests[0].messages]
    assert media_names(messages, asked.media) == {
        "messages[0].parts[0]": "previous_response_id",
        "messages[1].parts[0]": "input[0].content[0].image_url",
        "media": "previous_response_id",
    }
    refer(asked, {})
    assert [each.path for each in asked.media] == ["input[0].content[0].image_url"], "read again, and not twice"


def test_texts_stay_contents() -> None:
    for asked in (chat({"type": "text", "text": "a"}), anthropic({"type": "text", "text": "a"})):
        assert list(asked.requests[0].messages) == [pb.ChatMessage(role="user", content="a")]
        assert not sources_of(asked.requests[0])


# ---------------------------------------------------------------------------------------------------- gRPC


def user(*parts: pb.ContentPart, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(messages=[pb.ChatMessage(role="user", parts=parts, **fields)])


SHOWN = pb.ContentPart(media=PNG)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (user(SHOWN, content="a"), "messages[0].parts"),
        (user(pb.ContentPart()), "messages[0].parts[0]"),
        (user(pb.ContentPart(text="a"), pb.ContentPart(media=pb.Media(kind="smell", data=b"1"))),
         "messages[0].parts[1]"),
        (user(pb.ContentPart(media=pb.Media(kind="image"))), "messages[0].parts[0]"),
        (user(pb.ContentPart(media=pb.Media(kind="image", url="ftp://a"))), "messages[0].parts[0]"),
        (user(*[SHOWN] * (MAX_MEDIA + 1)), "messages"),
        (pb.GenerateRequest(text="a", media=[pb.Media(kind="image")]), "media[0]"),
        (pb.GenerateRequest(text="a", media=[PNG] * (MAX_MEDIA + 1)), "media"),
        (pb.GenerateRequest(messages=[pb.ChatMessage(role="user", content="a")], media=[PNG]), "media"),
    ],
)  # fmt: skip
def test_faults_of_media_are_named(request_: pb.GenerateRequest, field: str) -> None:
    def check() -> None:
        check_names(request_)
        check_media(request_)

    with refusal_of(field):
        check()


def test_media_are_found_in_order_and_dropped_with_their_places_kept() -> None:
    request = user(pb.ContentPart(text="a"), SHOWN, pb.ContentPart(media=LINKED))
    assert [source.field for source in sources_of(request)] == ["messages[0].parts[1]", "messages[0].parts[2]"]
    drop_data(request)
    assert [source.medium for source in sources_of(request)] == [pb.Media(kind="image")] * 2
    beside = pb.GenerateRequest(text="<image>", media=[PNG])
    assert [source.field for source in sources_of(beside)] == ["media[0]"]


@pytest.mark.parametrize("value", ["host", "host:0", "host:70000", ":50061", "a:1,b"])
def test_an_address_of_a_preprocessor_is_host_and_port(value: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        ModelEntry(path="m", preprocessor=value)


def test_several_preprocessors_are_separated_by_commas() -> None:
    assert ModelEntry(path="m", preprocessor="a:1, b:2,").preprocessors == ("a:1", "b:2")
    assert not ModelEntry(path="m").preprocessors
