"""Lenders that this server knows, and which of them a request borrows from.

    configured name ──addresses──▶ servers ──probe──▶ known (its reference) ──loan failed──▶ probed again

With one known lender there is nothing to choose. Among several the one with most of the prompt's blocks lends, and
among equals the one with the fewest requests that wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster.network.kubernetes import server_url
from kvcache.block_keys import BlockKey
from loans.network import Lent, LoanNetwork, LoanTaken, Peer, Started, Want
from tandem_connector.servers import Reference, Servers

LOOK_UP_S = 5.0
"""Seconds between two look-ups of configured names."""
PROBE_AGAIN_S = 2.0
"""Seconds after a failed probe until the next one."""
WAIT_FOR_PROBE_S = 2.0
"""Seconds that a request waits for the first probe of its lenders."""
WAIT_FOR_COUNTS_S = 0.1
"""Seconds that a request waits for the answers of several lenders."""
MAX_ASKED = 16
"""Lenders that are asked about one prompt."""
MAX_SERVERS = 4096
"""Servers that are remembered, since requests may name them."""


@dataclass(slots=True, eq=False)
class Server:
    """One server."""

    url: str
    reference: Reference | None = None
    failure: str = ""
    """Why it has no reference; empty while it is probed for the first time."""
    is_probing: bool = False
    probe_at: float = 0.0


class Search:
    """Search of one request for its lender."""

    def __init__(self, candidates: Callable[[], Sequence[Server]], keys: Sequence[BlockKey], began_at: float) -> None:
        self.candidates = candidates
        self.keys = keys
        self.began_at = began_at
        self.lender: Server | None = None
        self.failure = ""
        self.asked: list[_Count] = []
        self.asked_at = 0.0

    @property
    def is_over(self) -> bool:
        return self.lender is not None or bool(self.failure)

    def end(self) -> None:
        """Close the questions that are open."""
        for count in self.asked:
            count.channel.close()
        self.asked = []


@dataclass(slots=True, eq=False)
class _Count:
    """Question to one lender how many blocks it has; implements `TakesLoan`."""

    server: Server
    channel: LoanTaken = field(init=False)
    answer: Started | None = None
    has_ended: bool = False

    def lent(self, message: Lent) -> None:
        if isinstance(message, Started):
            self.answer = message

    def ended(self, reason: str) -> None:
        self.has_ended = True


class Lenders:
    """All lenders; its methods belong to the thread of loans, or to who holds its lock."""

    def __init__(
        self, configured: Sequence[str], trusted: Sequence[str], servers: Servers, network: LoanNetwork, own: bytes
    ) -> None:
        """Create it; `own` is the incarnation of this engine, which borrows nothing from itself."""
        self._configured: dict[str, list[str]] = {url: [] for url in configured}
        """URLs of the servers behind each configured name."""
        self._trusted = set(trusted)
        self._servers = servers
        self._network = network
        self._own = own
        self._by_url: dict[str, Server] = {}
        self._look_up_at = 0.0
        self._searches: dict[Search, None] = {}
        self._num_searches = 0

    @property
    def are_configured(self) -> bool:
        return bool(self._configured)

    def search(self, keys: Sequence[BlockKey], named: str, now: float) -> Search:
        """Begin to look for the lender of a prompt: the `named` server, or with an empty name a configured one."""
        if not named:
            search = Search(self._all_configured, keys, now)
        else:
            server, failure = self._named(named)
            search = Search(lambda: [server] if server else [], keys, now)
            search.failure = failure
        self._go_on(search, now)
        if not search.is_over:
            self._searches[search] = None
        return search

    def give_up(self, search: Search) -> None:
        """End a search whose request is over."""
        self._searches.pop(search, None)
        search.end()

    def turn(self, now: float) -> None:
        """Look up and probe what is due, and go on with all searches."""
        if self._configured and now >= self._look_up_at:
            self._look_up_at = now + LOOK_UP_S
            for url in self._configured:
                self._servers.addresses(url, partial(self._looked_up, url))
        for server in self._all_configured():
            self._probe_if_due(server, now)
        for search in list(self._searches):
            self._go_on(search, now)
            if search.is_over:
                self.give_up(search)

    def failed(self, server: Server, peer: Peer, now: float) -> None:
        """Process that a loan from a server failed: perhaps another process answers there now."""
        if server.reference is not None and server.reference.peer == peer:
            server.reference = None
            server.failure = "its last loan failed"
            server.probe_at = now
            self._probe_if_due(server, now)

    def _all_configured(self) -> list[Server]:
        return [self._by_url[url] for urls in self._configured.values() for url in urls]

    def _named(self, named: str) -> tuple[Server | None, str]:
        try:
            url = server_url(named)
        except ValueError as error:
            return None, f"kv_transfer_params.lender: {error}"
        if url not in self._configured and url not in self._by_url and not self._is_trusted(url):
            return None, f"kv_transfer_params.lender: {url} is in neither lenders nor trusted_lenders"
        if url not in self._by_url and len(self._by_url) >= MAX_SERVERS:
            return None, f"kv_transfer_params.lender: {MAX_SERVERS} servers are known already"
        return self._by_url.setdefault(url, Server(url)), ""

    def _is_trusted(self, url: str) -> bool:
        host = url.split("://", 1)[1]
        return not self._trusted.isdisjoint(("*", url, host, host.rpartition(":")[0]))

    def _looked_up(self, url: str, urls: list[str]) -> None:
        if urls:  # a name that is unknown for a moment keeps its servers
            self._configured[url] = urls
            for each in urls:
                self._by_url.setdefault(each, Server(each))

    def _probe_if_due(self, server: Server, now: float) -> None:
        if server.reference is None and not server.is_probing and now >= server.probe_at:
            server.is_probing = True
            self._servers.probe(server.url, partial(self._probed, server, now))

    def _probed(self, server: Server, began_at: float, reference: Reference | None, failure: str) -> None:
        server.is_probing = False
        server.reference, server.failure = reference, failure
        server.probe_at = began_at + PROBE_AGAIN_S

    # ------------------------------------------------------------------ one search

    def _go_on(self, search: Search, now: float) -> None:
        if search.is_over:
            return
        if search.asked:
            self._count(search, now)
            return
        candidates = search.candidates()
        for server in candidates:
            self._probe_if_due(server, now)
        known = [each for each in candidates if each.reference and each.reference.peer.incarnation != self._own]
        if len(known) == 1:
            search.lender = known[0]
        elif known:
            self._ask(search, known[:MAX_ASKED], now)
        elif now - search.began_at >= WAIT_FOR_PROBE_S or (candidates and all(each.failure for each in candidates)):
            reasons = "; ".join(each.failure for each in candidates if each.failure)
            search.failure = f"no lender answers: {reasons or 'none was found'}"

    def _ask(self, search: Search, known: Sequence[Server], now: float) -> None:
        want = Want("", search.keys, 0, False, (), b"", only_counts=True)
        search.asked_at = now
        self._num_searches += 1
        start = self._num_searches % len(known)  # equals take turns
        for server in [*known[start:], *known[:start]]:
            assert server.reference is not None
            count = _Count(server)
            count.channel = self._network.open(server.reference.peer, want, count)
            search.asked.append(count)

    def _count(self, search: Search, now: float) -> None:
        answers = [(each.answer, each.server) for each in search.asked if each.answer is not None]
        is_late = now - search.asked_at >= WAIT_FOR_COUNTS_S
        if not is_late and not all(each.answer is not None or each.has_ended for each in search.asked):
            return
        for count in search.asked:
            if count.has_ended and count.server.reference is not None:
                self.failed(count.server, count.server.reference.peer, now)
        usable = [(answer, server) for answer, server in answers if server.reference is not None]
        search.end()
        if usable:
            _, search.lender = max(usable, key=lambda each: (each[0].cached_end_block, -each[0].num_waiting))
        else:
            search.failure = "no lender answered in time"
