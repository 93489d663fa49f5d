"""From what a client sent to token ids: chat templates and tokenisation."""

import asyncio
from typing import Any

from tokenizers import Tokenizer

from cluster.errors import InvalidRequest
from engine.model_dir import ModelDir
from engine.text import load_tokenizer
from protos import inference_pb2 as pb

INLINE_CHARS = 4096
"""Longer texts are tokenised on a thread, so that other streams do not wait for them."""


class PromptEncoder:
    """The tokenizer and chat template of one model."""

    def __init__(self, model_dir: ModelDir) -> None:
        self._tokenizer: Tokenizer | None = load_tokenizer(model_dir)
        self._template: Any = None
        if self._tokenizer is not None:
            from transformers import AutoTokenizer  # slow to import: only where there is something to render

            self._template = AutoTokenizer.from_pretrained(model_dir.path, local_files_only=True)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    async def encode(self, request: pb.GenerateRequest) -> list[int]:
        """The prompt's token ids. Raises InvalidRequest unless exactly one kind of prompt was given."""
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
        if given == ["token_ids"]:
            return list(request.token_ids)
        if given == ["messages"]:
            return await self._tokenise(self._render(request), "messages", special_tokens=False)
        return await self._tokenise(request.text, "text", special_tokens=True)

    def _render(self, request: pb.GenerateRequest) -> str:
        if self._template is None or not self._template.chat_template:
            raise InvalidRequest("messages", "this model has no chat template; send text or token_ids")
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        try:
            rendered: str = self._template.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is the model's own program and raises what it likes
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        return rendered

    async def _tokenise(self, text: str, field: str, special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequest(field, "this model has no tokenizer; send token_ids")
        tokenizer = self._tokenizer

        def encode() -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=special_tokens).ids
            return ids

        return encode() if len(text) <= INLINE_CHARS else await asyncio.to_thread(encode)
