"""Connections that are opened before the first loan: no block is kept, and a dead peer disturbs nobody."""

from engine.messages.from_engine import Connected, Rejected
from engine.messages.to_engine import Connect
from support.checked_core import NOTHING_LEFT
from support.core_engine import TWELVE, Engine, generate
from support.core_pair import Pair


def test_a_connection_holds_no_block_and_is_that_of_the_first_loan() -> None:
    pair = Pair(eager=False)
    pair.borrower.send(Connect(7, pair.lender.ready.endpoint))
    assert pair.borrower.held() == (0, 0, 1, 0, 0), "its block may still be written"
    assert pair.borrower.land()
    pair.borrower.send()
    assert pair.borrower.receive(Connected) == [Connected(7)]
    assert pair.borrower.held() == NOTHING_LEFT
    connected = dict(pair.borrower.core._own._peers)
    assert list(connected) == [pair.lender.ready.endpoint]
    pair.submit("r", (*TWELVE, 1))
    pair.run()
    pair.check_served("r")
    assert pair.borrower.core._own._peers == connected, "the loan used it"


def test_a_peer_that_is_gone_is_forgotten_and_loans_from_others_go_on() -> None:
    pair = Pair(eager=False)
    gone = Engine("gone", network=pair.borrower.transport._network)
    endpoint = gone.ready.endpoint
    gone.transport.close()
    pair.borrower.send(Connect(1, endpoint), Connect(2, b"no endpoint"))
    while pair.borrower.land():
        pass
    pair.borrower.send()
    said = {message.query_id: message.failure for message in pair.borrower.receive(Connected)}
    assert said.keys() == {1, 2}
    assert all(said.values())
    assert endpoint not in pair.borrower.core._own._peers
    assert pair.borrower.held() == NOTHING_LEFT
    pair.submit("r", (*TWELVE, 1))
    pair.run()
    pair.check_served("r")


def test_a_full_engine_reads_nothing() -> None:
    pair = Pair()
    pair.borrower.send(generate("all", range(30), 2))
    pair.borrower.receive()
    pair.borrower.send(Connect(3, pair.lender.ready.endpoint))
    assert pair.borrower.receive(Connected, Rejected) == [Connected(3, "no block is available to read into")]
    pair.borrower.run()
    assert pair.borrower.held() == NOTHING_LEFT


def test_an_oldest_cached_block_is_given_for_it_where_none_is_free() -> None:
    pair = Pair()
    pair.borrower.send(generate("fills", range(31), 1))
    pair.borrower.run()
    pair.borrower.send(generate("more", range(40, 44), 1))
    pair.borrower.run()
    pair.borrower.receive()
    pair.borrower.send(Connect(4, pair.lender.ready.endpoint))
    pair.borrower.send()
    assert pair.borrower.receive(Connected) == [Connected(4)]
    assert pair.borrower.held() == NOTHING_LEFT
