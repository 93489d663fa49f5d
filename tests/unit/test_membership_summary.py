"""What a router is told at once is what it would have been told one by one."""

from hypothesis import given
from hypothesis import strategies as st

from engine.messages import CacheChanged, Load
from engine.pool import CacheEvent, Removed, Stored
from engine.worker.joining import summary

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


def heard(messages: list[CacheChanged | Load]) -> tuple[set[bytes], int, bool, int | None]:
    """What a router holds after them: keys, the next sequence, whether it is in step, and the last step reported."""
    held: set[bytes] = set()
    expected, in_step, step = 0, True, None
    for message in messages:
        if isinstance(message, Load):
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
    messages: list[CacheChanged | Load] = []
    there: set[bytes] = set()
    sequence = 0
    for step in said:
        if isinstance(step, int):
            messages.append(Load(step, 0, 0, 0, 0, 0, 0, {}))
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
