"""State of a request's stream: all that its client has received, over all attempts."""

from dataclasses import dataclass, field

from protos import inference_pb2 as pb

MAX_UNREAD_BYTES = 256 << 10
"""Bytes of a request kept unparsed; most requests never have as much."""


@dataclass(slots=True)
class ChoiceState:
    """Part of one choice that the client has received."""

    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    """Characters of text, counted in code points as the worker does."""
    reason: pb.FinishReason.ValueType | None = None
    """Finish reason, once the choice ended."""

    @property
    def finished(self) -> bool:
        return self.reason is not None


class StreamState:
    """Messages that the client has received.

    Kept as bytes, and parsed only when an attempt failed, or when the parsed form is smaller.
    """

    def __init__(self, num_choices: int) -> None:
        self.unread: list[bytes] = []
        self._unread_bytes = 0
        self._choices = [ChoiceState() for _ in range(num_choices)]
        self._num_prompt_logprobs = 0
        self._num_sent = 0
        self._is_resumed = False

    @classmethod
    def resumed(cls, num_choices: int, resume: pb.Resume) -> "StreamState":
        """Return the state of a stream of which the client has told what it has."""
        state = cls(num_choices)
        state._is_resumed, state._num_prompt_logprobs = True, resume.prompt_logprobs
        for given in resume.choices:
            choice = state._choices[given.index]
            choice.token_ids, choice.num_chars = list(given.token_ids), len(given.text)
            # The client keeps the reason; it only matters that there is one.
            choice.reason = pb.FINISH_REASON_STOP if given.finished else None
        return state

    def add(self, message: bytes) -> None:
        self._num_sent += 1
        self.unread.append(message)
        self._unread_bytes += len(message)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._read()

    @property
    def choices(self) -> list[ChoiceState]:
        self._read()
        return self._choices

    @property
    def num_prompt_logprobs(self) -> int:
        self._read()
        return self._num_prompt_logprobs

    @property
    def empty(self) -> bool:
        """Whether the client has nothing of it."""
        return not (self._num_sent or self._is_resumed)

    @property
    def is_untouched(self) -> bool:
        """Whether this router has sent nothing of it; another one may have."""
        return self._num_sent == 0

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def finished(self) -> bool:
        """Whether the last message was sent: whatever fails afterwards, the client has everything."""
        return all(choice.finished for choice in self.choices)

    def _read(self) -> None:
        for unread in self.unread:
            message = pb.GenerateResponse.FromString(unread)
            self._num_prompt_logprobs += len(message.prompt_logprobs)
            choice = self._choices[message.index]
            choice.token_ids += message.token_ids
            choice.num_chars += len(message.text)
            if message.HasField("finish"):
                choice.reason = message.finish.reason
        self.unread.clear()
        self._unread_bytes = 0
