"""Worker events sent at once equal those sent one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages.from_engine import CacheChanged, LoadReport
from kvcache.pool import CacheEvent, Removed, Stored
from protos import membership_pb2 as pb
from router.placement.fleet.fleet import Fleet
from router.placement.rates import Priors
from worker.front import worker_events as news
from worker.front.worker_events import cache_events, messages_of, parts_of, summary

KEYS = [bytes([number]) * 16 for number in range(6)]
events = st.one_of(
    st.builds(Stored, parent=st.just(b""), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).map(tuple)),
    st.builds(Removed, keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).map(tuple)),
)
steps = st.lists(
    st.one_of(
        st.lists(events, min_size=1, max_size=3).map(tuple),
        st.just("snapshot"),
        st.integers(0, 99),
    ),
    max_size=12,
)


def apply(held: set[bytes], changed: tuple[CacheEvent, ...]) -> None:
    for event in changed:
        if isinstance(event, Stored):
            held |= set(event.keys)
        else:
            held -= set(event.keys)


def heard(messages: list[CacheChanged | LoadReport]) -> tuple[set[bytes], int, bool, int | None]:
    """What a router holds after them: keys, the next sequence, whether it is in step, and the last step reported."""
    held: set[bytes] = set()
    expected, in_step, step = 0, True, None
    for message in messages:
        if isinstance(message, LoadReport):
            step = message.step
        elif message.snapshot:
            held, expected, in_step = set(), message.sequence, True
            apply(held, message.events)
        elif in_step and message.sequence == expected:
            apply(held, message.events)
            expected += len(message.events)
        else:
            in_step = False
    return held, expected, in_step, step


@given(steps)
def test_a_summary_says_the_same(said: list[object]) -> None:
    messages: list[CacheChanged | LoadReport] = []
    there: set[bytes] = set()
    sequence = 0
    for step in said:
        if isinstance(step, int):
            messages.append(LoadReport(step, 0, 0, 0, 0, 0, 0, {}))
        elif step == "snapshot":
            messages.append(CacheChanged(sequence, (Stored(b"", tuple(sorted(there))),), snapshot=True))
        else:
            assert isinstance(step, tuple)
            messages.append(CacheChanged(sequence, step))
            apply(there, step)
            sequence += len(step)
    short = summary(messages)
    assert heard(short) == heard(messages)
    assert len(short) <= min(len(messages), 3)


PRIORS = Priors(1000, 100, 1e6, 0.01, 0.001, 0.001)
HELLO = pb.Hello(
    worker_id="worker",
    incarnation=b"1",
    role=pb.ROLE_DECODE,
    address="there",
    model_fingerprint=b"model",
    block_tokens=16,
)


def test_a_cache_larger_than_a_message_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "PART_BYTES", 100)
    fleet = Fleet("router", PRIORS)
    worker = fleet.joined(HELLO)
    keys = [number.to_bytes(16) for number in range(30)]
    whole = CacheChanged(7, tuple(Stored(b"", (key,)) for key in keys[:20]), snapshot=True)
    change = CacheChanged(7, (Removed(tuple(keys[:3])), *(Stored(b"", (key,)) for key in keys[20:])))
    for changed in (whole, change, CacheChanged(18, (Removed((keys[3],)),))):
        parts = list(parts_of(cache_events(changed)))
        assert len(parts) > 2 or len(changed.events) == 1
        assert all(part.ByteSize() <= 100 + 20 for part in parts)
        assert all(fleet.cache_changed(worker, part) for part in parts)
    assert worker.num_cached == 26


def test_the_middle_of_a_snapshot_alone_is_no_cache() -> None:
    fleet = Fleet("router", PRIORS)
    worker = fleet.joined(HELLO)
    assert not fleet.cache_changed(worker, pb.CacheEvents(sequence=7, continued=True))


@given(st.integers(0, 3), st.booleans())
def test_a_load_goes_with_the_last_change_before_it(num_changes: int, reported: bool) -> None:
    caches = [pb.CacheEvents(sequence=number) for number in range(num_changes)]
    load = pb.LoadReport(step=7) if reported else None
    messages = list(messages_of(iter(caches), load))
    assert [message.cache for message in messages if message.HasField("cache")] == caches
    assert [message.HasField("load") for message in messages if message.HasField("load")] == [True] * reported
    assert len(messages) == max(num_changes, int(reported))
    assert not reported or messages[-1].load == load
    assert not any(message.HasField("hello") for message in messages)
