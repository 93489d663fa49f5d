"""Tokens of a step as columns, and how the front gives them to the requests they belong to."""

import asyncio
import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import StartError
from engine.core_types import FinishReason, TokenLogprobs
from engine.messages.from_engine import StepTokens, Token
from engine.messages.to_engine import ToEngine
from engine.process.front.engine_client import EngineClient, EngineHost, EngineListener, EngineMessage, RequestListener
from loans.account import KvAccount

NAMES = ("a", "b", "c")
TOKENS = st.builds(
    Token,
    st.sampled_from(NAMES),
    st.integers(0, 99),
    logprobs=st.none() | st.just(TokenLogprobs(-1.0, (3,), (-1.0,))),
    account=st.none() | st.just(KvAccount(reused_blocks=2)),
    finish=st.none() | st.sampled_from(FinishReason),
    choice=st.integers(0, 3),
    drafted=st.sampled_from([0, 0, 2]),
    followed_draft=st.booleans(),
)
PLAIN = st.tuples(st.sampled_from(NAMES), st.integers(0, 99), st.sampled_from([0, 0, 1, 5])).map(
    lambda drawn: Token(*drawn[:2], choice=drawn[2])
)


class NoEngine(EngineHost):
    def start(self, listener: EngineListener) -> None: ...

    def send(self, messages: Sequence[ToEngine]) -> None: ...

    async def stop(self) -> None: ...

    def processes(self) -> Sequence[int]:
        return ()


class Heard(RequestListener):
    """A request, and what it is told."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.messages: list[EngineMessage] = []

    def on_token(self, token_id: int, choice: int) -> None:
        self.messages.append(Token(self._name, token_id, choice=choice))

    def on_message(self, message: EngineMessage) -> None:
        self.messages.append(message)


def columns_of(tokens: Sequence[Token]) -> StepTokens:
    step = StepTokens.none()
    for token in tokens:
        if token == Token(token.request_id, token.token_id, choice=token.choice):
            step.add_plain(token.request_id, token.token_id, token.choice)
        else:
            step.add(token)
    return step


@given(st.lists(TOKENS | PLAIN))
def test_columns_have_all_that_is_told_of_tokens(tokens: list[Token]) -> None:
    step = columns_of(tokens)
    assert list(step.each()) == list(pickle.loads(pickle.dumps(step)).each()) == tokens
    assert set(step.details).isdisjoint(step.choices)


@given(st.lists(st.lists(TOKENS | PLAIN, max_size=9), max_size=4), st.sets(st.sampled_from(NAMES)))
async def test_each_request_is_told_of_its_tokens_in_order(steps: list[list[Token]], present: set[str]) -> None:
    """Of one that is not listened to any more, nobody is told."""
    client = EngineClient(NoEngine())
    requests = {name: Heard(name) for name in NAMES}
    for name, request in requests.items():
        client.listen(name, request)
    for name in set(NAMES) - present:
        client.forget(name)
    for tokens in steps:
        client.on_messages([columns_of(tokens)])
    for name, request in requests.items():
        told = [token for tokens in steps for token in tokens if token.request_id == name and name in present]
        assert request.messages == told


async def test_a_request_is_told_of_its_engines_end_at_once_or_later() -> None:
    client, early, late = EngineClient(NoEngine()), Heard("a"), Heard("b")
    starting = asyncio.ensure_future(client.start())
    await asyncio.sleep(0)
    client.listen("a", early)
    client.on_messages([columns_of([Token("a", 1)])])
    client.ended("killed")
    with pytest.raises(StartError, match="killed"):
        await starting
    client.listen("b", late)
    assert early.messages == [Token("a", 1), None]
    assert late.messages == [None]
