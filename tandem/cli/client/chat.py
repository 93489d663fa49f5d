"""`tandem chat`, and the options that it shares with `tandem generate`.

`tandem generate`: completions of one prompt.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from tandem.cli.tables import show_receipt
from tandem.client import Message, Target
from tandem.client.options import Part, picture


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


@dataclass(slots=True)
class _Choice:
    text: str = ""
    logprobs: list[tuple[int, pb.TokenLogprobs]] = field(default_factory=list)
    finish: pb.Finish | None = None


async def stream_text(
    console: Console, target: Target, prompt: str, sampling: pb.Sampling, receipt: bool, **options: Any
) -> None:
    """Print one completion as it comes; of several, each as a whole, in order.

    `options` has further options of Client.generate.
    """
    choices = {index: _Choice() for index in range(sampling.n if sampling.HasField("n") else 1)}
    alone = len(choices) == 1
    prompt_logprobs: list[pb.TokenLogprobs] = []
    last: pb.Finish | None = None
    async with target.client() as client:
        async for piece in client.generate(prompt, sampling=sampling, **options):
            prompt_logprobs += piece.prompt_logprobs
            choice = choices.setdefault(piece.index, _Choice())
            choice.text += piece.text
            # empty when no log probabilities were requested
            choice.logprobs += zip(piece.token_ids, piece.logprobs, strict=False)
            if piece.HasField("finish"):
                choice.finish = last = piece.finish
            if alone:
                console.print(piece.text, end="", markup=False, soft_wrap=True)
    for index, choice in choices.items():
        if not alone:
            console.print(Rule(_title(index, choice), align="left"))
            console.print(choice.text, end="", markup=False, soft_wrap=True)
        console.print()
        if choice.logprobs:
            console.print(_logprob_table(choice.logprobs))
    if prompt_logprobs:
        console.print(_prompt_table(prompt_logprobs))
    show_receipt(console, last, receipt)


def _title(index: int, choice: _Choice) -> str:
    finish = choice.finish
    if finish is None:
        return str(index)
    reason = "max tokens" if finish.reason == pb.FINISH_REASON_LENGTH else "stopped"
    return f"{index}  {reason}  {finish.usage.completion_tokens} tokens"


def _logprob_table(logprobs: Sequence[tuple[int, pb.TokenLogprobs]]) -> Table:
    table = Table("token", "logprob", "likeliest", box=None)
    for token_id, of in logprobs:
        table.add_row(str(token_id), f"{of.logprob:.3f}", _likeliest(of))
    return table


def _prompt_table(logprobs: Sequence[pb.TokenLogprobs]) -> Table:
    table = Table("of the prompt", "logprob", "likeliest", box=None)
    for position, of in enumerate(logprobs, start=1):
        table.add_row(str(position), f"{of.logprob:.3f}", _likeliest(of))
    return table


def _likeliest(of: pb.TokenLogprobs) -> str:
    return "  ".join(f"{token} {value:.3f}" for token, value in zip(of.top_token_ids, of.top_logprobs, strict=True))
