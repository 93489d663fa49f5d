"""Structured output on the torch engine: random weights keep to any grammar, and a replay changes nothing."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.backends.torch.sampling.sampler import sample
from engine.core_types import EngineSequence, FinishReason, SamplingParams, StepBudget, StructuredOutput
from engine.messages.from_engine import Failed, Token
from engine.model.model_dir import ModelDir
from engine.sampling.grammar import Grammars
from support.checked_core import of_kinds
from support.long_runs import mostly_long
from support.torch_engine import TorchEngine, ids, request
from support.torch_models import copy_with, runner_of

VOCAB = 500
"""Of the model; the tokenizer has fewer."""
EOS = (0, 1)
PROMPT = (2, 65, 66, 67, 70)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", "größer"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
CHOICES = ("red", "green", 'a "b" \\ (c|d).*', "naïve\n", "red and more")


def _keeps_to_schema(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "age", "kind", "tags"]
    assert len(value["name"]) <= 6
    assert 0 <= value["age"] <= 150
    assert value["kind"] in ("cat", "dog", "größer")
    return len(value["tags"]) <= 3 and all(isinstance(tag, bool) for tag in value["tags"])


Case = tuple[StructuredOutput, Callable[[str], object]]
CASES: dict[str, Case] = {
    "json_schema": (StructuredOutput("json_schema", (json.dumps(SCHEMA),)), _keeps_to_schema),
    "json_object": (StructuredOutput("json_object", ()), lambda text: isinstance(json.loads(text), dict)),
    "regex": (
        StructuredOutput("regex", (r"[a-f]{2,9}(/[0-9]+)?",)),
        lambda text: re.fullmatch(r"[a-f]{2,9}(/[0-9]+)?", text),
    ),
    "grammar": (
        StructuredOutput("grammar", ('start: sum\nsum: NUM | sum "+" NUM | "(" sum ")"\nNUM: /[0-9]{1,3}/',)),
        lambda text: re.fullmatch(r"[0-9+()]+", text) and text.count("(") == text.count(")"),
    ),
    "choice": (StructuredOutput("choice", CHOICES), lambda text: text in CHOICES),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a tokenizer of bytes and some pairs, two end tokens, and logits beyond the tokenizer's tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("structured") / "random"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=list(EOS),
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>", "<turn>", "<begin>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(SCHEMA), '{"name": "true", "kind": "cat", "x": [true, false]}'], trainer)
    assert tokenizer.get_vocab_size() < VOCAB
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def text_of(model: Path) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))


def engine_of(model: Path, num_blocks: int | None = None) -> TorchEngine:
    return TorchEngine(runner_of(model, num_blocks=num_blocks), StepBudget(256, 64), reserve_output_tokens=16)


@pytest.fixture
def engine(model: Path) -> TorchEngine:
    return engine_of(model)


def ask(engine: TorchEngine, **requests: tuple[SamplingParams, tuple[int, ...]]) -> dict[str, list[Token]]:
    """Each with what was emitted before; the tokens of each."""
    asked = (request(name, PROMPT, sampling, emitted) for name, (sampling, emitted) in requests.items())
    said = engine.ask(*asked)
    return {name: said.get((name, 0), []) for name in requests}


def failures(engine: TorchEngine) -> dict[str, Failed]:
    """Of those that it was asked last."""
    return {message.request_id: message for message in of_kinds(engine.said, Failed)}


def params(name: str, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "structured": CASES[name][0]} | options)


@pytest.mark.parametrize("name", mostly_long(CASES, "json_schema", "choice"))
def test_whatever_finishes_keeps_to_the_grammar(engine: TorchEngine, text_of: Any, name: str) -> None:
    """Random weights at temperature 1, and hotter, and sharper: no sample breaks the grammar, and some finish."""
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 2.0},
        {"temperature": 0.3, "top_p": 0.8, "top_k": 20},
        {"min_p": 0.2, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.5},
        {"logit_bias": tuple((token_id, 100.0) for token_id in range(200, VOCAB))},
    ]
    requests = {
        f"{seed}-{number}": (params(name, seed=seed, **chosen), ())
        for seed in range(8)
        for number, chosen in enumerate(options)
    }
    finished = 0
    for tokens in ask(engine, **requests).values():
        assert all(token.token_id not in EOS for token in tokens[:-1])
        if tokens[-1].finish is FinishReason.STOP:
            assert tokens[-1].token_id in EOS
            assert CASES[name][1](text_of(ids(tokens)))
            finished += 1
        else:
            assert len(tokens) == 120
    assert finished >= 5
    assert failures(engine) == {}


@pytest.mark.parametrize("name", CASES)
def test_a_replay_from_any_token_goes_on_the_same(engine: TorchEngine, model: Path, name: str) -> None:
    """As after a failover: another engine is given the tokens so far, and says what the first one said after them."""
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "frequency_penalty": 0.4, "logprobs": 2, "min_tokens": 3}
    sampling = params(name, **options | {"max_tokens": 60})
    whole = ask(engine, whole=(sampling, ()))["whole"]
    other = engine_of(model)
    cuts = {f"cut-{cut}": (sampling, tuple(ids(whole[:cut]))) for cut in range(len(whole))}
    for cut, rest in enumerate(ask(other, **cuts).values()):
        assert ids(rest) == ids(whole[cut:])
        assert rest[-1].finish is whole[-1].finish


def test_preemption_changes_nothing(engine: TorchEngine, model: Path) -> None:
    """In a pool of 20 blocks eight requests, of up to eight blocks each, are computed anew again and again."""
    requests = {
        f"{name}-{seed}": (params(name, seed=seed), ()) for name in ("json_object", "grammar") for seed in range(4)
    }
    expected = {name: ids(tokens) for name, tokens in ask(engine, **requests).items()}
    small = engine_of(model, num_blocks=20)
    got = ask(small, **requests)
    assert {name: ids(tokens) for name, tokens in got.items()} == expected
    accounts = [token.account for tokens in got.values() for token in tokens if token.account is not None]
    assert any(account.preemptions for account in accounts)


def test_states_are_made_from_tokens_alone(model: Path) -> None:
    """A sequence known from its beginning, and one seen for the first time, at every length."""
    (token_ids,) = [row.token_ids[len(PROMPT) :] for row in _written(model, 1)]
    structured = CASES["json_schema"][0]
    known, grammars = _sequence(structured), Grammars(ModelDir.open(model))
    for token_id in token_ids:
        before = grammars.masks([known])
        again = Grammars(ModelDir.open(model)).masks([_sequence(structured, tuple(known.output_token_ids))])
        assert (before.bits == again.bits).all()
        assert before.bits[0][token_id // 32] >> token_id % 32 & 1
        known.token_ids.append(token_id)
    assert len(grammars.states) == 1
    del known
    assert len(grammars.states) == 0, "a state lives no longer than its sequence"


def _sequence(structured: StructuredOutput | None, output: tuple[int, ...] = (), **options: Any) -> EngineSequence:
    sampling = SamplingParams(**{"max_tokens": 300, "structured": structured} | options)
    return EngineSequence("r", [*PROMPT, *output], len(PROMPT), b"", 0, 0, sampling=sampling)


def _written(model: Path, count: int, **options: Any) -> list[EngineSequence]:
    """Sequences with some tokens of a schema's output, of random logits."""
    grammars, generator = Grammars(ModelDir.open(model)), torch.Generator().manual_seed(3)
    rows = [_sequence(CASES["json_schema"][0], seed=seed, **options) for seed in range(count)]
    for _ in range(12):
        logits = torch.randn(count, VOCAB, generator=generator)
        for row, token in zip(rows, sample(logits, rows, frozenset(EOS), grammars), strict=True):
            row.token_ids.append(token.token_id)
    return rows


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 3},
    {"min_p": 0.5},
    {"temperature": 1.5, "repetition_penalty": 1.8, "presence_penalty": 1.0, "top_k": 40},
    {"logit_bias": tuple((token_id, 50.0) for token_id in range(0, VOCAB, 2)), "top_p": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_it_is_sampling_with_the_forbidden_tokens_impossible(model: Path, options: dict[str, Any]) -> None:
    """Each option does to the allowed tokens what it does without a grammar to logits that leave out the others."""
    grammars, logits = (
        Grammars(ModelDir.open(model)),
        torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)),
    )
    rows = [
        replace(row, sampling=_params(row)._replace(**options, logprobs=3), token_ids=row.token_ids[: len(PROMPT) + n])
        for n, row in enumerate(_written(model, 8))
        for _ in range(8)
    ]
    for seed, row in enumerate(rows):
        row.sampling = _params(row)._replace(seed=seed)
    masks = grammars.masks(rows)
    allowed = torch.from_numpy(masks.bits)[:, :, None] >> torch.arange(32) & 1
    masked = logits.masked_fill(allowed.flatten(1)[:, :VOCAB] == 0, -torch.inf)
    plain = [replace(row, sampling=_params(row)._replace(structured=None)) for row in rows]
    got = sample(logits, rows, frozenset(EOS), grammars)
    assert [token.token_id for token in got] == [token.token_id for token in sample(masked, plain, frozenset(EOS))]
    for row, token in enumerate(got):  # but log probabilities are the model's own
        own = logits[row].log_softmax(-1)
        assert token.logprobs.logprob == pytest.approx(float(own[token.token_id]), abs=1e-5)
        assert token.logprobs.top_token_ids == tuple(own.topk(3).indices.tolist())


