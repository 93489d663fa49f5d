"""Messages that are joined say what they said apart."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from router.request_path.late_messages import joined

LOGPROB = st.builds(pb.TokenLogprobs, logprob=st.just(-1.0), top_token_ids=st.lists(st.integers(0, 9), max_size=2))


@st.composite
def messages(draw: st.DrawFn) -> list[pb.GenerateResponse]:
    """Return messages of a request: probabilities of its prompt, then those of its choices, each with one end."""
    found = [pb.GenerateResponse(prompt_logprobs=[each]) for each in draw(st.lists(LOGPROB, max_size=2))]
    ended: set[int] = set()
    for _ in range(draw(st.integers(0, 12))):
        index = draw(st.integers(0, 2))
        if index in ended:
            continue
        ids = draw(st.lists(st.integers(0, 9), max_size=3))
        message = pb.GenerateResponse(index=index, token_ids=ids, text=draw(st.text("ab", max_size=3)))
        message.logprobs.extend(pb.TokenLogprobs(logprob=-float(each)) for each in ids)
        if draw(st.booleans()) and draw(st.booleans()):
            ended.add(index)
            message.finish.reason = pb.FINISH_REASON_STOP
        found.append(message)
    return found


def told(all_messages: list[pb.GenerateResponse]) -> dict[int, list[object]]:
    """Return what the client of each choice has in the end."""
    told: dict[int, list[object]] = {}
    for message in all_messages:
        tokens, text, logprobs, prompts, finishes = told.setdefault(message.index, [[], "", [], [], []])
        told[message.index] = [
            [*tokens, *message.token_ids],  # type: ignore[misc]
            text + message.text,  # type: ignore[operator]
            [*logprobs, *(each.logprob for each in message.logprobs)],  # type: ignore[misc]
            [*prompts, *(tuple(each.top_token_ids) for each in message.prompt_logprobs)],  # type: ignore[misc]
            [*finishes, *([message.finish.reason] if message.HasField("finish") else [])],  # type: ignore[misc]
        ]
    return told


@given(messages())
def test_joined_messages_say_the_same(apart: list[pb.GenerateResponse]) -> None:
    if not apart:
        return
    together = list(joined([message.SerializeToString() for message in apart]))
    assert told(together) == told(apart)
    assert all(not message.prompt_logprobs or not message.token_ids for message in together)
    for earlier, later in pairwise(together):
        assert earlier.index != later.index or earlier.prompt_logprobs or later.prompt_logprobs
