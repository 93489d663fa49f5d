"""The prefix index against a brute-force model."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.placement.fleet.index import NUM_SHARDS, PrefixIndex

KEYS = [bytes([number]) * 16 for number in (0, 0, 1, 7, 254, 255)]
KEYS[1] = bytes(15) + b"\1"  # of the same shard as the first
WORKERS = ["a", "b", "c"]


def test_deaths_alone_take_the_dead_out_in_the_end() -> None:
    """Workers that come with a block, and go, with nothing else ever happening."""
    index = PrefixIndex()
    for number in range(5 * NUM_SHARDS):
        index.add(f"worker-{number}", KEYS[number % len(KEYS) :][:1])
        index.drop_worker(f"worker-{number}")
        index.check_integrity()
    assert index.num_slots <= 2 * NUM_SHARDS + 1
    index.sweep()
    assert index.num_keys == 0


def test_events_of_others_pay_for_the_sweep() -> None:
    index = PrefixIndex()
    index.add("a", KEYS)
    index.drop_worker("a")
    for _ in range(2 * len(KEYS)):
        index.add("b", KEYS[:1])
    assert index.num_keys == 1


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

    @rule()
    def sweep(self) -> None:
        self.index.sweep()
        assert self.index.num_keys == len(set().union(*self.held.values()))

    @invariant()
    def same_keys(self) -> None:
        self.index.check_integrity()
        for worker in WORKERS:
            assert self.index.keys_of(worker) == self.held.get(worker, set())


TestIndexModel = IndexModel.TestCase
