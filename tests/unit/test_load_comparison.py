"""Turns of `tandem compare` have equal loads and unlike prompts."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.loadgen.comparison import unlike
from workloads.request import MAX_HASH_ID, TraceRequest

REQUESTS = st.builds(
    TraceRequest,
    number=st.integers(0, 10**6),
    arrival_s=st.floats(0, 100),
    input_tokens=st.integers(1, 4096),
    output_tokens=st.integers(1, 64),
    hash_ids=st.lists(st.integers(0, MAX_HASH_ID // 16 - 1), max_size=4).map(tuple),
)


@given(st.lists(REQUESTS, max_size=4), st.integers(2, 16))
def test_turns_share_lengths_and_times_and_no_prompt(requests: list[TraceRequest], turns: int) -> None:
    by_turn = [list(unlike(requests, turn, turns)) for turn in range(turns)]
    for each in by_turn:
        for request, original in zip(each, requests, strict=True):
            assert (request.arrival_s, request.input_tokens, request.output_tokens) == (
                original.arrival_s,
                original.input_tokens,
                original.output_tokens,
            )
        ids = [hash_id for request in each for hash_id in request.hash_ids]
        before = [hash_id for request in requests for hash_id in request.hash_ids]
        assert [ids.index(hash_id) for hash_id in ids] == [before.index(hash_id) for hash_id in before]
    shown = [{hash_id for request in each for hash_id in request.hash_ids} for each in by_turn]
    tails = [{request.number for request in each} for each in by_turn]
    for sets in (shown, tails):
        assert sum(map(len, sets)) == len(set().union(*sets))
