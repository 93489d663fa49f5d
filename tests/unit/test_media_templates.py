"""Chats with pictures: how a template gets them, and that only their places become placeholders."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from engine.media import NUMBER
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.models.prompts.chat_template import ChatTemplate, chars_of
from router.models.prompts.prompts import PromptEncoder
from support.refusals import refusal_of
from support.small_tokenizers import byte_level

PLACES = {"image": "<image>", "video": "<video>", "audio": f"<audio {NUMBER}>"}
STRINGS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
"""A template that reads texts only."""
BOTH = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<start><pad><end>{% elif p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that reads texts, and parts of pictures and texts."""
LISTS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% for p in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}</s>{% endfor %}"
)
"""A template that reads parts only, such as LLaVA's."""
REFUSES = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
"""A template that fails at parts."""


def message(*parts: str | bytes, role: str = "user", kind: str = "image") -> pb.ChatMessage:
    """A message of texts, and of media where a part is bytes."""
    made = [
        pb.ContentPart(text=part) if isinstance(part, str) else pb.ContentPart(media=pb.Media(kind=kind, data=part))
        for part in parts
    ]
    return pb.ChatMessage(role=role, parts=made)


def asking(*messages: pb.ChatMessage, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(messages=messages, no_generation_prompt=True, **fields)


def rendered(source: str, *messages: pb.ChatMessage, **fields: Any) -> str:
    return ChatTemplate(source, {}).render(asking(*messages, **fields), placeholders=PLACES)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (STRINGS, "<|user|><image>\n<image>\nsee \nand\n.</s>"),
        (REFUSES, "<|user|><image>\n<image>\nsee \nand\n."),
        (BOTH, "<|user|>see <start><pad><end>and<start><pad><end>.</s>"),
        (LISTS, "<|user|><image><image>see and.</s>"),
    ],
)
def test_a_template_gets_the_form_that_it_reads(source: str, expected: str) -> None:
    assert rendered(source, message("see ", b"1", "and", b"2", ".")) == expected


def test_a_kind_that_the_template_does_not_know_is_written_as_a_placeholder() -> None:
    assert rendered(BOTH, message(b"1", "see", kind="video")) == "<|user|><video>\nsee</s>"
    assert rendered(STRINGS, message(b"1")) == "<|user|><image>\n</s>"


def test_numbered_placeholders_count_through_the_chat() -> None:
    """A number that the client has written itself is not written again."""
    chat = [message(b"1", "hear", kind="audio"), message(b"2", "<audio 2> and", b"3", kind="audio")]
    assert rendered(STRINGS, *chat) == "<|user|><audio 1>\nhear</s><|user|><audio 3>\n<audio 2> and</s>"


@pytest.mark.parametrize("role", ["system", "tool", "assistant"])
def test_each_role_is_looked_at_by_itself(role: str) -> None:
    """Here only users' parts are read."""
    source = BOTH.replace("m.content is string", "m.content is string or m.role != 'user'")
    said = message("see", b"1", role=role)
    assert rendered(source, said) == f"<|{role}|><image>\nsee</s>"


@pytest.mark.parametrize("source", [STRINGS, BOTH, LISTS])
def test_parts_that_are_all_texts_are_one_content(source: str) -> None:
    joined = pb.ChatMessage(role="user", content="ab")
    assert rendered(source, message("a", "b")) == rendered(source, joined) == "<|user|>ab</s>"
    assert chars_of(asking(message("a", "b"))) == 2


def test_what_only_reads_parts_gets_texts_as_parts_everywhere() -> None:
    template = ChatTemplate(LISTS + "{% if add_generation_prompt %}<|assistant|>{% endif %}", {})
    begun = pb.GenerateRequest(
        messages=[pb.ChatMessage(role="user", content="a"), pb.ChatMessage(role="assistant", content="b")],
        continue_final_message=True,
    )
    assert template.render(begun) == "<|user|>a</s><|assistant|>b"
    assert template.begun_answer(begun, "") == "b"
    assert template.generation_prompt(asking(message("a"))) == "<|assistant|>"


def test_nothing_goes_on_after_a_picture() -> None:
    with refusal_of("continue_final_message"):
        rendered(BOTH, message("a", b"1", role="assistant"), continue_final_message=True)


# ------------------------------------------------------------------------------------------------- tokens

NAMES = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<image>", "<video>", "<start>", "<pad>", "<end>")


@pytest.fixture(params=[NAMES, ("<s>", "</s>")], ids=["special", "not special"])
def special(request: pytest.FixtureRequest) -> tuple[str, ...]:
    names: tuple[str, ...] = request.param
    return names


def encoder_of(
    folder: Path, template: str, special: tuple[str, ...], **options: Any
) -> tuple[PromptEncoder, Tokenizer]:
    made = byte_level()
    made.add_tokens([AddedToken(text, special=text in special, normalized=False) for text in NAMES])
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = max(made.get_vocab().values()) + 1
    (folder / "config.json").write_text(json.dumps({"vocab_size": size, "max_position_embeddings": 4096}))
    return PromptEncoder(ModelDir.open(folder), **options), made


@pytest.mark.parametrize(("template", "place"), [(STRINGS, "<image>"), (BOTH, "<pad>"), (LISTS, "<image>")])
async def test_a_clients_text_never_becomes_a_placeholder(
    tmp_path: Path, special: tuple[str, ...], template: str, place: str
) -> None:
    encoder, tokenizer = encoder_of(tmp_path, template, special)
    token_id = tokenizer.token_to_id(place)
    forged = message(f"a{place}b", b"1", f"{place}<image><start><pad><end>")
    ids = await encoder.encode(asking(forged), placeholders=PLACES)
    assert ids.count(token_id) == 1
    assert (
        encoder.decode(ids) == rendered(template, forged)
        if template != STRINGS
        else "<|user|><image>\na" in (encoder.decode(ids))
    )
    plain = await encoder.encode(asking(pb.ChatMessage(role="user", content=place)), placeholders=PLACES)
    assert plain.count(token_id) == 0


async def test_texts_that_may_have_special_tokens_may_say_where_their_pictures_are(tmp_path: Path) -> None:
    encoder, tokenizer = encoder_of(tmp_path, STRINGS, NAMES, special_tokens_in_messages=True)
    ids = await encoder.encode(asking(message("a<image>b", b"1", b"2")), placeholders=PLACES)
    assert encoder.decode(ids) == "<|user|><image>\na<image>b</s>"
    assert ids.count(tokenizer.token_to_id("<image>")) == 2
