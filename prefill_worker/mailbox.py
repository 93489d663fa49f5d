"""What the engine and a borrower have said of one loan, and its service has not read yet."""

from collections import deque
from typing import TypeVar

from cluster.waker import Waker
from engine.messages import LendClosed
from engine.worker.engine_client import Letter

_L = TypeVar("_L")


class Mailbox:
    """For one reader. LendClosed: the borrower is done. None: the engine is gone."""

    def __init__(self) -> None:
        self._letters: deque[Letter | LendClosed] = deque()
        self._waker = Waker()

    def put(self, letter: Letter | LendClosed) -> None:
        self._letters.append(letter)
        self._waker.wake()

    async def get(self) -> Letter | LendClosed:
        while not self._letters:
            await self._waker.sleep()
        return self._letters.popleft()

    def take_if(self, kind: type[_L]) -> _L | None:
        """What comes next, if it is there and of that kind."""
        if self._letters and isinstance(letter := self._letters[0], kind):
            self._letters.popleft()
            return letter
        return None
