"""Conversion of prompts to token ids: chat templates and tokenisation."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from hashlib import blake2b
from typing import Any

from tokenizers import Tokenizer

from cluster.errors import InvalidRequest
from cluster.fair_turns import FairTurns
from engine.media import NUMBER
from engine.model.detokenizer import load_tokenizer
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.models.grammars.grammar_checker import ReasoningMarks
from router.models.output.output_format import AUTO, OutputFormat
from router.models.output.token_texts import TokenForm, TokenForms, TokensInText, pieces_by_offsets
from router.models.prompts.chat_template import NO_PLACEHOLDERS, ChatTemplate, chars_of, check_chat_fields
from router.models.prompts.client_texts import ClientTexts, ControlTokens

INLINE_CHARS = 4096
"""Length from which texts are rendered and tokenised on a thread, so that other streams do not wait."""
INLINE_MESSAGES = 32
"""Number of messages from which a chat is rendered on a thread."""
LARGE_CHARS = 64 << 10
"""Length from which texts wait for a turn among large ones, so that short prompts do not wait for them."""
MAX_CHARS_COMPOSED = 4
"""Characters that Unicode's composition may make one of."""
KEEPS_CHARS = frozenset(("NFC", "Prepend", "Replace", "ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"))
"""Steps of tokenizers that drop no character; `Split` and `Replace` under conditions."""
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
TOKENS_PER_CHAR = 0.25
"""Estimated tokens per character of a tokenizer that has read nothing yet."""
PROMPTS_SEEN = 20
"""Prompts over which the mean is taken, recent ones weighing most."""


def prompt_kind(request: pb.GenerateRequest) -> str:
    """Return the field of the prompt.

    Raises InvalidRequest unless exactly one kind of prompt was given.
    """
    kinds = [
        name
        for name, present in (
            ("text", request.HasField("text")),
            ("messages", bool(request.messages)),
            ("token_ids", bool(request.token_ids)),
        )
        if present
    ]
    if len(kinds) != 1:
        what = f"{' and '.join(kinds)} were given" if kinds else "none was given"
        raise InvalidRequest(
            kinds[-1] if kinds else "text", f"exactly one of text, messages, token_ids is needed; {what}"
        )
    return kinds[0]


