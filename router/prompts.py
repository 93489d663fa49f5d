"""From what a client sent to token ids: chat templates and tokenisation."""

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from tokenizers import Tokenizer

from cluster.errors import InvalidRequest
from engine.model_dir import ModelDir
from engine.text import load_tokenizer
from protos import inference_pb2 as pb

INLINE_CHARS = 4096
"""Longer texts are tokenised on a thread, so that other streams do not wait for them."""
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
TOKENS_PER_CHAR = 0.25
"""Estimated of a tokenizer that has read nothing yet."""
PROMPTS_SEEN = 20
"""Of which the mean is taken: the last ones count most."""


class ChatTemplate:
    """A model's own program that turns messages into text."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        # Rendering is transformers' own; importing no more of it than this keeps torch out of the router.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        self._source = source
        self._special_tokens = special_tokens

    @classmethod
    def of(cls, model_dir: ModelDir) -> "ChatTemplate | None":
        """From chat_template.jinja or tokenizer_config.json; None when the model has none."""
        config = model_dir.read_json("tokenizer_config.json")
        source = config.get("chat_template")
        if (file := model_dir.path / "chat_template.jinja").exists():
            source = file.read_text()
        if isinstance(source, list):  # several by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return cls(source, _special_tokens(config)) if source else None

    def render(self, messages: Sequence[pb.ChatMessage]) -> str:
        """Ends where the assistant's answer begins. Raises InvalidRequest when the template refuses."""
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            rendered, _ = self._render(
                conversations=[chat],
                chat_template=self._source,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program and raises what it likes
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        text: str = rendered[0]
        return text


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, which templates may name; given as strings or as objects with a `content`."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def prompt_kind(request: pb.GenerateRequest) -> str:
    """The field that the prompt is in. Raises InvalidRequest unless exactly one kind of prompt was given."""
    given = [
        name
        for name, present in (
            ("text", request.HasField("text")),
            ("messages", bool(request.messages)),
            ("token_ids", bool(request.token_ids)),
        )
        if present
    ]
    if len(given) != 1:
        what = f"{' and '.join(given)} were given" if given else "none was given"
        raise InvalidRequest(given[-1] if given else "text", f"exactly one of text, messages, token_ids; {what}")
    return given[0]


class PromptEncoder:
    """The tokenizer and chat template of one model."""

    def __init__(self, model_dir: ModelDir) -> None:
        self._tokenizer: Tokenizer | None = load_tokenizer(model_dir)
        self._template = ChatTemplate.of(model_dir) if self._tokenizer is not None else None
        self.vocabulary = _digest(model_dir, VOCABULARY_FILES) + f"{model_dir.vocab_size}".encode()
        """Equal where token ids mean the same."""
        self.reading = self.vocabulary + _digest(model_dir, ("tokenizer_config.json", "chat_template.jinja"))
        """Equal where the same prompt gives the same token ids."""
        self._tokens_per_char = TOKENS_PER_CHAR

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def fault(self, request: pb.GenerateRequest) -> str:
        """Why no such prompt can be read; empty where it can."""
        if self._tokenizer is None and not request.token_ids:
            return "this model has no tokenizer; send token_ids"
        if request.messages and self._template is None:
            return "this model has no chat template; send text or token_ids"
        return ""

    def estimate(self, request: pb.GenerateRequest) -> int:
        """Tokens of the prompt, without reading it: by what a character took lately."""
        return len(request.token_ids) or max(1, round(num_chars(request) * self._tokens_per_char))

    async def encode(self, request: pb.GenerateRequest) -> list[int]:
        """The prompt's token ids. Raises InvalidRequest unless exactly one kind of prompt was given, and it can be
        read."""
        kind = prompt_kind(request)
        if fault := self.fault(request):
            raise InvalidRequest(kind, fault)
        if kind == "token_ids":
            return list(request.token_ids)
        if kind == "messages":
            assert self._template is not None, "it would be at fault"
            prompt = await self._tokenise(self._template.render(request.messages), special_tokens=False)
        else:
            prompt = await self._tokenise(request.text, special_tokens=True)
        if chars := num_chars(request):
            self._tokens_per_char += (len(prompt) / chars - self._tokens_per_char) / PROMPTS_SEEN
        return prompt

    async def _tokenise(self, text: str, special_tokens: bool) -> list[int]:
        assert self._tokenizer is not None, "it would be at fault"
        tokenizer = self._tokenizer

        def encode() -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=special_tokens).ids
            return ids

        return encode() if len(text) <= INLINE_CHARS else await asyncio.to_thread(encode)


def num_chars(request: pb.GenerateRequest) -> int:
    """Of a prompt that is text or messages."""
    return len(request.text) + sum(len(message.content) for message in request.messages)


def _digest(model_dir: ModelDir, names: Sequence[str]) -> bytes:
    digest = blake2b(digest_size=16)
    for name in names:
        file = model_dir.path / name
        digest.update(name.encode() + b"\0" + (file.read_bytes() if file.exists() else b"absent"))
    return digest.digest()
