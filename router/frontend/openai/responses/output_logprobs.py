"""Log probabilities of the texts of a response's output, apart from reasoning, calls and dropped whitespace. Pure."""

from collections import deque
from dataclasses import replace
from typing import Any

from protos import inference_pb2 as pb
from router.frontend.http.generation import PromptInfo
from router.frontend.openai.logprobs import LogprobForm
from router.models.output.token_texts import TextToken, TokensInText


class OutputLogprobs:
    """Log probabilities of one output, dealt to the texts that its parser makes of it.

    Call `add` with each message, then `of` with each piece of text, in order, and `close` where a text ends.
    """

    def __init__(self, served: PromptInfo) -> None:
        self._form = LogprobForm(served.form_of)
        self._tokens = TokensInText(served.form_of, 0, served.keeps_special, served.prompt)
        self._certain: deque[TextToken] = deque()
        """Tokens that belong to no text yet."""
        self._unread = ""
        """End of the output in which no text was found yet."""
        self._num_read = 0
        """Characters before that end."""
        self._spans: list[tuple[int, int]] = []
        """First character, and the one after the last, of each text whose tokens are not all certain."""

    def add(self, message: pb.GenerateResponse) -> None:
        """Add a message of the output, before its texts."""
        self._unread += message.text
        token_ids = message.token_ids if message.logprobs else ()
        ends = message.HasField("finish")
        self._certain += self._tokens.add(token_ids, message.logprobs, message.text, ends)

    def of(self, text: str) -> list[dict[str, Any]]:
        """Return the entries that are certain with the next piece of a text; earlier pieces' may be among them.

        The bytes of all entries of a text, joined, are the text: a token that it has only in part has the bytes of
        this part.
        """
        at = self._unread.find(text)
        if at >= 0:
            first = self._num_read + at
            self._num_read = first + len(text)
            self._unread = self._unread[at + len(text) :]
            if self._spans and self._spans[-1][1] == first:
                first, _ = self._spans.pop()
            self._spans.append((first, self._num_read))
        return self._entries(closes=False)

    def close(self) -> list[dict[str, Any]]:
        """Return the remaining entries of a text that has ended."""
        return self._entries(closes=True)

    def _entries(self, closes: bool) -> list[dict[str, Any]]:
        found: list[TextToken] = []
        while self._certain and self._certain[0].offset < self._num_read:
            token = self._certain[0]
            end = token.offset + len(token.text)
            if end > self._num_read and not closes:
                break  # the text may go on with its rest
            self._certain.popleft()
            part = "".join(token.text[max(0, a - token.offset) : max(0, b - token.offset)] for a, b in self._spans)
            if part == token.text and (part or any(a <= end < b for a, b in self._spans)):
                found.append(token)  # also the first part of a character, which has no text
            elif part:
                found.append(replace(token, text=part, raw=part.encode()))
        begun = self._certain[0].offset if self._certain else self._num_read
        self._spans = [span for span in self._spans if span[1] > begun or span == self._spans[-1]]
        return self._form.chat(found)