def _params(sequence: EngineSequence) -> SamplingParams:
    assert sequence.sampling is not None
    return sequence.sampling


def test_no_end_and_no_padding_where_the_output_is_not_complete(model: Path) -> None:
    """However likely the model finds them: 500 draws at the edge of a value, where an end would be easy to let in."""
    grammars, tokenizer = Grammars(ModelDir.open(model)), Tokenizer.from_file(str(model / "tokenizer.json"))
    logits = torch.zeros(500, VOCAB)
    logits[:, list(EOS)] = 50.0
    logits[:, tokenizer.get_vocab_size() :] = 50.0
    half = tuple(tokenizer.encode('{"name": "x", "age": 1').ids)
    rows = [_sequence(CASES["json_schema"][0], half, seed=seed) for seed in range(500)]
    drawn = {token.token_id for token in sample(logits, rows, frozenset(EOS), grammars)}
    assert len(drawn) > 5
    assert max(drawn) < tokenizer.get_vocab_size()
    assert not drawn & set(EOS)


def test_rows_without_a_grammar_are_as_if_alone(engine: TorchEngine, model: Path) -> None:
    plain = {f"plain-{seed}": (SamplingParams(max_tokens=30, seed=seed, ignore_eos=True), ()) for seed in range(6)}
    alone = {name: ids(tokens) for name, tokens in ask(engine, **plain).items()}
    other = engine_of(model)
    company = {name: (params(name, seed=3, max_tokens=25), ()) for name in CASES}
    together = ask(other, **plain, **company)
    assert {name: ids(together[name]) for name in plain} == alone


