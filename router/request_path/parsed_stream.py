"""Messages of a request that wants its output in parts."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from protos import inference_pb2 as pb
from router.models.output_format import OutputParser, Piece, Reasoning
from router.models.output_plan import OutputPlan
from router.prepared_request import PreparedRequest


class OutputParts:
    """Parts of all choices of one request. Pure."""

    def __init__(self, plan: OutputPlan) -> None:
        self._plan = plan
        self._parsers: dict[int, OutputParser | None] = {}

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
        message.parts.extend(map(part_of, pieces))


def part_of(piece: Piece) -> pb.OutputPart:
    if isinstance(piece, str):
        return pb.OutputPart(text=piece)
    if isinstance(piece, Reasoning):
        return pb.OutputPart(reasoning=piece.text)
    return pb.OutputPart(tool_call=pb.ToolCall(id=piece.id, name=piece.name, arguments=piece.arguments))


async def generate_parts(
    generate: Callable[[Callable[[PreparedRequest], object]], AsyncGenerator[bytes]],
) -> AsyncGenerator[bytes]:
    """Yield the messages of a request with their parts.

    `generate` starts the request; it takes the function that is to be called once the request is checked.
    """
    plans: list[OutputPlan] = []
    parts: OutputParts | None = None
    async with aclosing(generate(lambda prepared: plans.append(prepared.output))) as messages:
        async for raw in messages:
            parts = parts or OutputParts(plans[0])
            message = pb.GenerateResponse.FromString(raw)
            parts.add_to(message)
            yield message.SerializeToString()
