"""From engine messages to the client's messages, the receipt included."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.errors import Overloaded, Unavailable
from engine.core_types import FinishReason, TokenLogprobs
from engine.messages.from_engine import PromptScored, Rejected, Token
from loans.account import KvAccount
from protos import decode_pb2 as internal_pb
from protos import inference_pb2 as pb
from worker.requests.output_stream import MAX_TOKENS_AT_ONCE, OutputStream

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def token(char: str, **fields: object) -> Token:
    return Token("r", ALPHABET.index(char), **fields)  # type: ignore[arg-type]


def request(**fields: object) -> internal_pb.DecodeRequest:
    sampling = pb.Sampling(max_tokens=9, seed=5, stop=fields.pop("stop", ()))  # type: ignore[arg-type]
    return internal_pb.DecodeRequest(
        request_id="r", prompt_token_ids=[ALPHABET.index("p")] * 20, sampling=sampling, **fields  # type: ignore[arg-type]
    )  # fmt: skip


def next_of(generation: OutputStream) -> pb.GenerateResponse:
    message = generation.take()
    assert message is not None
    return message


def messages_of(generation: OutputStream) -> list[pb.GenerateResponse]:
    return list(iter(generation.take, None))


ACCOUNT = KvAccount(
    reused_blocks=1,
    moved_blocks=3,
    computed_blocks=1,
    computed_tokens=4,
    moved_bytes=300,
    lender_cached_blocks=2,
    lender_computed_blocks=1,
    transport="nixl",
    lanes=("cma/memory",),
    times={"admitted": 1.0, "loan_opened": 1.0, "loan_closed": 1.5, "compute_started": 1.6, "first_token": 1.7},
)


def test_the_receipt_counts_guesses_of_all_choices(tokenizer: Tokenizer) -> None:
    two = request()
    two.sampling.n = 2
    generation = OutputStream(two, tokenizer, "d0", 4)
    generation.absorb(token("a", account=ACCOUNT, drafted=4))
    generation.absorb(token("b", followed_draft=True))
    generation.absorb(token("a", choice=1, drafted=3))
    generation.absorb(token("b", followed_draft=True, finish=FinishReason.STOP))
    generation.absorb(token("c", choice=1, finish=FinishReason.STOP))
    speculation = messages_of(generation)[-1].finish.receipt.speculation
    assert (speculation.draft_tokens, speculation.accepted_tokens) == (7, 2)


@pytest.mark.parametrize(("field", "reason"), [("speculation", FinishReason.STOP), ("price", FinishReason.LENGTH)])
def test_a_receipt_has_no_guesses_or_prices_where_there_are_none(
    tokenizer: Tokenizer, field: str, reason: FinishReason
) -> None:
    generation = OutputStream(request(), tokenizer, "d0", 4)
    generation.absorb(token("a", account=ACCOUNT, finish=reason))
    finish = next_of(generation).finish
    assert finish.HasField("receipt")
    assert not finish.receipt.HasField(field)


def test_tokens_that_came_together_leave_together(tokenizer: Tokenizer) -> None:
    generation = OutputStream(request(), tokenizer, "d0", 4)
    generation.absorb(token("a", account=ACCOUNT))
    generation.absorb(token("b", logprobs=TokenLogprobs(-0.5, (1,), (-0.5,))))
    message = next_of(generation)
    assert (message.text, len(message.token_ids), message.HasField("finish")) == ("ab", 2, False)
    assert message.logprobs[0].logprob == -0.5
    assert generation.take() is None


def test_the_last_message_has_usage_and_receipt(tokenizer: Tokenizer) -> None:
    generation = OutputStream(request(), tokenizer, "d0", 4)
    generation.absorb(token("a", account=ACCOUNT, finish=FinishReason.LENGTH))
    message = next_of(generation)
    assert generation.finished
    finish = message.finish
    assert finish.reason == pb.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens, finish.usage.cached_tokens) == (20, 1, 12)
    kv = finish.receipt.kv
    assert (kv.reused_blocks, kv.moved_blocks, kv.computed_blocks, kv.verified_blocks) == (1, 3, 1, 3)
    assert (kv.transport, list(kv.ucx_transports)) == ("nixl", ["cma/memory"])
    assert finish.receipt.seed == 5
    queue = next(stage for stage in finish.receipt.stages if stage.name == "decode queue")
    assert queue.duration_ms == pytest.approx(100)


def test_a_stop_string_ends_it_and_later_tokens_count_for_nothing(tokenizer: Tokenizer) -> None:
    generation = OutputStream(request(stop=["bc"]), tokenizer, "d0", 4)
    for char in "abc":
        generation.absorb(token(char))
    message = next_of(generation)
    assert (message.text, message.finish.reason, message.finish.stop_match) == ("a", pb.FINISH_REASON_STOP, "bc")
    assert message.finish.usage.completion_tokens == 3


def texts_of(generation: OutputStream, chars: str, finish: FinishReason) -> str:
    """Text of tokens of which the last one has a finish reason, each taken by itself."""
    text = ""
    for place, char in enumerate(chars, 1):
        generation.absorb(token(char, finish=finish if place == len(chars) else None))
        if (message := generation.take()) is not None:
            text += message.text
    assert generation.finished
    return text


@pytest.mark.parametrize("keeps_special", [False, True])
@pytest.mark.parametrize(("includes", "text"), [(False, "ab"), (True, "abc")])
def test_the_token_that_stops_is_text_only_on_demand(
    tokenizer: Tokenizer, keeps_special: bool, includes: bool, text: str
) -> None:
    asked = request()
    asked.sampling.stop_token_ids.append(ALPHABET.index("c"))
    asked.sampling.keep_special_tokens, asked.sampling.include_stop_str_in_output = keeps_special, includes
    assert texts_of(OutputStream(asked, tokenizer, "d0", 4), "abc", FinishReason.STOP) == text
    assert texts_of(OutputStream(asked, tokenizer, "d0", 4), "abc", FinishReason.LENGTH) == "abc"


@pytest.mark.parametrize("emitted_chars", range(3))
def test_a_stop_string_is_text_on_demand_also_after_a_failure(tokenizer: Tokenizer, emitted_chars: int) -> None:
    emitted = [ALPHABET.index(char) for char in "ab"]
    asked = request(stop=["bcd"], emitted_token_ids=emitted[:emitted_chars], emitted_chars=min(emitted_chars, 1))
    asked.sampling.include_stop_str_in_output = True
    generation = OutputStream(asked, tokenizer, "d0", 4)
    text, finish = "a" if emitted_chars else "", pb.Finish()
    for char in "abcd"[emitted_chars:]:
        generation.absorb(token(char))
        message = next_of(generation)
        text, finish = text + message.text, message.finish
    assert (text, finish.reason, finish.stop_match) == ("abcd", pb.FINISH_REASON_STOP, "bcd")


def test_a_second_attempt_sends_only_what_the_first_did_not(tokenizer: Tokenizer) -> None:
    emitted = [ALPHABET.index(char) for char in "xyz"]
    generation = OutputStream(request(emitted_token_ids=emitted, emitted_chars=2), tokenizer, "d0", 4)
    generation.absorb(token("w", finish=FinishReason.LENGTH))
    message = next_of(generation)
    assert message.text == "zw"
    assert [ALPHABET[token_id] for token_id in message.token_ids] == ["w"]
    assert message.finish.usage.completion_tokens == 4


@pytest.mark.parametrize(("permanent", "field"), [(True, "max_tokens"), (False, "")])
def test_a_rejection_is_typed(tokenizer: Tokenizer, permanent: bool, field: str) -> None:
    with pytest.raises(Overloaded) as caught:
        OutputStream(request(), tokenizer, "d0", 4).absorb(Rejected("r", "no room", permanent))
    assert (caught.value.permanent, caught.value.field) == (permanent, field)


def test_a_dead_engine_may_be_retried(tokenizer: Tokenizer) -> None:
    with pytest.raises(Unavailable):
        OutputStream(request(), tokenizer, "d0", 4).absorb(None)


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    generation = OutputStream(request(), None, "d0", 4)
    generation.absorb(token("a"))
    message = next_of(generation)
    assert (message.text, len(message.token_ids)) == ("", 1)


# ------------------------------------------------------------------------------------------- several choices


def choices_request(n: int, **fields: Any) -> internal_pb.DecodeRequest:
    made = request(**fields)
    made.sampling.n = n
    return made


def test_each_choice_has_messages_of_its_own_and_the_last_finish_the_receipt(tokenizer: Tokenizer) -> None:
    generation = OutputStream(choices_request(2), tokenizer, "d0", 4)
    generation.absorb(PromptScored("r", (TokenLogprobs(-1.5, (), ()),)))
    generation.absorb(token("a", account=ACCOUNT, choice=1))
    generation.absorb(token("b", finish=FinishReason.LENGTH))
    generation.absorb(token("c", choice=1))
    scored, one, other = messages_of(generation)
    assert [of.logprob for of in scored.prompt_logprobs] == [-1.5]
    assert (one.index, one.text, one.HasField("finish")) == (1, "ac", False)
    assert (other.index, other.text) == (0, "b")
    assert (other.finish.usage.completion_tokens, other.finish.usage.prompt_tokens) == (1, 0)
    assert not other.finish.HasField("receipt")
    assert not generation.finished
    generation.absorb(token("d", finish=FinishReason.STOP, choice=1))
    (last,) = messages_of(generation)
    assert (last.index, last.finish.usage.completion_tokens, last.finish.usage.prompt_tokens) == (1, 3, 20)
    assert last.finish.receipt.kv.moved_blocks == 3
    assert generation.finished


def test_the_last_finish_is_the_last_message(tokenizer: Tokenizer) -> None:
    generation = OutputStream(choices_request(3), tokenizer, "d0", 4)
    generation.absorb(token("a", choice=0))
    generation.absorb(token("b", choice=2, finish=FinishReason.STOP))
    generation.absorb(token("c", choice=1, finish=FinishReason.STOP))
    generation.absorb(token("d", choice=0, finish=FinishReason.STOP))
    heard = messages_of(generation)
    assert [message.index for message in heard] == [2, 1, 0]
    assert [message.finish.HasField("receipt") for message in heard] == [False, False, True]


def test_a_stop_string_ends_one_choice_and_the_engine_is_to_be_told(tokenizer: Tokenizer) -> None:
    generation = OutputStream(choices_request(2, stop=["bc"]), tokenizer, "d0", 4)
    for char in "abc":
        generation.absorb(token(char, choice=1))
    generation.absorb(token("x", choice=1))
    assert generation.take_stopped() == [1]
    assert generation.take_stopped() == []
    (message,) = messages_of(generation)
    assert (message.text, message.finish.stop_match, message.finish.usage.completion_tokens) == ("a", "bc", 3)
    assert not generation.finished


def test_a_second_attempt_goes_on_with_each_choice(tokenizer: Tokenizer) -> None:
    emitted = [internal_pb.EmittedChoice(index=1, token_ids=[ALPHABET.index(char) for char in "xyz"], chars=2)]
    generation = OutputStream(choices_request(3, emitted_choices=emitted, finished_choices=[0, 2]), tokenizer, "d0", 4)
    generation.absorb(token("w", choice=1, finish=FinishReason.LENGTH))
    (message,) = messages_of(generation)
    assert (message.index, message.text, len(message.token_ids)) == (1, "zw", 1)
    assert message.finish.usage.completion_tokens == 4
    assert message.finish.HasField("receipt")


def test_the_price_is_that_of_all_choices_on_whatever_workers(tokenizer: Tokenizer) -> None:
    """An earlier attempt streamed two tokens of the one choice, and all three of the other."""
    resumed = request(
        model="m",
        model_reason="because",
        price=pb.Price(input_per_million=10, output_per_million=1000),
        emitted_token_ids=[1, 2],
        emitted_choices=[internal_pb.EmittedChoice(index=1, token_ids=[1, 2, 3])],
        finished_choices=[1],
    )
    resumed.sampling.n = 2
    generation = OutputStream(resumed, tokenizer, "d0", 4)
    generation.absorb(token("a", account=ACCOUNT, finish=FinishReason.LENGTH))
    message = next_of(generation)
    receipt = message.finish.receipt
    assert (receipt.model, receipt.model_reason) == ("m", "because")
    assert message.finish.usage.completion_tokens == 3
    assert receipt.price == pb.Price(
        input_per_million=10, output_per_million=1000, input=20 * 10 / 1e6, output=6 * 1000 / 1e6
    )


def test_what_waited_long_comes_in_bounded_messages_and_the_last_finish_last(tokenizer: Tokenizer) -> None:
    asked = request()
    asked.sampling.n = 2
    generation = OutputStream(asked, tokenizer, "d0", 4)
    for _ in range(3 * MAX_TOKENS_AT_ONCE):
        generation.absorb(token("a", logprobs=TokenLogprobs(-0.5, (1,), (-0.5,))))
    generation.absorb(token("b", finish=FinishReason.LENGTH))
    generation.absorb(token("c", choice=1, account=ACCOUNT, finish=FinishReason.LENGTH))
    messages = messages_of(generation)
    assert [len(message.token_ids) for message in messages] == [MAX_TOKENS_AT_ONCE] * 3 + [1, 1]
    assert "".join(message.text for message in messages) == "a" * 3 * MAX_TOKENS_AT_ONCE + "bc"
    assert [len(message.logprobs) for message in messages] == [MAX_TOKENS_AT_ONCE] * 3 + [0, 0]
    assert [message.HasField("finish") for message in messages] == [False] * 3 + [True, True]
    assert messages[-1].finish.HasField("receipt")
