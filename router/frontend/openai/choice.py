"""State of one choice while its answer is made."""

import secrets
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from protos import inference_pb2 as pb
from router.frontend.http.blocks import in_one_line
from router.frontend.http.generation import PromptInfo
from router.frontend.openai.logprobs import LogprobForm
from router.models.output.call_reading import ToolCall
from router.models.output.output_format import OutputParser
from router.models.output.token_texts import TextToken, TokensInText


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice so far."""

    index: int
    """Index over all prompts in order, and the choices of each."""
    served: PromptInfo
    head: bytes
    """Beginning of each of its events."""
    parser: OutputParser | None
    """Parser of reasoning and tool calls; None where all output is text."""
    tokens: TokensInText
    """Tokens with log probabilities that wait for their text."""
    logprob_form: LogprobForm
    has_logprobs: bool = False
    """Whether a message had log probabilities."""
    has_begun: bool = False
    num_tokens: int = 0
    reason: str | None = None
    stop_reason: str | int | None = None
    text: list[str] = field(default_factory=list)
    """Text in pieces; this and the following are kept for a whole answer only."""
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    begun: str = ""
    """Id of a call whose arguments are being streamed; empty: none."""
    is_cut: bool = False
    """Whether the last call is not complete."""
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add_call(self, call: ToolCall) -> dict[str, Any]:
        """Add a whole call, begun or not; return it as the API has it."""
        call_id, self.begun = self.begun or call_id_of(call.id), ""
        function = {"name": call.name, "arguments": call.arguments}
        self.calls.append({"id": call_id, "type": "function", "function": function})
        self.is_cut = call.is_cut
        return self.calls[-1]

    def certain(self, message: pb.GenerateResponse) -> list[TextToken]:
        """Return the tokens with log probabilities whose text is known with this message.

        The text may lag the tokens, and a stop string may still cut it off.
        """
        self.has_logprobs = self.has_logprobs or bool(message.logprobs)
        if not self.has_logprobs:
            return []
        token_ids = message.token_ids if message.logprobs else ()
        return self.tokens.add(token_ids, message.logprobs, message.text, message.HasField("finish"))


def call_id_of(own: str) -> str:
    """Return the id of a call: the model's own, if any."""
    return own or f"call_{secrets.token_hex(12)}"


def quoted(text: str) -> bytes:
    """Return a text as a JSON string."""
    return in_one_line(encode_basestring(text)).encode()