class PromptEncoder:
    """Tokenizer and chat template of one model."""

    def __init__(
        self,
        model_dir: ModelDir,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        special_tokens_in_messages: bool = False,
    ) -> None:
        """Read tokenizer and template.

        `special_tokens_in_messages`: read names of special tokens in messages as these tokens. Raises StartError for an
        unknown parser.
        """
        self._tokenizer: Tokenizer | None = load_tokenizer(model_dir)
        self._template = ChatTemplate.of(model_dir) if self._tokenizer is not None else None
        self._control: ControlTokens | None = None
        """Control tokens that only the template may write; None: messages may, too."""
        if self._tokenizer is not None and self._template is not None and not special_tokens_in_messages:
            self._control = ControlTokens(self._tokenizer, self._template.shown(), self._template.text)
        self._placeholders: frozenset[str] = frozenset()
        """Placeholders of media whose tokens are among the control tokens."""
        own = model_dir.read_json("tokenizer_config.json").get("response_template")
        shown = self._template.text if self._template is not None else ""
        self.output_format = OutputFormat.of(tool_parser, reasoning_parser, shown, own)
        """Form of the model's reasoning and tool calls."""
        self.reasoning_marks = self._marks(*self.output_format.reasoning_marks)
        self.vocabulary = _digest(model_dir, VOCABULARY_FILES) + f"{model_dir.vocab_size}".encode()
        """Digest that is equal where token ids mean the same."""
        self.reading = self.vocabulary + _digest(model_dir, ("tokenizer_config.json", "chat_template.jinja"))
        """Digest that is equal where the same prompt gives the same token ids."""
        self._tokens_per_char = TOKENS_PER_CHAR
        self._forms = TokenForms(self._tokenizer)
        self._max_context_tokens = model_dir.max_context_tokens
        self._pairs = model_dir.separates_pairs
        longest = max_chars_per_token(self._tokenizer) if self._tokenizer is not None else None
        self.max_chars = None if longest is None else longest * self._max_context_tokens
        """Characters beyond which no text fits in the context; None where that cannot be said."""
        self._turns, self._large_turns = FairTurns(4, 2), FairTurns(2, 1)

    def _marks(self, opening: str, closing: str) -> ReasoningMarks:
        added = self._tokenizer.get_added_tokens_decoder() if self._tokenizer is not None else {}
        return ReasoningMarks(opening, closing, {token.content: token_id for token_id, token in added.items()})

    def generation_prompt(self, request: pb.GenerateRequest) -> str:
        """Return what the template adds for an answer after a chat's last message; empty for other prompts."""
        adds = request.messages and not (request.no_generation_prompt or request.continue_final_message)
        return self._template.generation_prompt(request) if self._template is not None and adds else ""

    def begun_answer(self, request: pb.GenerateRequest) -> str:
        """Return what the prompt has of the answer where the request continues its last message; empty elsewhere."""
        if self._template is None or not request.continue_final_message or not request.messages:
            return ""
        return self._template.begun_answer(request, self.output_format.reasoning_marks[0], ClientTexts(self._control))

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def token(self, token_id: int) -> TokenForm:
        """Return a token by itself; an empty one without a tokenizer."""
        return self._forms.of(token_id)

    def pieces(self, prompt: Sequence[int], text: str | None) -> list[str]:
        """Return the part of a prompt's text that each token has; `text`: the text where the prompt was given as one.

        A tokenizer may have changed a given text, such as its combining marks.
        """
        if self._tokenizer is not None and text is not None:
            encoded = self._tokenizer.encode(text)
            if encoded.ids == list(prompt):
                return pieces_by_offsets(text, encoded.offsets)
        tokens = TokensInText(self.token, keeps_special=True)
        shown = self.decode(prompt) if text is None else text
        return [token.text for token in tokens.add(prompt, prompt, shown, ends=True)]

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

    async def encode(
        self,
        request: pb.GenerateRequest,
        tenant: str = "",
        adds_special: bool = True,
        placeholders: Mapping[str, str] = NO_PLACEHOLDERS,
    ) -> list[int]:
        """Return the prompt's token ids; `adds_special`: a text gets the tokenizer's special tokens.

        `placeholders`: the model's text for a medium of each kind, one in the prompt for each medium of the messages.
        Long prompts of a tenant wait for each other, and take turns with other tenants'. Raises InvalidRequest unless
        exactly one readable kind of prompt was given.
        """
        kind = prompt_kind(request)
        check_chat_fields(request)
        if fault := self.fault(request):
            raise InvalidRequest(kind, fault)
        if kind == "token_ids":
            if len(request.token_ids) > self._max_context_tokens:
                reason = f"prompt of {len(request.token_ids)} tokens exceeds the context of {self._max_context_tokens}"
                raise InvalidRequest(kind, reason)
            return list(request.token_ids)
        chars = num_chars(request)
        if self.max_chars is not None and chars > self.max_chars:
            limit = f"{self.max_chars}, the most that {self._max_context_tokens} tokens can hold"
            raise InvalidRequest(kind, f"the prompt has {chars} characters, at most {limit}")
        if chars <= INLINE_CHARS and len(request.messages) <= INLINE_MESSAGES:
            prompt = self._read(request, adds_special, placeholders)
        else:
            async with self._turn(chars, tenant):
                prompt = await asyncio.to_thread(self._read, request, adds_special, placeholders)
        if chars:
            self._tokens_per_char += (len(prompt) / chars - self._tokens_per_char) / PROMPTS_SEEN
        return prompt

    def _turn(self, chars: int, tenant: str) -> AbstractAsyncContextManager[None]:
        return (self._large_turns if chars > LARGE_CHARS else self._turns).turn(tenant)

    def _read(self, request: pb.GenerateRequest, adds_special: bool, placeholders: Mapping[str, str]) -> list[int]:
        """Render and tokenise a text or a chat."""
        assert self._tokenizer is not None, "it would be at fault"
        is_chat = bool(request.messages)
        text = request.text
        if is_chat:
            assert self._template is not None, "it would be at fault"
            control = self._control_with(placeholders) if placeholders else self._control
            texts = ClientTexts(control)
            text = self._template.render(request, texts, placeholders)
            if texts.stand_ins:
                assert control is not None, "it hid something"
                return control.encode(text, texts.stand_ins)
        # Unlike `encode`, this lets go of the GIL.
        whole = text if not (pair := request.embedding.text_pair) else (text, pair) if self._pairs else text + pair
        (encoded,) = self._tokenizer.encode_batch_fast([whole], add_special_tokens=adds_special and not is_chat)
        ids: list[int] = encoded.ids
        return ids

    def _control_with(self, placeholders: Mapping[str, str]) -> ControlTokens | None:
        """Return the control tokens, among which are those of placeholders, marked as special or not."""
        if self._control is not None and not self._placeholders.issuperset(placeholders.values()):
            assert self._tokenizer is not None
            assert self._template is not None, "there are control tokens"
            known = self._placeholders.union(placeholders.values())
            places = (place.replace(NUMBER, "1") for place in sorted(known))
            shown = "\n".join([self._template.shown(), *places])
            self._control = ControlTokens(self._tokenizer, shown, self._template.text)
            self._placeholders = known
        return self._control


def max_chars_per_token(tokenizer: Tokenizer) -> int | None:
    """Return a bound of the characters that one token stands for; None where the tokenizer may drop characters."""
    description = json.loads(tokenizer.to_str())
    steps = [*_steps(description.get("normalizer")), *_steps(description.get("pre_tokenizer"))]
    if not all(_keeps_chars(step) for step in steps):
        return None
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
    return longest * MAX_CHARS_COMPOSED if any(step["type"] == "NFC" for step in steps) else longest


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, those of a sequence one by one."""
    if part is None:
        return []
    nested = part.get("normalizers") or part.get("pretokenizers")
    return [part] if nested is None else [step for each in nested for step in _steps(each)]


def _keeps_chars(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern") or {}
    replaced = len(str(pattern.get("String", "")))
    shrinks = step["type"] == "Replace" and not 0 < replaced <= len(step.get("content", ""))
    return step["type"] in KEEPS_CHARS and not shrinks and step.get("behavior") != "Removed"


def num_chars(request: pb.GenerateRequest) -> int:
    """Return the characters of a prompt that is text, or messages with tools."""
    return len(request.text) + len(request.embedding.text_pair) + chars_of(request)


def _digest(model_dir: ModelDir, names: Sequence[str]) -> bytes:
    digest = blake2b(digest_size=16)
    for name in names:
        file = model_dir.path / name
        digest.update(name.encode() + b"\0" + (file.read_bytes() if file.exists() else b"absent"))
    return digest.digest()
