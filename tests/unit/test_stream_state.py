"""Stream state that the router keeps for the next attempt."""

from protos import inference_pb2 as pb
from router.request_path.stream_state import MAX_UNREAD_BYTES, StreamState


def test_what_was_sent_is_kept_by_choice() -> None:
    emitted = StreamState(2)
    assert not emitted.finished
    messages = [
        pb.GenerateResponse(prompt_logprobs=[pb.TokenLogprobs()] * 3),
        pb.GenerateResponse(token_ids=[1, 2], text="ab", index=1),
        pb.GenerateResponse(token_ids=[3], text="é"),
        pb.GenerateResponse(token_ids=[4], index=1, finish=pb.Finish()),
    ]
    for message in messages:
        emitted.add(message.SerializeToString())
    first, second = emitted.choices
    assert (first.token_ids, first.num_chars, first.finished) == ([3], 1, False)
    assert (second.token_ids, second.num_chars, second.finished) == ([1, 2, 4], 2, True)
    assert emitted.num_prompt_logprobs == 3
    assert not emitted.finished
    emitted.add(pb.GenerateResponse(finish=pb.Finish()).SerializeToString())
    assert emitted.finished


def test_a_long_answer_is_kept_as_its_tokens() -> None:
    emitted = StreamState(1)
    message = pb.GenerateResponse(token_ids=[7], text="x" * 1000).SerializeToString()
    num_messages = 3 * MAX_UNREAD_BYTES // len(message)
    for _ in range(num_messages):
        emitted.add(message)
        assert sum(map(len, emitted.unread)) <= MAX_UNREAD_BYTES
    (choice,) = emitted.choices
    assert choice.token_ids == [7] * num_messages
    assert choice.num_chars == 1000 * num_messages
