"""The message of a call to the public gRPC service: read when its tenant may have it read, and parsed."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from cluster.errors import InvalidRequest
from cluster.fair_turns import FairTurns

READ_S = 60.0
"""Seconds for a message to arrive."""
_Parsed = TypeVar("_Parsed", bound=Message)


class CallMessage:
    """Message of one call, not read yet where gRPC hands over an iterator of messages.

    gRPC then holds no more of it than its flow control lets pass.
    """

    def __init__(self, raw: bytes | AsyncIterator[bytes], turns: FairTurns) -> None:
        self._raw = raw
        self._turns = turns

    async def read(self, tenant: str) -> bytes:
        """Return the bytes, once; messages of one tenant that arrive slowly keep only its own waiting.

        Raises InvalidRequest for a call without a message, or with one that is too slow.
        """
        raw, self._raw = self._raw, b""
        if isinstance(raw, bytes):
            return raw
        async with self._turns.turn(tenant):
            try:
                async with asyncio.timeout(READ_S):
                    return await anext(raw)
            except TimeoutError:
                raise InvalidRequest("request", f"did not arrive within {READ_S:g} s") from None
            except StopAsyncIteration:
                raise InvalidRequest("request", "the call has no message") from None


def parsed(kind: type[_Parsed], raw: bytes) -> _Parsed:
    """Parse a message.

    Raises InvalidRequest.
    """
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest("request", f"is not a valid {kind.DESCRIPTOR.name}: {error}") from None