def test_a_finished_grammar_ends_the_request_whatever_holds_ends_back(engine: TorchEngine, text_of: Any) -> None:
    word = StructuredOutput("regex", ("abc",))
    letters = StructuredOutput("regex", ("[a-c]+",))
    got = ask(
        engine,
        early=(SamplingParams(max_tokens=20, structured=word, min_tokens=15), ()),
        ignoring=(SamplingParams(max_tokens=20, structured=word, ignore_eos=True), ()),
        both=(SamplingParams(max_tokens=20, structured=word, ignore_eos=True, min_tokens=15), ()),
        biased=(SamplingParams(max_tokens=20, structured=word, logit_bias=((0, -100.0), (1, -100.0))), ()),
        # While anything else may follow, they hold.
        open_early=(SamplingParams(max_tokens=60, structured=letters, min_tokens=15), ()),
        open_ignoring=(SamplingParams(max_tokens=60, structured=letters, ignore_eos=True), ()),
        open_biased=(SamplingParams(max_tokens=60, structured=letters, logit_bias=((1, 100.0),)), ()),
    )
    for name in ("early", "ignoring", "both", "biased"):
        assert text_of(ids(got[name])) == "abc"
        assert got[name][-1].finish is FinishReason.STOP
    assert len(got["open_early"]) > 15
    assert len(got["open_ignoring"]) == 60
    assert got["open_ignoring"][-1].finish is FinishReason.LENGTH
    assert [token.finish for token in got["open_biased"]][1:] == [FinishReason.STOP], "one letter, then the end"


