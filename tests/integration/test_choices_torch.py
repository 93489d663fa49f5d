"""Several choices with a real model, in one process."""

from pathlib import Path
from typing import Any

import pytest

from engine.core_types import SamplingParams, StepBudget
from engine.messages.from_engine import Token
from support.torch_engine import TorchEngine, ids, request
from support.torch_models import random_prompts, runner_of

(PROMPT,) = random_prompts(37, seed=9)
SAMPLING = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=5, logprobs=2)


def engine_of(path: Path, num_blocks: int | None = None) -> TorchEngine:
    return TorchEngine(runner_of(path, num_blocks=num_blocks), StepBudget(48, 24))


def ask(
    engine: TorchEngine, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT, **fields: Any
) -> dict[int, list[Token]]:
    """By choice."""
    said = engine.ask(request("r", prompt, sampling, **fields))
    return {choice: tokens for (request_id, choice), tokens in said.items() if request_id == "r"}


def test_each_choice_is_a_request_of_its_own_with_that_key(tiny_model: Path) -> None:
    """Drawn one after the other, each beside finished ones, and at once from one prompt: the same."""
    engine = engine_of(tiny_model)
    together = ask(engine, SAMPLING._replace(n=4))
    assert ids(together[0]) == ids(ask(engine, SAMPLING)[0])
    assert len({tuple(ids(tokens)) for tokens in together.values()}) == 4
    for choice in range(1, 4):
        others = frozenset(range(4)) - {choice}
        alone = ask(engine_of(tiny_model), SAMPLING._replace(n=4), finished=others)
        assert list(alone) == [choice]
        assert ids(alone[choice]) == ids(together[choice])
        for one, other in zip(alone[choice], together[choice], strict=True):
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


@pytest.mark.parametrize("length", [1, 16, 17, 33])
def test_a_tiny_pool_changes_nothing(tiny_model: Path, length: int) -> None:
    sampling = SAMPLING._replace(n=3, max_tokens=30)
    expected = ask(engine_of(tiny_model), sampling, PROMPT[:length])
    shared = (length - 1) // 16
    fewest = shared + 3 * (-(-(length + 30) // 16) - shared)
    engine = engine_of(tiny_model, num_blocks=fewest + 1)
    engine.send(request("other", PROMPT[1:18], SAMPLING._replace(max_tokens=60), priority=1))
    got = ask(engine, sampling, PROMPT[:length])
    assert engine.num_preemptions > 0
    assert [ids(got[choice]) for choice in range(3)] == [ids(expected[choice]) for choice in range(3)]


def test_what_was_emitted_is_gone_on_with(tiny_model: Path) -> None:
    whole = ask(engine_of(tiny_model), SAMPLING._replace(n=3))
    cuts = (3, 0, 11)
    emitted = [tuple(ids(whole[choice])[:cut]) for choice, cut in enumerate(cuts)]
    engine = engine_of(tiny_model)
    ask(engine, SAMPLING)  # what choice 0 emitted is cached beyond what the choices share
    rest = ask(engine, SAMPLING._replace(n=3), emitted=emitted[0], emitted_others=tuple(emitted[1:]))
    for choice, cut in enumerate(cuts):
        assert ids(rest[choice]) == ids(whole[choice])[cut:]
