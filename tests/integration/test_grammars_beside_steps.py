"""A grammar that takes long to compile keeps only its own request waiting, in a real engine process."""

import json

from engine.core_types import SamplingParams, StructuredOutput
from engine.messages.to_engine import Cancel, Generate
from support.real_engines import RealEngine, engines, greedy
from tandem.storyteller import STORYTELLER

PROMPT = tuple(range(5, 40))
STREAMED = 2
"""Fewest tokens of a stream while another request's grammar is compiled: some 200 on free cores."""


def wide(number: int) -> StructuredOutput:
    """A schema that takes about a sixth of a second to compile."""
    properties = {f"p{number}_{i}": {"type": "integer"} for i in range(700)}
    return StructuredOutput("json_schema", (json.dumps({"type": "object", "properties": properties}),))


def asking(name: str, structured: StructuredOutput) -> Generate:
    return Generate(name, PROMPT, (), SamplingParams(max_tokens=3, structured=structured), "", 0, lender=None)


async def test_a_stream_goes_on_while_a_grammar_is_compiled() -> None:
    engine = RealEngine("engine", STORYTELLER)
    async with engines(engine):
        stream = greedy("stream", PROMPT, 1800, ignore_eos=True)
        engine.send(stream)
        await engine.until(lambda: len(engine.tokens.get("stream", ())) > 10)
        for number in range(2):
            name = f"slow {number}"
            before = len(engine.tokens["stream"])
            engine.send(asking(name, wide(number)))
            await engine.until(lambda name=name: name in engine.tokens)  # type: ignore[misc]
            assert len(engine.tokens["stream"]) - before > STREAMED
        engine.send(asking("cancelled", wide(9)), Cancel("cancelled", None), Cancel("stream", None))
        assert (await engine.audited()).sequences == 0
        assert "cancelled" not in engine.tokens
