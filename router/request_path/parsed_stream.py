"""Messages of a request that wants its output in parts."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from protos import inference_pb2 as pb
from router.models.output.call_reading import CallArguments, CallBegun
from router.models.output.output_format import OutputParser, Piece, Reasoning
from router.models.output.output_plan import OutputPlan
from router.prepared_request import PreparedRequest
from router.request_path.late_messages import joined


class OutputParts:
    """Parts of all choices of one request. Pure."""

    def __init__(self, plan: OutputPlan, streams_calls: bool = False, resume: pb.Resume | None = None) -> None:
        """Begin; `streams_calls`: calls come also as deltas. With `resume` the client has the parts up to there."""
        self._plan = plan
        self._streams_calls = streams_calls
        self._parsers: dict[int, OutputParser | None] = {}
        for choice in () if resume is None else resume.choices:
            parser = self._parsers[choice.index] = plan.parser()
            if parser is not None:
                parser.push(choice.text, len(choice.token_ids))

    def add_to(self, message: pb.GenerateResponse) -> None:
        """Add the parts that a message makes certain, and to a choice's end its tokens of reasoning."""
        if message.index not in self._parsers:
            self._parsers[message.index] = self._plan.parser()
        parser = self._parsers[message.index]
        if parser is None:
            if message.text:
                message.parts.add(text=message.text)
            return
        pieces = parser.push(message.text, len(message.token_ids))
        if message.HasField("finish"):
            pieces += parser.finish()
            message.finish.usage.reasoning_tokens = parser.num_reasoning
        message.parts.extend(
            part_of(piece)
            for piece in pieces
            if self._streams_calls or not isinstance(piece, CallBegun | CallArguments)
        )


def part_of(piece: Piece) -> pb.OutputPart:
    if isinstance(piece, str):
        return pb.OutputPart(text=piece)
    if isinstance(piece, Reasoning):
        return pb.OutputPart(reasoning=piece.text)
    if isinstance(piece, CallBegun):
        return pb.OutputPart(tool_call_delta=pb.ToolCallDelta(id=piece.id, name=piece.name))
    if isinstance(piece, CallArguments):
        return pb.OutputPart(tool_call_delta=pb.ToolCallDelta(arguments=piece.text))
    call = pb.ToolCall(id=piece.id, name=piece.name, arguments=piece.arguments, incomplete=piece.is_cut)
    return pb.OutputPart(tool_call=call)


async def generate_parts(
    generate: Callable[[Callable[[PreparedRequest], object]], AsyncGenerator[Sequence[bytes]]],
) -> AsyncGenerator[Sequence[bytes]]:
    """Yield the messages of a request with their parts.

    `generate` starts the request; it takes the function that is to be called when the request is checked.
    """
    checked: list[PreparedRequest] = []
    parts: OutputParts | None = None
    async with aclosing(generate(checked.append)) as messages:
        async for batch in messages:
            if parts is None:
                request = checked[-1].request
                resume = request.resume if request.HasField("resume") else None
                parts = OutputParts(checked[-1].output, request.stream_tool_calls, resume)
            parsed = joined(batch)
            for message in parsed:
                parts.add_to(message)
            yield [message.SerializeToString() for message in parsed]
