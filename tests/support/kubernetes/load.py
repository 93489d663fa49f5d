"""Load of the suite, a program in a pod of the cluster: `python load.py`, with its settings in LOAD as JSON.

Streams are repeated until SIGTERM; each answer is compared with the first one to its prompt by its revision of the
model. The program prints a line of JSON when the load begins, and one when it has ended. It uses only what the routers'
image contains.
"""

import asyncio
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster.errors import ServiceError
from cluster.network.tls import ClientIdentity
from protos import inference_pb2 as pb
from tandem.client import Client

STREAM_S = 120.0
"""Longest time of one stream, in seconds."""
ERRORS = 10
"""Largest number of errors to report."""


@dataclass(frozen=True)
class Load:
    """Settings of a load."""

    address: str
    """Address of the routers' Service, host:port."""
    streams: int = 8
    prompts: int = 4
    """Number of different prompts."""
    prompt_tokens: int = 200
    tokens: int = 100
    """Output tokens of each stream."""
    vocabulary: int = 1000
    model: str = ""
    api_key: str = ""
    ca: str = ""
    """File with the authority of the routers' certificate; empty: no TLS."""
    once: bool = False
    """Send each prompt once, and end."""


@dataclass
class Result:
    """Outcome of a load."""

    finished: int = 0
    compared: int = 0
    """Number of whole answers that were held against the first one to their prompt by their revision."""
    different: int = 0
    """Number of answers with other tokens than that one, or fewer or more tokens than asked for."""
    lost: int = 0
    longest_gap_s: float = 0.0
    """Longest time between two pieces of one stream, in seconds."""
    verified_blocks: int = 0
    revisions: list[str] = field(default_factory=list)
    """Revisions of the model that answered."""
    errors: list[str] = field(default_factory=list)


async def run(load: Load) -> Result:
    """Send the load until it is told to stop."""
    result, stop = Result(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tls = ClientIdentity(Path(load.ca)) if load.ca else None
    async with Client(load.address, api_key=load.api_key, tls=tls) as client:
        first: dict[tuple[int, str], list[int]] = {}
        """First answer by prompt and revision of the model."""
        for number in range(load.prompts):
            await answer(client, load, number, "first", result, first)
        print(json.dumps({"event": "begun"}), flush=True)
        if load.once:
            return result

        async def repeat(stream: int) -> None:
            number = stream
            while not stop.is_set():
                await answer(client, load, number % load.prompts, f"{number}", result, first)
                number += load.streams

        await asyncio.gather(*map(repeat, range(load.streams)))
    return result


async def answer(
    client: Client, load: Load, prompt: int, salt: str, result: Result, first: dict[tuple[int, str], list[int]]
) -> None:
    """Send one stream, with a cache of its own, and compare its tokens."""
    token_ids = [(prompt * 7919 + position * 31) % load.vocabulary for position in range(load.prompt_tokens)]
    sampling = pb.Sampling(max_tokens=load.tokens, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(model=load.model, token_ids=token_ids, sampling=sampling, cache_salt=salt)
    tokens: list[int] = []
    revision = ""
    piece_at: float | None = None
    try:
        async for piece in client.send(request, STREAM_S):
            now = time.monotonic()
            if piece_at is not None:
                result.longest_gap_s = max(result.longest_gap_s, now - piece_at)
            piece_at = now
            tokens += piece.token_ids
            if piece.HasField("finish"):
                result.verified_blocks += piece.finish.receipt.kv.verified_blocks
                revision = piece.finish.receipt.placement.revision
    except ServiceError as error:
        result.lost += 1
        result.errors = [*result.errors, f"{type(error).__name__}: {error}"][:ERRORS]
        await asyncio.sleep(0.2)  # a client that is refused at once does not turn in circles
        return
    result.finished += 1
    key = prompt, revision
    if len(tokens) != load.tokens:
        result.different += 1
    elif key not in first:
        first[key] = tokens
        result.revisions = sorted({revision for _, revision in first})
    else:
        result.compared += 1
        result.different += tokens != first[key]


def main() -> None:
    result = asyncio.run(run(Load(**json.loads(os.environ["LOAD"]))))
    print(json.dumps({"event": "ended", **asdict(result)}), flush=True)


if __name__ == "__main__":
    main()
