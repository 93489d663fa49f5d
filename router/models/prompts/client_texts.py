"""Control tokens that only a chat template may write: in a client's texts their names stay text.

Rendering joins both. So before it each control token's name in a client's text is replaced by a stand-in, one
character that no text of the request has. In the rendered text all names left are the template's own. A second
tokenizer over the same model knows these by secret aliases only, and reads the client's names as it reads any text.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from cluster.errors import InvalidRequest
from router.models.output.call_reading import REASONING

STAND_INS = range(0x10FFFD, 0xEFFFF, -1)
"""Characters for private use, the last ones first, which hardly any text has."""
ALIAS_MARK = chr(0x10FFFE)
"""First character of an alias: no character at all, and no stand-in."""


class ControlTokens:
    """Control tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, shown: str, source: str = "") -> None:
        """Find them; `shown` is what the chat template of this `source` writes around conversations without tools.

        Control tokens are the tokenizer's special tokens. Some tokenizers do not mark those of turns as special: so are
        other added tokens in `shown`, but for marks of reasoning, which templates look for in answers.
        """
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self.texts = tuple(
            token.content
            for token in self._added.values()
            if not token.content.isspace()
            and (token.special or (token.content in shown and not _is_of_reasoning(token.content)))
        )
        """Names of the control tokens."""
        self._aliases = {text: _secret() for text in self.texts}
        self._break = _secret()
        self.names = _any_of(self.texts)
        """Pattern of a name; of several at one place the longest is found, as tokenizers do."""
        sought = {text for text in self.texts if text in source and _is_of_reasoning(text)}
        self.names_in_answers = _any_of([text for text in self.texts if text not in sought]) if sought else self.names
        """Pattern of a name in an answer's text, where special marks of reasoning stay for a template to find."""

    def encode(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """Return the token ids of a rendered text, with the names that `stand_ins` stand for as text.

        Raises InvalidRequest where the tokenizer's model itself makes control tokens of such a name.
        """
        text = self.names.sub(lambda match: self._aliases[match[0]], text)
        ids = self._ids(_written(text, stand_ins))
        if ids is None:  # the model knows the name as a whole
            apart = {stand_in: self._break.join(name) for stand_in, name in stand_ins.items()}
            ids = self._ids(_written(text, apart))
        if ids is None:
            names = ", ".join(map(repr, stand_ins.values()))
            raise InvalidRequest("messages", f"the model's tokenizer can only read {names} as control tokens")
        return ids

    def _ids(self, text: str) -> list[int] | None:
        """Return the token ids of a text with aliases; None where its other parts make control tokens."""
        (encoded,) = self._by_alias.encode_batch([text], add_special_tokens=False)
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        token_ids: list[int] = []
        for token, token_id in zip(encoded.tokens, encoded.ids, strict=True):
            # Ids of added tokens differ between both tokenizers, and only their texts say what they are.
            known = self._known_ids.get(token)
            if known is None and token in self._aliases and token != unknown:
                return None
            if token != self._break:
                token_ids.append(token_id if known is None else known)
        return token_ids

    @cached_property
    def _by_alias(self) -> Tokenizer:
        """Tokenizer over the same model, which both share, with aliases in place of control tokens' names."""
        other = Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            other.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            other.pre_tokenizer = self._tokenizer.pre_tokenizer
        aliased = [
            AddedToken(self._aliases[token.content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
            if token.content in self._aliases
            else token
            for _, token in sorted(self._added.items())
        ]
        other.add_tokens([*aliased, AddedToken(self._break, normalized=False)])
        return other

    @cached_property
    def _known_ids(self) -> dict[str, int]:
        """Ids of added tokens by their text in the tokenizer with aliases."""
        return {self._aliases.get(token.content, token.content): token_id for token_id, token in self._added.items()}


class ClientTexts:
    """Texts of one request, whose names of control tokens are hidden while a template renders them."""

    def __init__(self, control: ControlTokens | None) -> None:
        """Begin; without `control` nothing is hidden."""
        self._control = control
        self.stand_ins: dict[str, str] = {}
        """Names of control tokens in the texts, by the characters that stand for them."""

    def hide(self, chat: list[dict[str, Any]], *others: Any) -> list[Any]:
        """Return messages and other JSON values with stand-ins in place of control tokens' names, in keys, too.

        Raises InvalidRequest where the texts leave no character for these.
        """
        values = [chat, *others]
        if self._control is None:
            return values
        texts = list(_texts_of(values))
        names = self._control.names
        hidden = dict.fromkeys(name for text in texts for name in names.findall(text))
        if not hidden:
            return values
        taken = set().union(*texts)
        free = (character for code in STAND_INS if (character := chr(code)) not in taken)
        of_name = dict(zip(hidden, free, strict=False))
        if len(of_name) < len(hidden):
            raise InvalidRequest(
                "messages", "the texts use special tokens and nearly all private-use characters of Unicode"
            )
        self.stand_ins = {stand_in: name for name, stand_in in of_name.items()}
        made: list[Any] = _replaced(values, names, of_name)
        for message, original in zip(made[0], chat, strict=True):
            if original["role"] == "assistant":
                message["content"] = _replaced(original["content"], self._control.names_in_answers, of_name)
        return made


def _written(text: str, stand_ins: Mapping[str, str]) -> str:
    return text.translate({ord(stand_in): name for stand_in, name in stand_ins.items()})


def _texts_of(values: Any) -> Iterator[str]:
    """Return all texts in JSON values, keys included."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict):
        yield from values
        for value in values.values():
            yield from _texts_of(value)
    elif isinstance(values, list):
        for value in values:
            yield from _texts_of(value)


def _replaced(values: Any, names: re.Pattern[str], of_name: Mapping[str, str]) -> Any:
    if isinstance(values, str):
        return names.sub(lambda match: of_name[match[0]], values)
    if isinstance(values, dict):
        return {_replaced(key, names, of_name): _replaced(value, names, of_name) for key, value in values.items()}
    return [_replaced(value, names, of_name) for value in values] if isinstance(values, list) else values


def _secret() -> str:
    """Return a text that no client can guess."""
    return ALIAS_MARK + secrets.token_hex(16)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of the longest of some texts at a place.

    Common beginnings are tried once: a plain list of hundreds would take seconds of the GIL for a long text of `<`.
    """
    return re.compile(_branches(sorted(texts)) if texts else r"(?!)")


def _branches(texts: Sequence[str]) -> str:
    """Return the source of a pattern of sorted texts."""
    if len(texts) == 1:
        return re.escape(texts[0])
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text)
    parts = []
    for group in by_first.values():
        common = _common(group)
        rest = sorted({text[len(common) :] for text in group})
        parts.append(re.escape(common) + (_branches(rest) if rest != [""] else ""))
    source = f"(?:{'|'.join(parts)})" if len(parts) > 1 or not texts[0] else parts[0]
    return source if texts[0] else source + "?"


def _common(texts: Iterable[str]) -> str:
    first, last = min(texts), max(texts)
    num_equal = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:num_equal]


def _is_of_reasoning(token: str) -> bool:
    """Return whether a token is a mark of reasoning, or a part of one."""
    return any(token in mark for mark in _REASONING_MARKS)


def _reasoning_marks() -> frozenset[str]:
    """Return all literal marks of reasoning, of any family."""
    marks: set[str] = set()
    for family in REASONING.values():
        for name in ("open", "close"):
            mark = family.fields["reasoning"].get(name, ())
            marks |= {mark} if isinstance(mark, str) else set(mark)
    return frozenset(marks)


_REASONING_MARKS = _reasoning_marks()
