"""The prefix index against a brute-force model."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.index import PrefixIndex

KEYS = [bytes([number]) * 16 for number in range(6)]
WORKERS = ["a", "b", "c"]


def test_match_counts_each_workers_own_prefix() -> None:
    index = PrefixIndex()
    index.add("a", KEYS[:3])
    index.add("b", [KEYS[0], KEYS[2]])
    assert index.match(KEYS[:4]) == {"a": 3, "b": 1}
    assert index.match(KEYS[1:]) == {"a": 2}
    assert index.match([]) == {}


def test_a_dropped_worker_leaves_nothing() -> None:
    index = PrefixIndex()
    index.add("a", KEYS)
    index.drop_worker("a")
    index.drop_worker("never there")
    assert index.num_keys == 0
    assert index.match(KEYS) == {}


class IndexModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, set[bytes]] = {}

    @rule(worker=st.sampled_from(WORKERS), keys=st.lists(st.sampled_from(KEYS)))
    def add(self, worker: str, keys: list[bytes]) -> None:
        self.index.add(worker, keys)
        self.held.setdefault(worker, set()).update(keys)

    @rule(worker=st.sampled_from(WORKERS), keys=st.lists(st.sampled_from(KEYS)))
    def discard(self, worker: str, keys: list[bytes]) -> None:
        self.index.discard(worker, keys)
        self.held.get(worker, set()).difference_update(keys)

    @rule(worker=st.sampled_from(WORKERS))
    def drop(self, worker: str) -> None:
        self.index.drop_worker(worker)
        self.held.pop(worker, None)

    @rule(keys=st.permutations(KEYS))
    def match(self, keys: list[bytes]) -> None:
        expected = {}
        for worker, held in self.held.items():
            depth = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            if depth:
                expected[worker] = depth
        assert self.index.match(keys) == expected

    @invariant()
    def same_keys(self) -> None:
        assert self.index.num_keys == len(set().union(*self.held.values()))
        for worker in WORKERS:
            assert self.index.keys_of(worker) == self.held.get(worker, set())


TestIndexModel = IndexModel.TestCase


@given(st.lists(st.sampled_from(KEYS), unique=True))
def test_adding_twice_is_adding_once(keys: list[bytes]) -> None:
    index = PrefixIndex()
    index.add("a", keys)
    index.add("a", keys)
    index.discard("a", keys)
    assert index.num_keys == 0
