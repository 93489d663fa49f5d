"""Exchanges of an endpoint picker: in every body mode, order and split the gateway forwards what it should."""

import re
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import InvalidRequest, Overloaded
from router.frontend.envoy.exchange import Action, Answer, Event, HttpExchange, PickWanted, ResponseBegan, ResponseBytes
from router.frontend.http.errors import error_answer
from support.gateway import BUFFERED, DUPLEX, NONE, PARTIAL, STREAMED, WHOLE, Direction, Gateway, Sent, sent, split
from support.long_runs import long
from support.refusals import refusal_of

MODES = (NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX)
MAX_BODY = 300
BODY = b'{"prompt": "' + b"long " * 100 + b'"}'
BODIES = st.one_of(st.none(), st.integers(0, len(BODY)).map(lambda length: BODY[:length]))
ENDPOINTS = "10.0.0.1:8000,10.0.0.2:8000"


class Driver:
    """An exchange and its gateway, one step after the other."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.exchange = HttpExchange(MAX_BODY)
        self.wanted: list[PickWanted] = []
        self.is_picked = False
        self.events: list[Any] = []

    def send(self, direction: Direction) -> bool:
        message = self.gateway.next(direction)
        if message is not None:
            self.perform(self.exchange.receive(message))
        return message is not None

    def pick(self, body: bytes | None) -> None:
        self.is_picked = True
        self.perform(self.exchange.picked(ENDPOINTS, body))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Answer):
                self.gateway.take(action.message)
            elif isinstance(action, PickWanted):
                self.wanted.append(action)
            else:
                self.events.append(action)


def expected_body(gateway: Gateway) -> bytes | None:
    """What a pick is made from."""
    request = gateway.request
    body, too_long = request.given.body, len(request.given.body) > MAX_BODY
    if not request.given.chunks:
        return b"" if request.given.trailers and request.mode in (*WHOLE, DUPLEX) else None
    if request.mode == NONE or too_long:
        return None
    if request.mode == STREAMED:
        waits = request.at_once and "content-length" in request.headers and body
        return body if waits else None
    return body


def check_exchange(gateway: Gateway, edits: bool, data: st.DataObject) -> None:
    driver = Driver(gateway)
    wanted_body = expected_body(gateway)
    forwarded = gateway.request.given.body
    # As a gateway: the response may begin before the request was picked for, since a filter answers in its place.
    while not gateway.done:
        can = [direction for direction in (gateway.request, gateway.response) if direction.next() is not None]
        if gateway.response in can and not gateway.request.headers_sent:
            can.remove(gateway.response)
        moves: list[Any] = [*can, *(["pick"] if driver.wanted and not driver.is_picked else [])]
        assert moves, f"stuck: {gateway.request} {gateway.response}"
        move = data.draw(st.sampled_from(moves))
        if move == "pick":
            edited = None
            if edits and driver.wanted[0].body:
                edited = forwarded = driver.wanted[0].body + b" and the lender"
            driver.pick(edited)
        else:
            assert driver.send(move)
    assert [wanted.body for wanted in driver.wanted] == [wanted_body]
    gateway.check_forwarded(ENDPOINTS, forwarded)
    if gateway.response.mode != NONE:
        assert gateway.response.went_on == gateway.response.given.body
    began = driver.events[0]
    assert (type(began), began.status) == (ResponseBegan, 200)
    given, mode = gateway.response.given, gateway.response.mode
    ends = not given.chunks or mode != NONE or given.trailers
    assert driver.events.count(Event.ENDED) == ends
    if ends:
        assert driver.events[-1] is Event.ENDED
    seen = [event.body for event in driver.events if isinstance(event, ResponseBytes)]
    assert seen or not (given.body or given.headers_end)
    assert b"".join(seen) == (b"" if mode == NONE else given.body)


EXCHANGES: dict[str, Any] = {
    "request": sent(BODIES),
    "response": sent(st.one_of(st.none(), st.binary(max_size=400))),
    "modes": st.tuples(st.sampled_from(MODES), st.sampled_from(MODES)),
    "at_once": st.booleans(),
    "told": st.sampled_from((True, True, True, False)),
    "edits": st.booleans(),
    "data": st.data(),
}


def check_draw(
    request: Sent, response: Sent, modes: tuple[int, int], at_once: bool, told: bool, edits: bool, data: st.DataObject
) -> None:
    gateway = Gateway(request, response, modes if told else (DUPLEX, DUPLEX), at_once=at_once and told, told=told)
    check_exchange(gateway, edits, data)


@settings(max_examples=500)
@given(**EXCHANGES)
def test_every_order_and_split_ends_with_what_the_client_sent(**drawn: Any) -> None:
    check_draw(**drawn)


@long
@settings(max_examples=10_000)
@given(**EXCHANGES)
def test_ten_thousand_orders_and_splits(**drawn: Any) -> None:
    check_draw(**drawn)


# ---------------------------------------------------------------------------- wrong orders

ORDERS = {
    NONE: "(H|ht?)?",
    STREAMED: "(H|hb*(B|t)?)?",
    BUFFERED: "(H|h(B|b?t?))?",
    PARTIAL: "(H|h(B|b?t?))?",
    DUPLEX: "(H|hb*(B|t)?)?",
}
"""Messages of one direction that are in order; a capital letter has the end of the stream."""
PARTS = {"h": "headers", "b": "body", "t": "trailers"}


def message_of(direction: str, letter: str) -> Any:
    kind = PARTS[letter.lower()]
    part = pb.HttpTrailers() if kind == "trailers" else (pb.HttpHeaders if kind == "headers" else pb.HttpBody)()
    if letter.isupper():
        part.end_of_stream = True
    return pb.ProcessingRequest(**{f"{direction}_{kind}": part})


@given(
    st.lists(st.tuples(st.sampled_from(("request", "response")), st.sampled_from("hHbBt")), min_size=1, max_size=8),
    st.tuples(st.sampled_from(MODES), st.sampled_from(MODES)),
)
def test_a_message_at_the_wrong_time_is_named(letters: list[tuple[str, str]], modes: tuple[int, int]) -> None:
    exchange, seen = HttpExchange(MAX_BODY), {"request": "", "response": ""}
    for number, (direction, letter) in enumerate(letters):
        message = message_of(direction, letter)
        if not number:
            message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
        seen[direction] += letter
        mode = modes[0] if direction == "request" else modes[1]
        # Order matters also within what is to come: a prefix of an order is in order.
        in_order = re.fullmatch(ORDERS[mode], seen[direction]) is not None
        if not in_order:
            with refusal_of(f"{direction}_{PARTS[letter.lower()]}"):
                exchange.receive(message)
            return
        for action in exchange.receive(message):
            if isinstance(action, PickWanted):
                exchange.picked(ENDPOINTS)


def test_what_is_no_part_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no part of a request or a response"):
        HttpExchange(MAX_BODY).receive(pb.ProcessingRequest())


def test_a_mode_that_is_not_known_is_refused() -> None:
    message = message_of("request", "h")
    message.protocol_config.request_body_mode = 5
    with refusal_of("protocol_config.request_body_mode", match="FULL_DUPLEX_STREAMED, not 5"):
        HttpExchange(MAX_BODY).receive(message)


# ---------------------------------------------------------------------------- one by one


def test_an_observer_answers_nothing() -> None:
    exchange = HttpExchange(MAX_BODY)
    for letter in "hbB":
        message = message_of("request", letter)
        message.observability_mode = True
        assert exchange.receive(message) == []


def test_a_refusal_is_the_only_answer() -> None:
    gateway = Gateway(Sent(split(BODY[:200], [100])), Sent([]), (DUPLEX, DUPLEX))
    driver = Driver(gateway)
    while driver.send(gateway.request):
        pass
    assert driver.wanted[0].body == BODY[:200]
    driver.perform(driver.exchange.refused(error_answer(Overloaded("full", retry_after_s=2.0), {})))
    assert gateway.immediate.status.code == 429
    headers = {each.header.key: each.header.raw_value for each in gateway.immediate.headers.set_headers}
    assert headers["retry-after"] == b"2"
    assert headers["content-type"] == b"application/json"
    assert b"full" in gateway.immediate.body
    assert driver.exchange.receive(message_of("response", "h")) == []


@pytest.mark.parametrize(
    ("listed", "subset"),
    [
        (["10.0.0.1:8000", "10.0.0.2:8000"], {"10.0.0.1:8000", "10.0.0.2:8000"}),
        ([], set()),
        ("10.0.0.1:8000, 10.0.0.2:8000", {"10.0.0.1:8000", "10.0.0.2:8000"}),
        (None, None),
    ],
)
def test_the_subset_is_read(listed: Any, subset: Any) -> None:
    hint = {} if listed is None else {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": listed}}
    gateway = Gateway(Sent([]), Sent([]), (DUPLEX, DUPLEX), metadata=hint)
    driver = Driver(gateway)
    driver.send(gateway.request)
    assert driver.wanted[0].subset == subset


def test_the_served_endpoint_is_read() -> None:
    served = {"envoy.lb": {"x-gateway-destination-endpoint-served": "10.0.0.2:8000"}}
    gateway = Gateway(Sent([]), Sent([]), (DUPLEX, DUPLEX), metadata=served, status=502)
    driver = Driver(gateway)
    driver.send(gateway.response)  # of a filter before this one: there was no request
    assert driver.events == [ResponseBegan(502, "10.0.0.2:8000", False), ResponseBytes(), Event.ENDED]


def test_a_long_body_comes_in_pieces() -> None:
    body = bytes(range(256)) * 1000
    gateway = Gateway(Sent([body]), Sent([]), (DUPLEX, DUPLEX))
    driver = Driver(gateway)
    driver.exchange = HttpExchange(len(body))
    while driver.send(gateway.request):
        pass
    driver.pick(None)
    gateway.check_forwarded(ENDPOINTS, body)
    assert gateway.request.done
