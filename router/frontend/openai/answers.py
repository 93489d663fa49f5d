"""Conversion of our messages to OpenAI's: server-sent events of a stream, or the whole answer.

Pure.

A token costs little Python here: the parts common to all chunks of a choice are prepared once, as bytes.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from protos import inference_pb2 as pb
from router.frontend.http.blocks import compact
from router.frontend.http.generation import Answer, PromptInfo
from router.frontend.openai.completions import ChoiceAnswer, LogprobForm, call_id_of, joined, prompt_logprobs, quoted
from router.frontend.openai.request import ApiRequest
from router.models.grammars.grammar_checker import CLOSE
from router.models.output.call_reading import CallArguments, CallBegun, ToolCall
from router.models.output.output_format import Piece, Reasoning
from router.models.output.token_texts import TextToken, TokensInText

DONE = b"data: [DONE]\n\n"
PLAIN = b',"logprobs":null,"finish_reason":null}]'
"""End of a choice in an event that has text only."""
REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class OpenAiAnswer(Answer):
    """Answer of a completion or a chat."""

    id_prefix: str
    whole_name: str
    chunk_name: str
    before: bytes
    """Bytes before the text in an event."""
    after: bytes
    """Bytes after the text in an event."""
    nothing: bytes
    """Bytes in place of all three in the last event of a choice."""

    def __init__(self, api_request: ApiRequest, answer_id: str) -> None:
        self._api_request = api_request
        self._id = self.id_prefix + answer_id
        self._choices: dict[int, ChoiceAnswer] = {}
        """Choices by index."""
        self._usage = pb.Usage()
        self._receipts: dict[int, Any] = {}
        """Receipts, and the next field, by number of the prompt."""
        self._scored: dict[int, list[pb.TokenLogprobs]] = {}
        self._num_open = len(api_request.requests) * api_request.choices_per_prompt
        self._end = b',"usage":null}\n\n' if api_request.include_usage else b"}\n\n"
        self._plain = self.after + PLAIN + self._end

    def begin(self, number: int, served: PromptInfo) -> None:
        """Begin a prompt that was checked."""
        per_prompt = self._api_request.choices_per_prompt
        form = LogprobForm(served.form_of, self._api_request.tokens_as_ids)
        for index in range(number * per_prompt, (number + 1) * per_prompt):
            head = f'data: {self._top(self.chunk_name, served.model)},"choices":[{{"index":{index},'
            tokens = TokensInText(served.form_of, len(served.echo), served.keeps_special, served.prompt)
            choice = ChoiceAnswer(index, served, head.encode(), served.new_parser(), tokens, form)
            self._choices[index] = choice
            if not self._api_request.stream and served.echo:
                choice.text.append(served.echo)

    @abstractmethod
    def first(self, choice: ChoiceAnswer) -> bytes:
        """Return the bytes before all other events of a choice, perhaps none.

        Ends where `_plain` begins.
        """

    @abstractmethod
    def logprobs_of(self, choice: ChoiceAnswer, tokens: Sequence[TextToken]) -> Any:
        """Return the log probabilities of tokens."""

    @abstractmethod
    def whole_logprobs(self, parts: Sequence[Any]) -> Any:
        """Return the log probabilities of all messages of a choice; None where there were none."""

    @abstractmethod
    def whole_content(self, choice: ChoiceAnswer) -> dict[str, Any]:
        """Return the fields of a choice that only this endpoint has."""

    # -------------------------------------------------------------------------------------------- streams

    def chunk(self, number: int, message: pb.GenerateResponse) -> bytes:
        """Return the events of a prompt's message, perhaps none."""
        choice = self._choice(number, message)
        events = b""
        if not choice.has_begun:
            choice.has_begun = True
            if first := self.first(choice):
                events = choice.head + first + self._only_text(choice)
        if message.token_ids or message.text or (message.HasField("finish") and choice.tokens.waits):
            events += self._changed(choice, message)
        if message.HasField("finish"):
            if choice.parser is not None:
                events += self._pieces(choice, choice.parser.finish(), self._only_text(choice))
            self._finish(number, choice, message.finish)
            events += self._last(choice)
        return events

    @property
    def complete(self) -> bool:
        """Whether the finish of every choice was seen."""
        return not self._num_open

    def _changed(self, choice: ChoiceAnswer, message: pb.GenerateResponse) -> bytes:
        choice.num_tokens += len(message.token_ids)
        tokens = choice.certain(message)
        detailed = choice.has_logprobs or self._api_request.token_ids or self._api_request.continuous_usage
        after = self._detailed(choice, message, tokens) if detailed else self._plain
        if choice.parser is None:
            return choice.head + self.before + quoted(message.text) + after
        pieces = choice.parser.push(message.text, len(message.token_ids))
        events = self._pieces(choice, pieces, after)
        return choice.head + self.before + b'""' + after if detailed and not events else events

    def _pieces(self, choice: ChoiceAnswer, pieces: Sequence[Piece], after: bytes) -> bytes:
        """Return at most one event per piece, the first one ending with `after`."""
        events = []
        for piece in pieces:
            if delta := self._delta(choice, piece):
                events.append(choice.head + delta + after)
                after = self._only_text(choice)
        return b"".join(events)

    def _delta(self, choice: ChoiceAnswer, piece: Piece) -> bytes:
        """Return what a piece adds, without the end of its object; nothing for one that the client has or wants not."""
        if isinstance(piece, str):
            return self.before + quoted(piece)
        if isinstance(piece, Reasoning):
            text = quoted(piece.text)
            is_wanted = self._api_request.include_reasoning
            return b'"delta":{"reasoning_content":' + text + b',"reasoning":' + text if is_wanted else b""
        call: dict[str, Any] = {"index": len(choice.calls)}
        if isinstance(piece, CallBegun):
            choice.begun = call_id_of(piece.id)
            call |= {"id": choice.begun, "type": "function", "function": {"name": piece.name, "arguments": ""}}
        elif isinstance(piece, CallArguments):
            call["function"] = {"arguments": piece.text}
        elif choice.begun:
            choice.add_call(piece)
            return b""
        else:
            call |= choice.add_call(piece)
        return f'"delta":{{"tool_calls":[{compact(call)}]'.encode()

    def _detailed(self, choice: ChoiceAnswer, message: pb.GenerateResponse, tokens: Sequence[TextToken]) -> bytes:
        """Return the bytes after the text for a choice with further fields."""
        logprobs = self.logprobs_of(choice, tokens) if tokens else None
        token_ids = f',"token_ids":{compact(list(message.token_ids))}' if self._api_request.token_ids else ""
        tail = f',"logprobs":{compact(logprobs)},"finish_reason":null{token_ids}}}]'
        return self.after + tail.encode() + self._so_far(choice)

    def _only_text(self, choice: ChoiceAnswer) -> bytes:
        """Return the bytes after the text for a choice with text only."""
        return self.after + PLAIN + self._so_far(choice) if self._api_request.continuous_usage else self._plain

    def _so_far(self, choice: ChoiceAnswer) -> bytes:
        """Return the end of an event, with the usage so far where it was requested for each."""
        if not self._api_request.continuous_usage:
            return self._end
        num_prompt, num_tokens = len(choice.served.prompt), choice.num_tokens
        usage = {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_tokens,
            "completion_tokens": num_tokens,
        }
        return f',"usage":{compact(usage)}}}\n\n'.encode()

    def _last(self, choice: ChoiceAnswer) -> bytes:
        """Return the event with a choice's finish, and after the last choice the end of the stream."""
        reason, stop_reason = compact(choice.reason), compact(choice.stop_reason)
        reasons = f',"logprobs":null,"finish_reason":{reason},"stop_reason":{stop_reason}'
        prompt = f',"prompt_token_ids":{compact(choice.served.prompt)}' if self._api_request.token_ids else ""
        event = choice.head + self.nothing + f"{reasons}{prompt}}}]".encode()
        if self._num_open:
            return event + self._so_far(choice)
        if not self._api_request.include_usage:
            return event + self._receipts_field() + self._so_far(choice) + DONE
        top = f'data: {self._top(self.chunk_name, choice.served.model)},"choices":[],"usage":{compact(self.usage())}'
        return event + self._so_far(choice) + top.encode() + self._receipts_field() + b"}\n\n" + DONE

    # -------------------------------------------------------------------------------------- whole answers

    def absorb(self, number: int, message: pb.GenerateResponse) -> None:
        """Add a message of a prompt to the whole answer."""
        if message.prompt_logprobs:
            self._scored.setdefault(number, []).extend(message.prompt_logprobs)
        choice = self._choice(number, message)
        if self._api_request.only_echo:
            if message.HasField("finish"):
                message.finish.usage.completion_tokens = 0
                message.finish.reason = pb.FINISH_REASON_LENGTH
                self._finish(number, choice, message.finish)
            return
        pieces: list[Piece] = [message.text]
        if choice.parser is not None:
            pieces = choice.parser.push(message.text, len(message.token_ids))
        if tokens := choice.certain(message):
            choice.logprobs.append(self.logprobs_of(choice, tokens))
        if self._api_request.token_ids:
            choice.token_ids += message.token_ids
        if message.HasField("finish") and choice.parser:
            pieces += choice.parser.finish()
        for piece in pieces:
            if isinstance(piece, str):
                choice.text.append(piece)
            elif isinstance(piece, Reasoning):
                choice.reasoning.append(piece.text)
            elif isinstance(piece, ToolCall):
                choice.add_call(piece)
        if message.HasField("finish"):
            self._finish(number, choice, message.finish)

    def whole(self) -> bytes:
        """Return the whole answer, once all messages were absorbed."""
        choices = [self._whole_choice(choice) for _, choice in sorted(self._choices.items())]
        top = self._top(self.whole_name, self._choices[0].served.model)
        body = f'{top},"choices":{compact(choices)},"usage":{compact(self.usage())}'
        return body.encode() + self._receipts_field() + b"}"

    def _whole_choice(self, choice: ChoiceAnswer) -> dict[str, Any]:
        served, parts = choice.served, choice.logprobs
        scored = self._scored.get(choice.index // self._api_request.choices_per_prompt)
        if self._api_request.echo_logprobs:
            parts = [choice.logprob_form.echoed(served.prompt, served.echo_pieces(), scored or ()), *parts]
        values = {"index": choice.index, **self.whole_content(choice), "logprobs": self.whole_logprobs(parts)}
        values |= {"finish_reason": choice.reason, "stop_reason": choice.stop_reason}
        if self._api_request.token_ids:
            values |= {"token_ids": choice.token_ids, "prompt_token_ids": served.prompt}
        if scored is not None and not self._api_request.echo_logprobs:
            values["prompt_logprobs"] = prompt_logprobs(served.prompt, scored, served.form_of)
        return values

    # --------------------------------------------------------------------------------------------- common

    def usage(self) -> dict[str, Any]:
        """Return the usage of all finished prompts and choices."""
        usage = self._usage
        values = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        if any(choice.parser is not None for choice in self._choices.values()):
            values["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        return values

    def _top(self, name: str, model: str) -> str:
        """Return the beginning of an object."""
        created = self._api_request.created
        return f'{{"id":{compact(self._id)},"object":"{name}","created":{created},"model":{compact(model)}'

    def _choice(self, number: int, message: pb.GenerateResponse) -> ChoiceAnswer:
        return self._choices[number * self._api_request.choices_per_prompt + message.index]

    def _finish(self, number: int, choice: ChoiceAnswer, finish: pb.Finish) -> None:
        self._num_open -= 1
        choice.reason = REASONS[finish.reason]
        if choice.calls and choice.reason == "stop" and not choice.is_cut:
            choice.reason = "tool_calls"
        if finish.stop_match:
            stops = self._api_request.requests[number].sampling.stop
            is_token = finish.stop_match not in stops and finish.stop_match.isdecimal()
            choice.stop_reason = int(finish.stop_match) if is_token else finish.stop_match
            if choice.stop_reason == CLOSE and CLOSE not in stops:
                choice.stop_reason = None  # the router's own, after a single call
        self._usage.prompt_tokens += finish.usage.prompt_tokens
        self._usage.completion_tokens += finish.usage.completion_tokens
        self._usage.cached_tokens += finish.usage.cached_tokens
        self._usage.reasoning_tokens += choice.parser.num_reasoning if choice.parser is not None else 0
        if self._api_request.receipt and finish.HasField("receipt"):
            finish.receipt.ignored_fields.extend(self._api_request.ignored)
            self._receipts[number] = MessageToDict(
                finish.receipt, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )

    def _receipts_field(self) -> bytes:
        """Return a comma and the field `tandem`: the receipt, or a list of them where there are several prompts."""
        if not self._api_request.receipt:
            return b""
        receipts = [receipt for _, receipt in sorted(self._receipts.items())]
        return b',"tandem":' + compact(receipts[0] if len(self._api_request.requests) == 1 else receipts).encode()


class CompletionAnswer(OpenAiAnswer):
    """Answer of /v1/completions."""

    id_prefix, whole_name, chunk_name = "cmpl-", "text_completion", "text_completion"
    before, after, nothing = b'"text":', b"", b'"text":""'

    def first(self, choice: ChoiceAnswer) -> bytes:
        return self.before + quoted(choice.served.echo) if choice.served.echo else b""

    def logprobs_of(self, choice: ChoiceAnswer, tokens: Sequence[TextToken]) -> Any:
        return choice.logprob_form.completion(tokens)

    def whole_logprobs(self, parts: Sequence[Any]) -> Any:
        return joined(parts)

    def whole_content(self, choice: ChoiceAnswer) -> dict[str, Any]:
        return {"text": "".join(choice.text)}


class ChatAnswer(OpenAiAnswer):
    """Answer of /v1/chat/completions."""

    id_prefix, whole_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    before, after, nothing = b'"delta":{"content":', b"}", b'"delta":{}'

    def first(self, choice: ChoiceAnswer) -> bytes:
        return b'"delta":{"role":' + quoted(self._api_request.role) + b',"content":""'

    def logprobs_of(self, choice: ChoiceAnswer, tokens: Sequence[TextToken]) -> Any:
        return {"content": choice.logprob_form.chat(tokens), "refusal": None}

    def whole_logprobs(self, parts: Sequence[Any]) -> Any:
        return {"content": [entry for part in parts for entry in part["content"]], "refusal": None} if parts else None

    def whole_content(self, choice: ChoiceAnswer) -> dict[str, Any]:
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": self._api_request.role, "content": text, "refusal": None}
        if choice.reasoning and self._api_request.include_reasoning:
            reasoning = "".join(choice.reasoning)
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if choice.calls:
            message |= {"content": text or None, "tool_calls": choice.calls}
        return {"message": message}
