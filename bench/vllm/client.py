"""One client of Tandem's router, as a process that answers loads: `python -m bench.vllm.client ADDRESS`."""

import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, TextIO

import uvloop

from bench.vllm.streams import answer_loads, private_output
from protos import inference_pb2 as pb
from tandem.client import Client

TIMEOUT_S = 300.0


async def main(output: TextIO, address: str) -> None:
    async with Client(address) as client:

        async def generate(prompt: Sequence[int], options: dict[str, Any]) -> AsyncIterator[Sequence[int]]:
            sampling = pb.Sampling(**options)
            async for message in client.generate(token_ids=prompt, sampling=sampling, timeout_s=TIMEOUT_S):
                if message.token_ids:
                    yield message.token_ids

        await answer_loads(generate, output, {})


if __name__ == "__main__":
    uvloop.run(main(private_output(), sys.argv[1]))
