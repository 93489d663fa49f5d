"""Load of the suite, a program in a pod of the cluster: `python load.py`, with its settings in LOAD as JSON.

Streams are repeated until SIGTERM; each answer is compared with the first one to its prompt. The program prints a line
of JSON when the load begins, and one when it has ended. It uses only what the routers' image contains.
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
    """Number of whole answers that were held against the first one to their prompt."""
    different: int = 0
    """Number of answers with other tokens than that one, or fewer or more tokens than asked for."""
    lost: int = 0
    longest_gap_s: float = 0.0
    """Longest time between two pieces of one stream, in seconds."""
    verified_blocks: int = 0
    errors: list[str] = field(default_factory=list)

    def check_killed(self, load: Load) -> None:
        """Check that a router's death ended no more than the streams it had, each by name, and that others went on."""
        assert self.lost <= load.streams, self.errors
        assert all(error.startswith("Unavailable") for error in self.errors), self.errors
        assert self.different == 0
        assert self.compared > 0


async def run(load: Load) -> Result:
    """Send the load until it is told to stop."""
    result, stop = Result(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tls = ClientIdentity(Path(load.ca)) if load.ca else None
    async with Client(load.address, api_key=load.api_key, tls=tls) as client:
        first = [await answer(client, load, number, "first", result) for number in range(load.prompts)]
        print(json.dumps({"event": "begun"}), flush=True)
        if load.once:
            return result

        async def repeat(stream: int) -> None:
            number = stream
            while not stop.is_set():
                prompt = number % load.prompts
                tokens = await answer(client, load, prompt, f"{number}", result)
                if None not in (tokens, first[prompt]):
                    result.compared += 1
                    result.different += tokens != first[prompt]
                number += load.streams

        await asyncio.gather(*map(repeat, range(load.streams)))
    return result


async def answer(client: Client, load: Load, prompt: int, salt: str, result: Result) -> list[int] | None:
    """Return the tokens of one stream, with a cache of its own; None where it failed."""
    token_ids = [(prompt * 7919 + position * 31) % load.vocabulary for position in range(load.prompt_tokens)]
    sampling = pb.Sampling(max_tokens=load.tokens, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=token_ids, sampling=sampling, cache_salt=salt)
    tokens: list[int] = []
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
    except ServiceError as error:
        result.lost += 1
        result.errors = [*result.errors, f"{type(error).__name__}: {error}"][:ERRORS]
        await asyncio.sleep(0.2)  # a client that is refused at once does not turn in circles
        return None
    result.finished += 1
    if len(tokens) != load.tokens:
        result.different += 1
        return None
    return tokens


def main() -> None:
    result = asyncio.run(run(Load(**json.loads(os.environ["LOAD"]))))
    print(json.dumps({"event": "ended", **asdict(result)}), flush=True)


if __name__ == "__main__":
    main()
