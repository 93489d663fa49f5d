"""Conversion of prompts to token ids: chat templates and tokenisation."""

import asyncio
from collections.abc import Sequence
from hashlib import blake2b

from tokenizers import Tokenizer

from cluster.errors import InvalidRequest
from engine.model.detokenizer import load_tokenizer
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.models.chat_template import ChatTemplate, chars_of, check_chat_fields

INLINE_CHARS = 4096
"""Length from which texts are tokenised on a thread, so that other streams do not wait."""
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
TOKENS_PER_CHAR = 0.25
"""Estimated tokens per character of a tokenizer that has read nothing yet."""
PROMPTS_SEEN = 20
"""Prompts over which the mean is taken, recent ones weighing most."""


def prompt_kind(request: pb.GenerateRequest) -> str:
    """Return the field of the prompt.

    Raises InvalidRequest unless exactly one kind of prompt was given.
    """
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
    """Tokenizer and chat template of one model."""

    def __init__(self, model_dir: ModelDir) -> None:
        self._tokenizer: Tokenizer | None = load_tokenizer(model_dir)
        self._template = ChatTemplate.of(model_dir) if self._tokenizer is not None else None
        self.vocabulary = _digest(model_dir, VOCABULARY_FILES) + f"{model_dir.vocab_size}".encode()
        """Digest that is equal where token ids mean the same."""
        self.reading = self.vocabulary + _digest(model_dir, ("tokenizer_config.json", "chat_template.jinja"))
        """Digest that is equal where the same prompt gives the same token ids."""
        self._tokens_per_char = TOKENS_PER_CHAR
        self._token_texts: dict[int, str] = {}

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, special tokens included.

        Parts of a character give the replacement character. Empty without a tokenizer.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id])
            self._token_texts[token_id] = text
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def fault(self, request: pb.GenerateRequest) -> str:
        """Return why this model cannot read the prompt; empty where it can."""
        if self._tokenizer is None and not request.token_ids:
            return "this model has no tokenizer; send token_ids"
        if request.messages and self._template is None:
            return "this model has no chat template; send text or token_ids"
        return ""

    def estimate(self, request: pb.GenerateRequest) -> int:
        """Estimate the prompt's tokens without reading it, from recent tokens per character."""
        return len(request.token_ids) or max(1, round(num_chars(request) * self._tokens_per_char))

    async def encode(self, request: pb.GenerateRequest) -> list[int]:
        """Return the prompt's token ids.

        Raises InvalidRequest unless exactly one readable kind of prompt was given.
        """
        kind = prompt_kind(request)
        check_chat_fields(request)
        if fault := self.fault(request):
            raise InvalidRequest(kind, fault)
        if kind == "token_ids":
            return list(request.token_ids)
        if kind == "messages":
            assert self._template is not None, "it would be at fault"
            prompt = await self._tokenise(self._template.render(request), special_tokens=False)
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
    """Return the characters of a prompt that is text, or messages with tools."""
    return len(request.text) + chars_of(request)


def _digest(model_dir: ModelDir, names: Sequence[str]) -> bytes:
    digest = blake2b(digest_size=16)
    for name in names:
        file = model_dir.path / name
        digest.update(name.encode() + b"\0" + (file.read_bytes() if file.exists() else b"absent"))
    return digest.digest()
