"""`tandem chat`, and the options that it shares with `tandem generate`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from tandem.cli.receipts import show_receipt
from tandem.client import Message, Target
from tandem.client.parts import Part, picture


def make_sampling(**options: Any) -> pb.Sampling:
    """Return the given fields as `pb.Sampling`; the router fills in the rest.

    Raises InvalidRequest for numbers that no message can hold.
    """
    try:
        return pb.Sampling(**{name: value for name, value in options.items() if value is not None})
    except ValueError as error:
        raise InvalidRequest("sampling", str(error)) from None


def make_structured(**options: Any) -> pb.StructuredOutput | None:
    """Return the given fields as `pb.StructuredOutput`, or None without any.

    A schema or grammar "@file" is read from that file. Raises InvalidRequest for a file that cannot be read.
    """
    texts = {name: _text_of(name, value) for name, value in options.items() if value is not None}
    return pb.StructuredOutput(**texts) if texts else None


def parse_logit_bias(biases: Sequence[str] | None) -> dict[int, float]:
    """Parse TOKEN=BIAS.

    Raises InvalidRequest.
    """
    parsed: dict[int, float] = {}
    for bias in biases or ():
        token_id, _, value = bias.partition("=")
        try:
            parsed[int(token_id)] = float(value)
        except ValueError:
            raise InvalidRequest("sampling.logit_bias", f"must be TOKEN=BIAS, not {bias!r}") from None
    return parsed


def _text_of(name: str, value: Any) -> Any:
    if name not in ("json_schema", "grammar") or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"sampling.structured.{name}", f"cannot be read: {error}") from None


async def chat_loop(
    console: Console,
    target: Target,
    system: str,
    sampling: pb.Sampling,
    receipt: bool,
    model: str,
    pictures: Sequence[str] = (),
) -> None:
    """Talk until an empty line; `pictures`, paths or URLs, go with the first message."""
    shown: list[Part] = [picture(each) for each in pictures]
    messages: list[Message] = [("system", system)] if system else []
    async with target.client() as client:
        while line := await _ask(console):
            messages.append(("user", [*shown, line] if shown else line))
            shown = []
            answer = ""
            finish: pb.Finish | None = None
            async for piece in client.generate(messages=messages, sampling=sampling, model=model):
                answer += piece.text
                console.print(piece.text, end="", markup=False, soft_wrap=True)
                finish = piece.finish if piece.HasField("finish") else finish
            console.print()
            messages.append(("assistant", answer))
            show_receipt(console, finish, receipt)


async def _ask(console: Console) -> str:
    try:
        return await asyncio.to_thread(console.input, "[bold]you>[/bold] ")
    except EOFError:
        return ""
