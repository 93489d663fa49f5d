"""Spans of a request: every stage has one, and every moment before the first token is in one."""

from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from router.observability.tracing import BETWEEN, SHORT_S, spans_of

NAMES = ("tokenise", "router queue", "admit", "lender queue", "lender prefill", "prompt tail", "decode")
stages = st.lists(
    st.tuples(st.sampled_from(NAMES), st.floats(0, 2000), st.floats(0, 1000)).map(
        lambda drawn: pb.Stage(name=drawn[0], where="decode-0", start_ms=drawn[1], duration_ms=drawn[2])
    ),
    max_size=8,
)


@given(stages, st.floats(0, 3))
def test_every_moment_before_the_first_token_has_a_name(drawn: list[pb.Stage], ttft_s: float) -> None:
    spans = spans_of(pb.Receipt(stages=drawn), "router", ttft_s)
    assert sum(span.name != BETWEEN for span in spans) == len(drawn)
    covered_s = 0.0
    for span in spans:
        if span.begin_s < ttft_s:
            assert span.begin_s <= covered_s + 2 * SHORT_S
            covered_s = max(covered_s, span.end_s)
    assert covered_s >= ttft_s - 2 * SHORT_S
    between = [span for span in spans if span.name == BETWEEN]
    for span in between:
        assert 0 <= span.begin_s < span.end_s <= ttft_s
        for other in spans:
            if other.name != BETWEEN:
                assert other.end_s <= span.begin_s + SHORT_S or other.begin_s >= span.end_s - SHORT_S


def test_spans_are_of_whom_did_it() -> None:
    receipt = pb.Receipt(
        placement=pb.Placement(lender="prefill-3", decode_worker="decode-0"),
        stages=[
            pb.Stage(name="router queue", where="router", start_ms=0, duration_ms=2),
            pb.Stage(name="lender prefill", where="decode-0", start_ms=3, duration_ms=4),
            pb.Stage(name="prompt tail", where="decode-0", start_ms=7, duration_ms=1),
        ],
    )
    found = [(span.name, span.service, span.where) for span in spans_of(receipt, "router", 0.009)]
    assert found == [
        ("router queue", "tandem-router", "router"),
        (BETWEEN, "tandem-router", "router"),
        ("lender prefill", "tandem-prefill", "prefill-3"),
        ("prompt tail", "tandem-decode", "decode-0"),
        (BETWEEN, "tandem-router", "router"),
    ]
