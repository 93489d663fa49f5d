"""A partition between the two servers of vLLM's own pair, after the prompt and before the transfer of its KV.

Both servers see their clients all the time. Tandem's partitions are measured by `make bench-pods` and `make test-pods`.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.compare.systems import VLLM, CannotRun
from bench.support.namespaces import Namespace, Namespaces, missing
from bench.vllm.faults import OUTPUT, STOPPED_S, Outcome, Rounds
from bench.vllm.faulty import Vllm

ROUNDS = 5


async def partitioned(side: Vllm, spaces: Sequence[Namespace], prompt: Sequence[int]) -> str:
    """Return the text of a request whose servers do not see each other for STOPPED_S from the end of its prompt."""
    loop = asyncio.get_running_loop()

    def part(_: dict[str, Any]) -> None:
        for one, other in (spaces, spaces[::-1]):
            one.drop_from([other.ip])
            loop.call_later(STOPPED_S, one.drop_from, ())

    return "".join([text async for _, text in side.pair.stream(prompt, OUTPUT, between=part)])


async def measure(cores: Sequence[int], scratch: Path, console: Console) -> dict[str, Any]:
    """Measure the pair. Raises CannotRun where namespaces or vLLM are missing."""
    if reason := missing() or ("" if VLLM.exists() else f"{VLLM.name} is not installed"):
        raise CannotRun(reason)
    outcome, seconds, loop = Outcome(), list[float](), asyncio.get_running_loop()
    with Namespaces() as made:
        spaces = [made.add("prefill"), made.add("decode")]
        named = dict(zip(("prefill", "decode"), spaces, strict=True))
        async with Vllm(VLLM, cores, scratch / "partition", named) as side:
            rounds = Rounds(side)
            for _ in range(ROUNDS):
                prompt = rounds.prompt()
                expected = await rounds.expected(prompt)
                began_at = loop.time()
                await rounds.judged(asyncio.ensure_future(partitioned(side, spaces, prompt)), expected, outcome)
                seconds.append(loop.time() - began_at)
                await asyncio.sleep(max(0.0, began_at + STOPPED_S + 5 - loop.time()))
    console.print("vllm, partition:", outcome, seconds)
    return {"vllm": outcome.summary() | {"seconds": seconds}}
