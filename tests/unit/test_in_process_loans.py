"""The network between engines of one process: what arrives when, and how loans end."""

from typing import Any

import pytest

from loans.in_process import GONE, InProcessNetwork
from loans.network import CUT_OFF, OTHER_VERSION, Blocks, Lent, LoanGiven, LoanTaken, Peer, Started, Want

WANT = Want("r", [b"k" * 16], 0, True, [1, 2, 3, 4], b"root")
STARTED, BLOCKS = Started(1, 0, 0.0), Blocks(0, (3,), bytes(16))


class Site:
    """Two engines, which keep what they are told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engines: dict[bytes, InProcessNetwork] = {}
        self.borrower, self.lender = Engine(self, "borrower"), Engine(self, "lender")

    def turn(self) -> None:
        while self.borrower.network.turn() | self.lender.network.turn():
            pass


class Engine:
    def __init__(self, site: Site, name: str, model: bytes = b"model") -> None:
        self.told: list[Any] = []
        self.given: list[LoanGiven] = []
        self.network = InProcessNetwork(site.engines, name.encode(), lambda: None, lambda: site.now, silence_s=5.0)
        self.network.worker_id = name
        self.peer = Peer(name, self.network.start(self, model, b"memory of " + name.encode()), name.encode())

    def borrow(self, peer: Peer) -> LoanTaken:
        return self.network.open(peer, WANT, self)

    # the calls of a borrower

    def lent(self, message: Lent) -> None:
        self.told.append(message)

    def ended(self, reason: str) -> None:
        self.told.append(reason)

    # the calls of a lender

    def opened(self, loan: LoanGiven, want: Want) -> None:
        self.given.append(loan)
        self.told.append(want)

    def released(self, loan: LoanGiven, first: int, count: int) -> None:
        self.told.append((first, count))

    def closed(self, loan: LoanGiven) -> None:
        self.told.append("closed")

    def met(self, endpoint: bytes) -> None:
        self.told.append(endpoint)


def opened() -> tuple[Site, LoanTaken]:
    site = Site()
    taken = site.borrower.borrow(site.lender.peer)
    site.turn()
    return site, taken


def test_a_loan_from_its_want_to_its_close() -> None:
    site, taken = opened()
    (given,) = site.lender.given
    given.send(STARTED)
    given.send(BLOCKS)
    assert site.borrower.told == [], "nothing comes from within a call"
    site.turn()
    assert (site.borrower.told, taken.endpoint) == ([STARTED, BLOCKS], b"memory of lender")
    taken.release(0, 1)
    taken.close()
    assert site.lender.told == [WANT]
    site.turn()
    assert site.lender.told == [WANT, (0, 1), "closed"]
    given.send(BLOCKS)
    taken.close()
    site.turn()
    assert site.borrower.told == [STARTED, BLOCKS]
    assert not site.borrower.network.num_given + site.lender.network.num_given


def test_nothing_comes_of_a_loan_after_its_close_even_what_was_under_way() -> None:
    site, taken = opened()
    site.lender.given[0].send(STARTED)
    taken.close()
    site.turn()
    assert (site.borrower.told, site.lender.told) == ([], [WANT, "closed"])


def test_a_refused_loan_is_over_for_both() -> None:
    site, taken = opened()
    taken.release(0, 1)
    site.lender.given[0].refuse("no room")
    site.turn()
    taken.close()
    site.turn()
    assert (site.borrower.told, site.lender.told) == (["no room"], [WANT])


def test_a_want_that_is_closed_before_it_arrives_is_closed_there_too() -> None:
    site = Site()
    site.borrower.borrow(site.lender.peer).close()
    site.turn()
    assert (site.borrower.told, site.lender.told) == ([], [WANT, "closed"])


@pytest.mark.parametrize("has_arrived", [True, False])
def test_an_engine_that_ends_ends_its_loans_at_the_other_end(has_arrived: bool) -> None:
    site = Site()
    site.borrower.borrow(site.lender.peer)
    if has_arrived:
        site.turn()
    site.lender.network.close()
    site.borrower.network.turn()
    assert site.borrower.told == ["the engine has ended"]
    site.borrower.borrow(site.lender.peer)
    site.borrower.network.turn()
    assert site.borrower.told[1:] == [GONE]


def test_the_end_of_a_borrower_closes_what_it_was_given() -> None:
    site, _ = opened()
    site.borrower.network.close()
    site.lender.network.turn()
    assert site.lender.told == [WANT, "closed"]
    assert site.borrower.told == []


@pytest.mark.parametrize("who", ["borrower", "lender"])
def test_a_cut_breaks_loans_and_keeps_new_ones_away_whichever_side_it_is_at(who: str) -> None:
    site, _ = opened()
    cutting, other = (site.borrower, "lender") if who == "borrower" else (site.lender, "borrower")
    cutting.network.cut_off(other, 3.0)
    site.turn()
    assert (site.borrower.told, site.lender.told) == ([CUT_OFF], [WANT, "closed"])
    site.now = 2.9
    site.borrower.borrow(site.lender.peer)
    site.turn()
    assert site.borrower.told == [CUT_OFF, CUT_OFF]
    site.now = 3.0
    site.borrower.borrow(site.lender.peer)
    site.turn()
    assert site.lender.told == [WANT, "closed", WANT]


def test_a_peer_whose_loop_does_not_turn_is_quiet_and_then_given_up() -> None:
    site, taken = opened()
    site.now = 4.0
    assert taken.quiet_s == 4.0
    for engine in (site.lender, site.borrower):
        engine.network.beat(is_alive=True)
    assert taken.quiet_s == 0.0
    site.now = 8.9
    site.lender.network.beat(is_alive=False)
    site.borrower.network.beat(is_alive=True)
    site.turn()
    assert site.borrower.told == []
    site.now = 9.0
    site.borrower.network.beat(is_alive=True)
    site.turn()
    assert (site.borrower.told, site.lender.told) == (["the peer was silent for 5 s"], [WANT, "closed"])


def test_engines_of_another_version_or_model_lend_nothing() -> None:
    site = Site()
    other = Engine(site, "other", model=b"another model")
    site.borrower.borrow(site.lender.peer._replace(address=""))
    site.borrower.borrow(other.peer)
    site.turn()
    version, model = site.borrower.told
    assert version == OTHER_VERSION
    assert model.startswith("model_fingerprint: ")
    assert other.told == site.lender.told == []


def test_engines_connect_ahead() -> None:
    site = Site()
    done: list[tuple[str, bytes, str]] = []
    nobody = Peer("nobody", "somewhere", b"nobody")
    site.borrower.network.connect([site.lender.peer, nobody], lambda *each: done.append(each))
    assert done == []
    site.turn()
    assert done == [("lender", b"memory of lender", ""), ("nobody", b"", GONE)]
    assert site.lender.told == [b"memory of borrower"]
