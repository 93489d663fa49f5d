"""Several choices and beams with a real model, in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.core_types import BeamParams, FinishReason, SamplingParams, StepBudget
from engine.messages.from_engine import Token
from support.torch_engine import TorchEngine, ids, request
from support.torch_models import random_prompts, runner_of

(PROMPT,) = random_prompts(37, seed=9)
SAMPLING = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=5, logprobs=2)
ENDS = frozenset({17, 301, 402})


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
            assert one.logprobs is not None
            assert other.logprobs is not None
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


# ------------------------------------------------------------------------------------------------- beams


def reference(path: Path, prompt: tuple[int, ...], sampling: SamplingParams) -> list[tuple[list[int], float]]:
    """What transformers finds: tokens, and score."""
    assert sampling.beam is not None
    model = AutoModelForCausalLM.from_pretrained(path)
    input_ids = torch.tensor([prompt])
    config = GenerationConfig(
        max_new_tokens=sampling.max_tokens,
        num_beams=sampling.beam.width,
        num_return_sequences=sampling.n,
        do_sample=False,
        length_penalty=sampling.beam.length_penalty,
        early_stopping=sampling.beam.early_stopping,
        eos_token_id=sorted(sampling.stop_token_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    out = model.generate(input_ids, generation_config=config, attention_mask=torch.ones_like(input_ids))
    found = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((place for place, token_id in enumerate(row) if token_id in sampling.stop_token_ids), len(row) - 1)
        found.append((row[: end + 1], score))
    return found


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize(("width", "n", "penalty"), [(2, 1, 1.0), (2, 2, 1.0), (4, 3, 0.0), (5, 5, 2.0), (3, 2, -1.0)])
def test_beams_are_those_of_transformers(
    tiny_model: Path, width: int, n: int, penalty: float, early_stopping: bool
) -> None:
    engine = engine_of(tiny_model)
    stopped = 0
    for seed, length in enumerate((1, 15, 16, 17, 40)):
        (prompt,) = random_prompts(length, seed=seed)
        likely = ask(engine, SamplingParams(max_tokens=6, temperature=0), prompt)[0]
        ends = ENDS | {likely[3].token_id}  # so that some do end before max_tokens
        beam = BeamParams(width, penalty, early_stopping)
        sampling = SamplingParams(max_tokens=12, temperature=0, n=n, beam=beam, stop_token_ids=ends)
        expected = reference(tiny_model, prompt, sampling)
        got = ask(engine, sampling, prompt)
        assert [ids(got[rank]) for rank in range(n)] == [token_ids for token_ids, _ in expected]
        for rank, (token_ids, score) in enumerate(expected):
            last = got[rank][-1]
            assert last.cumulative_logprob is not None
            assert last.cumulative_logprob / len(token_ids) ** penalty == pytest.approx(score, abs=1e-4)
            assert (last.finish is FinishReason.STOP) == (token_ids[-1] in ends)
            stopped += last.finish is FinishReason.STOP
    assert stopped > 0


def test_beams_in_a_tiny_pool(tiny_model: Path) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0, n=2, beam=BeamParams(4))
    expected = ask(engine_of(tiny_model), sampling)
    engine = engine_of(tiny_model, num_blocks=2 + 4 * 3)
    engine.send(request("other", PROMPT[1:18], SAMPLING._replace(max_tokens=180), priority=1))
    for _ in range(90):
        engine.step()
    got = ask(engine, sampling)
    assert engine.num_preemptions > 0
    assert [ids(got[rank]) for rank in range(2)] == [ids(expected[rank]) for rank in range(2)]