def test_stop_tokens_of_the_request_end_it_too(engine: TorchEngine, model: Path, text_of: Any) -> None:
    b = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("b")
    letters = StructuredOutput("regex", ("[ab]+",))
    sampling = SamplingParams(max_tokens=60, structured=letters, stop_token_ids=frozenset({b}), ignore_eos=True)
    tokens = ask(engine, one=(sampling, ()))["one"]
    assert set(text_of(ids(tokens[:-1]))) <= {"a"}
    assert (tokens[-1].token_id, tokens[-1].finish) == (b, FinishReason.STOP)


BROKEN = {
    "regex": StructuredOutput("regex", ("(a",)),
    "json_schema": StructuredOutput("json_schema", ('{"type": "nothing"}',)),
    "not JSON": StructuredOutput("json_schema", ("{",)),
    "nested JSON": StructuredOutput("json_schema", ('{"items":' * 20_000,)),
    "grammar": StructuredOutput("grammar", ("start: missing",)),
    "no end": StructuredOutput("grammar", ('start: a\na: "x" a',)),
    "ambiguous": StructuredOutput("grammar", ("start: " + "|".join(["b"] * 3000) + '\nb: "x" b | "y"',)),
}


def test_what_fails_fails_alone(engine: TorchEngine, text_of: Any) -> None:
    """Grammars no router would have let through, and ones that turn out too complex: the others go on."""
    rows = {name: (params(name, seed=5), ()) for name in ("choice", "regex", "json_schema")}
    expected = {name: ids(tokens) for name, tokens in ask(engine, **rows).items()}
    broken = {
        f"broken {name}": (SamplingParams(max_tokens=50, structured=structured), ())
        for name, structured in BROKEN.items()
    }
    foreign = {"foreign": (params("regex"), (300, 301))}
    got = ask(engine, **broken, **rows, **foreign)
    assert {name: ids(got[name]) for name in rows} == expected
    failed_of = failures(engine)
    assert set(failed_of) == {*broken, *foreign}
    for name, failed in failed_of.items():
        assert failed.failure.field.startswith("sampling.structured."), name
        assert 0 < len(failed.failure.reason) < 400, name
    assert "unclosed group" in failed_of["broken regex"].failure.reason


def test_rules_thousands_deep_do_not_overflow_the_stack(engine: TorchEngine, text_of: Any) -> None:
    rules = "".join(f"a{number}: a{number + 1}\n" for number in range(4000))
    structured = StructuredOutput("grammar", (f'start: a0\n{rules}a4000: "deep"',))
    tokens = ask(engine, deep=(SamplingParams(max_tokens=20, structured=structured), ()))["deep"]
    assert text_of(ids(tokens)) == "deep"


@pytest.mark.parametrize("lacking", ["tokenizer", "end token"])
def test_a_model_that_can_have_none_refuses_each_request(model: Path, tmp_path: Path, lacking: str) -> None:
    path = copy_with(model, tmp_path / "lacking", **({"eos_token_id": None} if lacking == "end token" else {}))
    (path / ("tokenizer.json" if lacking == "tokenizer" else "generation_config.json")).unlink()
    engine = engine_of(path)
    got = ask(engine, structured=(params("choice"), ()), plain=(SamplingParams(max_tokens=4, ignore_eos=True), ()))
    assert len(got["plain"]) == 4
    failed = failures(engine)["structured"]
    assert failed.failure.field == "sampling.structured"
    assert f"no {lacking}" in failed.failure.reason
