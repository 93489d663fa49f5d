"""Steps of data-parallel ranks: whatever arrives, in whatever order messages travel, all ranks make the same steps."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.process.data_parallel.lockstep import Grants, Lockstep
from engine.process.vllm.process import VllmSteps


@dataclass(eq=False)
class Batch:
    """A SchedulerOutput, as far as steps look at it."""

    request: "Request | None"
    total_num_scheduled_tokens: int
    pending_structured_output_tokens: bool = False


@dataclass(eq=False)
class Request:
    num_left: int
    """Steps that it needs yet."""
    overlaps: bool
    """Whether it may have several steps in flight."""
    has_grammar: bool
    num_flying: int = 0


class Nothing:
    """Stands for the thread of fingerprints, which has none."""

    def take(self) -> None:
        return None


@dataclass(eq=False)
class Rank:
    """One rank: a core, its batches and its end of the group. The steps between them are the real ones."""

    world: "World"
    number: int
    depth: int
    lockstep: Lockstep
    requests: list[Request] = field(default_factory=list)
    has_empty: bool = False
    """Whether the core has something to tell vLLM without any tokens."""
    is_blocked: bool = False
    """Whether no request may run now."""
    waits_in: int | None = None
    """Step in whose launch the rank waits for the others."""
    flying: deque[tuple[Batch | None, int | None]] = field(default_factory=deque)
    """Batches in flight, and their steps; None for one without tokens."""
    launched_batch: Batch | None = None

    def __post_init__(self) -> None:
        self.steps = VllmSteps(self, self, (None, Nothing()), self.depth, self)  # type: ignore[arg-type]

    # the core

    @property
    def runnable(self) -> list[Request]:
        return [
            each for each in self.requests if each.num_left > each.num_flying and (each.overlaps or not each.num_flying)
        ]

    @property
    def may_schedule(self) -> bool:
        return self.has_empty or (not self.is_blocked and bool(self.runnable))

    def take_jobs(self) -> None: ...

    def schedule(self) -> Batch | None:
        if self.has_empty:
            self.has_empty = False
            return Batch(None, 0)
        if not self.may_schedule:
            return None
        request = self.runnable[0]
        pending = request.has_grammar and request.num_flying > 0
        request.num_flying += 1
        return Batch(request, 1, pending)

    def grammar_of(self, batch: Batch) -> None: ...

    def deferred_grammar_of(self, batch: Batch) -> None: ...

    def end_step(self, batch: Batch, result: object) -> None:
        if batch.request is not None:
            batch.request.num_flying -= 1
            batch.request.num_left -= 1
            if not batch.request.num_left:
                self.requests.remove(batch.request)

    # the batches

    @property
    def has_ended(self) -> bool:
        if not self.flying:
            return False
        number = self.flying[0][1]
        return number is None or all(
            rank.lockstep.num_launched + rank.is_launching > number for rank in self.world.ranks
        )

    def start(self, batch: Batch, grammar: None) -> None:
        self.launch(batch)
        self.sample(batch, grammar)

    def launch(self, batch: Batch) -> None:
        self.launched_batch = batch
        if batch.total_num_scheduled_tokens:
            self._enter()

    def sample(self, batch: Batch, grammar: None) -> None:
        assert batch is self.launched_batch
        number = self.last_step if batch.total_num_scheduled_tokens else None
        self.flying.append((batch, number))

    def start_dummy(self) -> None:
        self._enter()
        self.flying.append((None, self.last_step))
        self.world.num_dummies += 1

    def take(self) -> tuple[Batch | None, None] | None:
        return (self.flying.popleft()[0], None) if self.has_ended else None

    # the group

    last_step = -1
    is_launching = False
    """Whether the rank has entered a step that `launched` does not count yet."""

    def _enter(self) -> None:
        assert self.waits_in is None, "a launch begins while one waits for other ranks"
        assert self.lockstep.may_launch
        self.last_step = self.waits_in = self.lockstep.num_launched
        self.is_launching = True

    @property
    def may_launch(self) -> bool:
        return self.waits_in is None and self.lockstep.may_launch

    def launched(self) -> None:
        self.is_launching = False
        self.lockstep.launched()

    def ask(self) -> None:
        if (wanted := self.lockstep.to_ask()) is not None:
            self.world.channels[self.number, 0].append(wanted)

    # the world's moves

    def turn(self) -> None:
        """One turn of the engine's loop, unless its launch waits for ranks that have not launched the step."""
        if self.waits_in is not None:
            if any(rank.lockstep.num_launched <= self.waits_in for rank in self.world.ranks):
                return
            self.waits_in = None
        self.steps.end()
        self.steps.begin()


