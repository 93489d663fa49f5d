"""The torch engine alone, in this process: requests go in, and what is said of each choice comes out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.backends.torch.runner import TorchRunner
from engine.core.loan_host import EngineLimits
from engine.core_types import SamplingParams, StepBudget
from engine.messages.from_engine import Token
from engine.messages.to_engine import Generate
from kvtransfer.local import LocalNetwork, LocalTransport
from support.checked_core import NOTHING_LEFT, CheckedCore

BUDGET = StepBudget(96, 24)
Said = dict[tuple[str, int], list[Token]]
"""Tokens by request and choice."""


class TorchEngine(CheckedCore):
    """Nobody lends to it. Its books are checked after every step, and when nobody is served any more."""

    def __init__(self, runner: TorchRunner, budget: StepBudget = BUDGET, reserve_output_tokens: int = 1) -> None:
        """By default requests are admitted without regard to what they will say: where blocks are few, they are
        preempted."""
        self.runner = runner
        limits = EngineLimits(budget, reserve_output_tokens=reserve_output_tokens)
        super().__init__(runner, LocalTransport(LocalNetwork(), "one"), limits)

    def ask(self, *requests: Generate) -> Said:
        """Serve them all, beside whom it serves already: what is said of each choice meanwhile. One that fails at once
        has no entry. `said` holds all messages, until the next `ask`."""
        self.said.clear()
        self.send(*requests)
        self.run()
        assert self.held() == NOTHING_LEFT
        said: Said = {}
        for message in self.said:
            if isinstance(message, Token):
                said.setdefault((message.request_id, message.choice), []).append(message)
        return said

    @property
    def num_preemptions(self) -> int:
        """Since it was started."""
        return self.core.requests.running_set.num_preemptions


def request(
    request_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    emitted: Sequence[int] = (),
    priority: int = 0,
    **fields: Any,
) -> Generate:
    return Generate(request_id, tuple(prompt), tuple(emitted), sampling, "", priority, lender=None, **fields)


def requests(
    prompts: Iterable[Sequence[int]],
    sampling: SamplingParams,
    emitted: Mapping[tuple[str, int], Sequence[int]] | None = None,
) -> list[Generate]:
    """One for each prompt, named "0", "1" and so on, of two priorities in turn."""
    before = emitted or {}
    return [
        request(str(number), prompt, sampling, before.get((str(number), 0), ()), number % 2)
        for number, prompt in enumerate(prompts)
    ]


def ids(tokens: Iterable[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def all_ids(said: Said) -> dict[tuple[str, int], list[int]]:
    return {key: ids(tokens) for key, tokens in said.items()}
