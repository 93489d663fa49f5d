"""`tandem generate` and `tandem chat`."""

import asyncio
from collections.abc import Sequence

from rich.console import Console

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from tandem.client import Client, Message
from tandem.receipts import describe, stage_table


def make_sampling(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: Sequence[str] | None,
) -> pb.Sampling:
    """What was given; the router fills in the rest. Raises InvalidRequest for numbers no message can hold."""
    try:
        return pb.Sampling(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or ()
        )
    except ValueError as error:
        raise InvalidRequest("sampling", str(error)) from None


async def stream_text(console: Console, address: str, prompt: str, sampling: pb.Sampling, receipt: bool) -> None:
    async with Client(address) as client:
        finish: pb.Finish | None = None
        async for piece in client.generate(prompt, sampling=sampling):
            console.print(piece.text, end="", markup=False, soft_wrap=True)
            finish = piece.finish if piece.HasField("finish") else finish
        console.print()
        _show(console, finish, receipt)


async def chat_loop(console: Console, address: str, system: str, sampling: pb.Sampling, receipt: bool) -> None:
    messages: list[Message] = [("system", system)] if system else []
    async with Client(address) as client:
        while line := await _ask(console):
            messages.append(("user", line))
            answer = ""
            finish: pb.Finish | None = None
            async for piece in client.generate(messages=messages, sampling=sampling):
                answer += piece.text
                console.print(piece.text, end="", markup=False, soft_wrap=True)
                finish = piece.finish if piece.HasField("finish") else finish
            console.print()
            messages.append(("assistant", answer))
            _show(console, finish, receipt)


async def _ask(console: Console) -> str:
    try:
        return await asyncio.to_thread(console.input, "[bold]you>[/bold] ")
    except EOFError:
        return ""


def _show(console: Console, finish: pb.Finish | None, receipt: bool) -> None:
    if receipt and finish is not None:
        console.print(describe(finish.receipt))
        console.print(stage_table(finish.receipt))
