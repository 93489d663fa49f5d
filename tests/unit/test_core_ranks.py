"""Engines of one and two ranks that lend to each other. Eight blocks of four tokens, two KV heads; exact values."""

import pytest

from engine.core_types import SamplingParams
from engine.messages.to_engine import Cancel
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.ranks import split_endpoint
from kvtransfer.transport import Pool
from support.checked_core import NOTHING_LEFT
from support.core_engine import TEN, TWELVE, account_of, generate, tokens_of
from support.core_pair import Pair, moved
from support.hand_network import HandNetwork
from support.sharded_sim import ShardedEngine
from support.sim_model import LAYOUT, undisturbed
from support.slow_transport import SlowTransport

SIZES = [(1, 1), (1, 2), (2, 1), (2, 2)]


def pair_that_looks(borrowers: int, lenders: int) -> Pair:
    """Of whose reads every other one brings fingerprints along."""
    network, engines = dict[bytes, Pool](), dict[bytes, HandNetwork]()

    def engine(name: str, ranks: int) -> ShardedEngine:
        return ShardedEngine(name, ranks, lambda rank: SlowTransport(network, rank), engines=engines)

    return Pair(engines=(engine("borrower", borrowers), engine("lender", lenders)))


def pair_of(borrowers: int, lenders: int) -> Pair:
    network, engines = LocalNetwork(), dict[bytes, HandNetwork]()

    def engine(name: str, ranks: int) -> ShardedEngine:
        return ShardedEngine(name, ranks, lambda rank: LocalTransport(network, rank, eager=False), engines=engines)

    return Pair(engines=(engine("borrower", borrowers), engine("lender", lenders)))


@pytest.mark.parametrize(("borrowers", "lenders"), SIZES)
def test_every_rank_reads_its_part_whatever_the_two_sizes(borrowers: int, lenders: int) -> None:
    """A token is a hash of all heads of the KV: it is right only if all of them came."""
    pair = pair_of(borrowers, lenders)
    assert len(split_endpoint(pair.lender.ready.endpoint)) == lenders
    pair.submit("r", (*TWELVE, 1, 2))
    account = pair.served("r")
    assert moved(account) == (0, 3, 1, 2, 0)
    assert account.moved_bytes == 3 * LAYOUT.block_bytes
    assert (account.lanes, account.loan_failure) == (("local/memory",), "")


@pytest.mark.parametrize(("borrowers", "lenders"), SIZES)
def test_fingerprints_that_a_rank_s_transport_found_are_those_of_its_part(borrowers: int, lenders: int) -> None:
    pair = pair_that_looks(borrowers, lenders)
    for number in range(3):
        prompt = (*(token + 20 * number for token in TWELVE), 1, 2)
        pair.submit(f"r{number}", prompt)
        account = pair.served(f"r{number}")
        assert (account.moved_blocks, account.mismatched_blocks, account.loan_failure) == (3, 0, "")
        pair.tokens.clear()


def test_all_of_them_are_the_same_to_the_world() -> None:
    one, two = pair_of(1, 2).borrower.ready, pair_of(2, 1).borrower.ready
    assert one.model_fingerprint == two.model_fingerprint
    assert (one.block_bytes, one.kv_heads, one.num_blocks) == (two.block_bytes, two.kv_heads, two.num_blocks)


def test_a_block_is_bound_with_the_last_rank_only() -> None:
    pair = pair_of(2, 1)
    pair.submit("r", TEN)
    pair.carry()
    while pair.lender.step():
        pair.carry()
    pair.carry()
    first, second = pair.borrower.ranks  # type: ignore[attr-defined]
    assert second.step()
    pair.borrower.send()
    assert pair.borrower.core.kv_cache.cached.snapshot() == []
    assert first.step()
    pair.borrower.send()
    assert pair.borrower.core.kv_cache.cached.snapshot() != []
    pair.run()
    pair.check_served("r")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_arrives_wrong_ends_the_loan_before_its_block(rank: int) -> None:
    """Whichever rank it is: block 1's part there is not what was announced."""
    pair = pair_of(2, 2)
    pair.submit("r", (*TWELVE, 1, 2))
    pair.carry()
    pair.lender.step()
    pair.lender.sharded.pools[rank].memory[1, 0] ^= 1  # type: ignore[attr-defined]
    pair.run()
    assert tokens_of(pair.tokens, "r") == undisturbed((*TWELVE, 1, 2), 2)
    account = account_of(pair.tokens)
    assert moved(account)[1:] == (1, 3, 10, 1)
    assert account.loan_failure == "block 1 arrived corrupted"
    assert pair.borrower.held() == pair.lender.held() == NOTHING_LEFT


def test_choices_are_copied_on_every_rank() -> None:
    engine = pair_of(2, 1).borrower
    sampling = SamplingParams(3, n=3)
    tokens = engine.serve(generate("r", TEN, sampling=sampling))
    for choice in range(3):
        assert [t.token_id for t in tokens if t.choice == choice] == undisturbed(TEN, 3, choice)


class Slow:
    """A borrower of two ranks and a lender of one, whose reads are posted and land by hand."""

    def __init__(self) -> None:
        network, engines = dict[bytes, Pool](), dict[bytes, HandNetwork]()
        borrower = ShardedEngine("borrower", 2, lambda name: SlowTransport(network, name), engines=engines)
        lender = ShardedEngine("lender", 1, lambda name: SlowTransport(network, name), engines=engines)
        self.pair = Pair(engines=(borrower, lender))
        self.borrower = borrower
        self.pair.submit("r", TEN)
        for _ in range(4):
            self.pair.carry()
            lender.step()

    def post(self, rank: int) -> None:
        self._rank(rank).post("lender-0")

    def land(self, rank: int) -> None:
        self._rank(rank).land("lender-0")
        self.borrower.send()

    def _rank(self, rank: int) -> SlowTransport:
        transport = self.borrower.ranks[rank]
        assert isinstance(transport, SlowTransport)
        return transport


@pytest.mark.parametrize("fault", ["cancel", "loan fails"])
@pytest.mark.parametrize("posted", [(), (0,), (1,), (0, 1)])
def test_blocks_are_nobodys_until_the_last_rank_that_writes_them_is_quiet(posted: tuple[int, ...], fault: str) -> None:
    slow = Slow()
    for rank in posted:
        slow.post(rank)
    if fault == "cancel":
        slow.borrower.send(Cancel("r"))
    else:
        slow.borrower.loan_ends("r", "broken")
    assert slow.borrower.held()[2] == (2 if posted else 0)
    for rank in posted:
        assert slow.borrower.held()[2] == 2
        slow.land(rank)
    assert slow.borrower.held()[2] == 0
    slow.pair.run()
    if fault == "cancel":
        assert slow.borrower.held() == slow.pair.lender.held() == NOTHING_LEFT
    else:
        slow.pair.check_served("r")