class World:
    """Ranks, and channels between them that keep the order of their messages."""

    def __init__(self, num_ranks: int, interval: int, depth: int) -> None:
        self.grants = Grants()
        self.num_dummies = 0
        numbers = range(num_ranks)
        self.channels: dict[tuple[int, int], deque[int]] = {
            (a, b): deque() for a in numbers for b in numbers if 0 in (a, b)
        }
        self.ranks = [Rank(self, number, depth, Lockstep(interval)) for number in numbers]

    def deliver(self, sender: int, receiver: int, is_ask: bool) -> None:
        channel = self.channels[sender, receiver]
        if not channel:
            return
        num_steps = channel.popleft()
        if not is_ask:
            self.ranks[receiver].lockstep.granted(num_steps)
        elif (granted := self.grants.asked(num_steps)) is not None:
            self.ranks[0].lockstep.granted(granted)
            for rank in self.ranks[1:]:
                self.channels[0, rank.number].append(granted)

    def deliver_one(self, number: int) -> None:
        """Deliver one message from or to a rank; rank 0 asks itself."""
        if number == 0:
            self.deliver(0, 0, is_ask=True)
        else:
            self.deliver(number, 0, is_ask=True)
            self.deliver(0, number, is_ask=False)

    def settle(self) -> None:
        """Let everything happen that can; nobody is blocked any more."""
        for rank in self.ranks:
            rank.is_blocked = False
        for _ in range(20000):
            before = self.seen()
            for rank in self.ranks:
                self.deliver_one(rank.number)
                rank.turn()
            if self.seen() == before and not any(self.channels.values()):
                return
        raise AssertionError("no rest")

    def seen(self) -> Any:
        return [
            (rank.lockstep.num_launched, len(rank.flying), rank.waits_in, len(rank.requests)) for rank in self.ranks
        ]


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 3), st.integers(1, 30), st.booleans(), st.booleans()),
        st.tuples(st.just("turn"), st.integers(0, 3)),
        st.tuples(st.just("turn"), st.integers(0, 3)),
        st.tuples(st.just("deliver"), st.integers(0, 3)),
        st.tuples(st.just("empty"), st.integers(0, 3)),
        st.tuples(st.just("block"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("rest")),
    ),
    max_size=80,
)


@given(num_ranks=st.integers(2, 4), interval=st.sampled_from([1, 2, 3, 16]), depth=st.integers(1, 3), moves=MOVES)
def test_all_ranks_make_the_same_steps_and_every_request_runs(
    num_ranks: int, interval: int, depth: int, moves: list[tuple[Any, ...]]
) -> None:
    world = World(num_ranks, interval, depth)
    for kind, *details in moves:
        rank = world.ranks[details[0] % num_ranks] if details else world.ranks[0]
        match kind:
            case "arrive":
                rank.requests.append(Request(*details[1:]))
            case "turn":
                rank.turn()
            case "deliver":
                world.deliver_one(rank.number)
            case "empty":
                rank.has_empty = True
            case "block":
                rank.is_blocked = details[1]
            case "rest":
                _rests(world)
    _rests(world)


def _rests(world: World) -> None:
    world.settle()
    assert len({rank.lockstep.num_launched for rank in world.ranks}) == 1
    for rank in world.ranks:
        assert not rank.requests
        assert not rank.flying
        assert rank.waits_in is None
        assert not rank.may_launch
        assert not rank.steps.ready, "an idle rank's loop sleeps"


def test_a_group_rests_soon_after_its_last_request() -> None:
    world = World(3, 16, 2)
    world.ranks[1].requests.append(Request(100, True, False))
    _rests(world)
    assert 100 <= world.ranks[0].lockstep.num_launched <= 116
