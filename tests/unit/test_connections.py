"""Connections that are opened before the first loan: no block is kept, and a dead peer disturbs nobody."""

from engine.messages.from_engine import Connected, Rejected
from engine.messages.to_engine import ConnectPeers
from loans.network import Peer
from support.checked_core import NOTHING_LEFT
from support.core_engine import TWELVE, Engine, generate
from support.core_pair import Pair


def test_a_connection_holds_no_block_and_is_that_of_the_first_loan() -> None:
    pair = Pair(eager=False)
    pair.borrower.send(ConnectPeers(7, (pair.lender.network.peer,)))
    assert pair.borrower.held() == (0, 0, 1, 0, 0), "its block may still be written"
    assert pair.borrower.land()
    pair.borrower.send()
    assert pair.borrower.receive(Connected) == [Connected(7)]
    assert pair.borrower.held() == NOTHING_LEFT
    connected = dict(pair.borrower.core.own_rank.peers)
    assert list(connected) == [pair.lender.ready.endpoint]
    pair.submit("r", (*TWELVE, 1))
    pair.run()
    pair.check_served("r")
    assert pair.borrower.core.own_rank.peers == connected, "the loan used it"


def test_a_peer_that_is_gone_is_forgotten_and_loans_from_others_go_on() -> None:
    pair = Pair(eager=False)
    gone = Engine("gone", network=pair.borrower.transport.network, engines=pair.borrower.network.engines)
    endpoint = gone.ready.endpoint
    gone.transport.close()
    unknown = Peer("unknown", "nowhere", b"unknown")
    pair.borrower.send(ConnectPeers(1, (gone.network.peer, unknown)), ConnectPeers(2, ()))
    while pair.borrower.land():
        pass
    pair.borrower.send()
    assert {message.query_id: message.failures for message in pair.borrower.receive(Connected)} == {
        1: ("unknown: no engine is there", "gone: it has ended"),
        2: (),
    }
    assert endpoint not in pair.borrower.core.own_rank.peers
    assert pair.borrower.held() == NOTHING_LEFT
    pair.submit("r", (*TWELVE, 1))
    pair.run()
    pair.check_served("r")


def test_a_full_engine_reads_nothing() -> None:
    pair = Pair()
    pair.borrower.send(generate("all", range(30), 2))
    pair.borrower.receive()
    pair.borrower.send(ConnectPeers(3, (pair.lender.network.peer,)))
    failures = ("lender: no block is available to read into",)
    assert pair.borrower.receive(Connected, Rejected) == [Connected(3, failures)]
    pair.borrower.run()
    assert pair.borrower.held() == NOTHING_LEFT


def test_an_oldest_cached_block_is_given_for_it_where_none_is_free() -> None:
    pair = Pair()
    pair.borrower.send(generate("fills", range(31), 1))
    pair.borrower.run()
    pair.borrower.serve(generate("more", range(40, 44), 1))
    pair.borrower.send(ConnectPeers(4, (pair.lender.network.peer,)))
    pair.borrower.send()
    assert pair.borrower.receive(Connected) == [Connected(4)]
    assert pair.borrower.held() == NOTHING_LEFT


def test_an_engine_that_is_connected_to_connects_to_the_callers_memory() -> None:
    pair = Pair()
    pair.borrower.send(ConnectPeers(5, (pair.lender.network.peer,)))
    assert pair.lender.core.audit().quarantined_blocks == 0
    pair.lender.turn()
    pair.lender.turn()
    assert list(pair.lender.core.own_rank.peers) == [pair.borrower.ready.endpoint]
    assert pair.lender.held() == NOTHING_LEFT
