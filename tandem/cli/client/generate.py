"""`tandem generate`: completions of one prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from protos import inference_pb2 as pb
from tandem.cli.receipts import show_receipt
from tandem.client import Target


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
