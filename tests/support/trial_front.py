"""Where the router, the fronts and the network stand: carries what engines say to each other and to their clients."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from engine.core_types import FinishReason
from engine.messages.from_engine import PromptScored, Rejected, Token
from engine.messages.to_engine import Generate
from kvcache.block_keys import block_keys, root_key
from kvcache.pins import Retention
from loans.network import Blocks, Lender, Release, Want
from support.hand_network import Closed, Ended, HandNetwork, Stream, ToBorrower, ToLender
from support.sim_model import LAYOUT, WIDTH
from support.trial_cells import Cells
from support.trial_node import Attempt, Client, TrialNode

FAULT = "protocol error"
BAD = ("release of", "first_block", "token_ids", "keys", "adapter", "items")
"""Beginnings of what a lender says to a borrower that breaks the protocol."""


class Front:
    """Clients, their attempts, and the loans between engines."""

    has_groups = False
    """Whether a request can go on only after some blocks."""

    def __init__(self, seed: int, crowded: bool) -> None:
        self.rng = random.Random(seed)
        self.crowded = crowded
        """Every pool has room for one request, or two that will be too large, and every request wants a loan."""
        self.nodes: list[TrialNode] = []
        self.dead: list[TrialNode] = []
        self.clients: list[Client] = []
        self.attempts: dict[str, Attempt] = {}
        self.forsaken: set[str] = set()
        """Attempts that were given up while their engine could not be told; what it still says is dropped."""
        self.streams: list[Stream] = []
        self.by_network: dict[HandNetwork, TrialNode] = {}
        """All nodes that ever were."""
        self.accounted: set[str] = set()
        """Attempts whose account has come."""
        self.unaware: list[Stream] = []
        """Broken ones of which the borrower has not heard."""
        self.num_duplicates = 0
        self.garbled: list[Stream] = []
        """Those of which a message came twice or too early."""
        self.seen: Counter[str] = Counter()
        self.cells = Cells()

    def submit(self, client: Client, node: TrialNode) -> None:
        client.state = "running"
        client.attempt = request_id = f"request-{len(self.attempts)}"
        self.attempts[request_id] = Attempt(client, node, client.chain())
        node.send(self.generate(request_id))
        self.route(node)

    def generate(self, request_id: str) -> Generate:
        client = self.attempts[request_id].client
        emitted = [tuple(client.tokens.get(choice, ())) for choice in range(client.num_choices)]
        return Generate(
            request_id,
            client.prompt,
            emitted[0],
            client.sampling,
            "",
            client.priority,
            self.lender(request_id),
            emitted_others=tuple(emitted[1:]),
            finished=frozenset(client.finished),
            num_scored=len(client.scores),
            retention=self.rng.choice([None, None, Retention(30.0, "one"), Retention(5.0, "two")]),
        )

    def lender_of(self, tokens: Sequence[int], borrower: TrialNode, may_compute: bool) -> TrialNode:
        """Whom the router names: a worker that may be gone by now, and mostly the one that holds most of the chain."""
        others = [other for other in self.nodes if other is not borrower] + self.dead[-1:]
        if may_compute or self.rng.random() < 0.2:
            return self.rng.choice(others)
        keys = block_keys(root_key(borrower.core.model_fingerprint, ""), tokens, WIDTH)
        return max(others, key=lambda other: len(other.core.cached.pool.match(keys)))

    def lender(self, request_id: str) -> Lender | None:
        attempt = self.attempts[request_id]
        if not self.crowded and self.rng.random() < 0.2:
            return None
        may_compute = self.crowded or self.rng.random() < 0.7
        lender, source = self.lender_of(attempt.chain, attempt.node, may_compute), None
        if may_compute and self.rng.random() < 0.7:
            source = self.lender_of(attempt.chain, lender, may_compute=False).network.peer
        return Lender(lender.network.peer, may_compute, source)

    def receive(self, node: TrialNode) -> None:
        """What has arrived is handled: of the front, of transports and of peers, in different orders."""
        node.network.is_held = True
        if self.rng.random() < 0.5:
            node.core.handle_posted()
        node.network.is_held = self.rng.random() < 0.2
        if self.rng.random() < 0.5:
            node.core.handle_posted()
        while node.inbox:
            node.core.handle(node.inbox.popleft())
        node.network.is_held = False
        node.core.handle_posted()
        self.route(node)

    def deliver(self, stream: Stream) -> None:
        """The oldest message of one direction arrives, at the engine or only in its inbox."""
        ends: list[tuple[Callable[[], None], TrialNode]] = []
        if stream.to_lender and not (lender := self.lender_in(stream)).stopped:
            ends.append((stream.carry_to_lender, lender))
        if stream.to_borrower and not (borrower := self.borrower_in(stream)).stopped:
            ends.append((stream.carry_to_borrower, borrower))
        if not ends:
            return
        carry, node = self.rng.choice(ends)
        carry()
        if node.alive and self.rng.random() < 0.5:
            self.receive(node)

    def break_stream(self, stream: Stream) -> None:
        """Both ends learn that the stream is over, each in its time; what was under way may be lost."""
        stream.broken = True
        for queue in (stream.to_lender, stream.to_borrower):
            for _ in range(self.rng.randint(0, len(queue))):
                queue.pop()
        stream.to_lender.append(Closed())
        stream.to_borrower.append(Ended("the connection broke"))
        self.seen["broken"] += 1

    def deliverable(self) -> list[Stream]:
        return [
            stream
            for stream in self.streams
            if (stream.to_lender and not self.lender_in(stream).stopped)
            or (stream.to_borrower and not self.borrower_in(stream).stopped)
        ]

    def lender_in(self, stream: Stream) -> TrialNode:
        assert stream.lender is not None
        return self.by_network[stream.lender]

    def borrower_in(self, stream: Stream) -> TrialNode:
        return self.by_network[stream.borrower]

    def are_ends(self, stream: Stream, node: TrialNode) -> bool:
        return node.network in (stream.borrower, stream.lender)

    def said(self, node: TrialNode, stream: Stream, message: ToLender | ToBorrower) -> None:
        """An engine says something about a loan."""
        match message:
            case Want():
                self.streams.append(stream)
                if not self.lender_in(stream).alive:
                    stream.broken = True
                    stream.to_lender.clear()
                    stream.to_borrower.append(Ended("nobody answers"))
            case Release():
                self.seen["released"] += message.num_blocks
            case Blocks():
                self.seen["lent on"] += message.fetched * len(message.block_ids)
            case Ended(reason):
                assert stream in self.garbled or not reason.startswith(BAD), reason
                self.seen["refused"] += 1
                self.note_shortage(node)

    # ------------------------------------------------------------------ what engines say

    def route(self, node: TrialNode) -> None:
        """Carry what an engine said."""
        said, node.said[:] = list(node.said), []
        for message in said:
            match message:
                case Token() | PromptScored() | Rejected():
                    if message.request_id not in self.forsaken:
                        self.answer(node, message)

    def answer(self, node: TrialNode, message: Token | PromptScored | Rejected) -> None:
        """To the client, whose latest attempt this is."""
        attempt = self.attempts[message.request_id]
        client = attempt.client
        if isinstance(message, Rejected) and message.permanent and "of this id" in message.reason:
            self.num_duplicates -= 1
            return
        assert client.state == "running"
        assert client.attempt == message.request_id
        assert attempt.node is node
        match message:
            case Token():
                self.on_token(client, message)
            case PromptScored():
                client.scores += [of.logprob for of in message.logprobs]
            case Rejected():
                self.note_shortage(node)
                self.on_rejected(client, message)

    def on_token(self, client: Client, message: Token) -> None:
        tokens = client.tokens.setdefault(message.choice, [])
        tokens.append(message.token_id)
        account = message.account
        if account is not None and message.request_id in self.accounted:  # it comes again when it has changed
            self.seen["pinned"] += account.pinned_blocks
            self.seen["preempted"] += account.preemptions
        elif account is not None:
            self.accounted.add(message.request_id)
            given = account.moved_blocks + account.reused_blocks + account.restored_blocks + account.store_blocks
            if not account.preemptions and client.num_choices == 1:
                known = len(client.prompt) + len(tokens) - 1
                assert given + account.computed_blocks == LAYOUT.blocks_for(known)
                if self.has_groups:  # a state stands for many blocks; a window without a state is of no use
                    assert 0 < account.computed_tokens <= known
                else:
                    assert account.computed_tokens == known - given * WIDTH
            self.seen["moved"] += account.moved_blocks
            self.seen["reused"] += account.reused_blocks
            self.seen["restored"] += account.restored_blocks
            self.seen["from the store"] += account.store_blocks
            self.seen["store failed"] += bool(account.store_failure)
            self.seen["pinned"] += account.pinned_blocks
            self.seen["mismatched"] += account.mismatched_blocks
            self.seen["stuck"] += "no read has ended" in account.loan_failure + account.restore_failure
            self.seen["preempted"] += account.preemptions
            if not any(stream.borrower_id == message.request_id for stream in self.garbled):
                assert FAULT not in account.loan_failure, account.loan_failure
                assert not account.loan_failure.startswith(BAD), account.loan_failure
        if message.finish is not None:
            assert message.finish is FinishReason.LENGTH
            client.finished.add(message.choice)
            if len(client.finished) == client.num_choices:
                client.state = "done"
                self.seen["parted"] += client.num_choices > 1

    def on_rejected(self, client: Client, message: Rejected) -> None:
        assert not message.permanent or "the pool has" in message.reason, message.reason
        self.seen["lost blocks" if "quarantined" in message.reason else "no room"] += 1
        retry = not message.permanent and self.rng.random() < 0.7
        client.state = "new" if retry else "rejected"

    def note_shortage(self, node: TrialNode) -> None:
        """Somebody was refused room there; who has a loan meets it too."""
        for stream in self.streams:
            if self.are_ends(stream, node):
                self.cells.note("pool exhausted", stream)
        self.cells.note_restoring("pool exhausted", node)

    def stream_of(self, node: TrialNode, borrower_id: str) -> Stream:
        return next(s for s in self.streams if s.borrower is node.network and s.borrower_id == borrower_id)
