"""Requests at the router: lines of batches, and whether it is there."""

import asyncio
import logging
from typing import Any, Self

import aiohttp

from batches.lines import LineAnswer, LineRequest
from cluster.errors import Overloaded, TandemError, Unavailable
from cluster.process.life import Drain
from cluster.process.tasks import Tasks, failure_of
from router.batches.link import HEALTH, LINE, ROUTER_SOCKET, OnBehalf, RouterLink

log = logging.getLogger(__name__)

START_GAP_S = 0.004
"""Seconds between two starts of lines. Lines that start together also end together, and then keep the router's loop
busy for a hundred milliseconds, in which interactive requests wait."""
LOOK_S = 1.0
"""Seconds between looks at the router."""
AWAY_S = 10.0
"""Seconds without an answer after which the batches are left to others: the router may hang, with lines in flight."""


class StartPace:
    """Pace of the starts of lines."""

    def __init__(self) -> None:
        self._next_at = 0.0

    async def wait(self) -> None:
        """Wait until the next line may start."""
        now = asyncio.get_running_loop().time()
        at = max(now, self._next_at)
        self._next_at = at + START_GAP_S
        await asyncio.sleep(at - now)


class RouterClient:
    """Client of one router, as an async context manager."""

    def __init__(self, link: RouterLink, look_s: float = LOOK_S, away_s: float = AWAY_S) -> None:
        self._link = link
        self._look_s, self._away_s = look_s, away_s
        self._pace = StartPace()
        self._tasks = Tasks()
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.UnixConnector(str(self._link.folder / ROUTER_SOCKET), limit=0)
        self._session = aiohttp.ClientSession("http://router", connector=connector, timeout=aiohttp.ClientTimeout())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.unwatch()
        await self._session.close()

    async def answer(self, line: LineRequest) -> LineAnswer:
        """Have the router answer a line.

        Raises Overloaded and Unavailable where another try may succeed: there is no capacity now, or no process.
        """
        await self._pace.wait()
        person = OnBehalf(tenant=line.tenant, key=line.key, deadline_s=line.deadline_s)
        key = self._link.now.key
        headers = {LINE: person.header(), "x-request-id": line.request_id, "content-type": "application/json"}
        try:
            async with self._session.post(line.endpoint, data=line.body, headers=headers | _bearer(key)) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the router gave no answer: {error!r}") from None
        if answer.status == 401 and self._link.key_now() != key:  # otherwise the key of the batch's maker is refused
            raise Unavailable("the router has started again")
        reply = body[:200].decode(errors="replace")
        if answer.status == 429:
            raise Overloaded(reply, retry_after_s=int(answer.headers.get("retry-after-ms", "0")) / 1e3)
        if answer.status == 503:
            raise Unavailable(reply)
        return LineAnswer(answer.status, body)

    def watch(self, drain: Drain) -> None:
        """Begin to follow the router: a drain begins while it is stopping, and is over while it gives no answer."""
        self._watching = self._tasks.spawn(self._watch(drain))

    async def failed(self) -> TandemError:
        """Return the error when the router cannot be watched, such as one of another version."""
        assert self._watching is not None, "it was begun"
        error = await failure_of(self._watching)
        return error if isinstance(error, TandemError) else TandemError(f"the watch over the router ended: {error!r}")

    async def unwatch(self) -> None:
        """Leave the drain as it is."""
        await self._tasks.close()

    async def _watch(self, drain: Drain) -> None:
        while True:
            try:
                headers = _bearer(self._link.now.key)
                async with asyncio.timeout(self._away_s), self._session.get(HEALTH, headers=headers) as answer:
                    state: dict[str, Any] = await answer.json() if answer.status == 200 else {}
            except (aiohttp.ClientError, OSError) as error:  # TimeoutError, too
                if not drain.over:
                    log.warning("the router gives no answer: %r", error)
                drain.end_all()
            else:
                if answer.status == 401:
                    self._link.key_now()
                elif not state.get("draining", True):
                    drain.resume()
                elif not drain.draining:
                    drain.begin()
            await asyncio.sleep(self._look_s)


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
