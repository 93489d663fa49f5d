"""Where the gRPC fronts and the router stand: carries what engines say to each other and to their clients."""

import random
from collections import Counter

from engine.core_types import FinishReason
from engine.messages.from_engine import (
    CloseLoan,
    LendReady,
    LendRefused,
    LendStarting,
    OpenLoan,
    PromptScored,
    Rejected,
    ReleaseLoan,
    Token,
)
from engine.messages.to_engine import (
    Generate,
    Lend,
    LendClosed,
    LendReleased,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
    ToEngine,
)
from kvcache.block_keys import block_keys, root_key
from kvcache.pins import Retention
from support.sim_model import LAYOUT, WIDTH
from support.trial_cells import Cells
from support.trial_node import Attempt, Client, Stream, TrialNode


class Front:
    """Clients, their attempts, and the streams of loans."""

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
        self.accounted: set[str] = set()
        """Attempts whose account has come."""
        self.num_duplicates = 0
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
        borrow = self.crowded or self.rng.random() < 0.8
        emitted = [tuple(client.tokens.get(choice, ())) for choice in range(client.num_choices)]
        return Generate(
            request_id,
            client.prompt,
            emitted[0],
            client.sampling,
            "",
            client.priority,
            borrow,
            emitted_others=tuple(emitted[1:]),
            finished=frozenset(client.finished),
            num_scored=len(client.scores),
            lender_computes=self.crowded or self.rng.random() < 0.7,
            retention=self.rng.choice([None, None, Retention(30.0, "one"), Retention(5.0, "two")]),
        )

    def receive(self, node: TrialNode) -> None:
        """What has arrived is handled, what transports have done and what peers say in either order."""
        if node.link is not None:
            node.link.hand_on(self.rng.randint(0, 3), self.rng)
        if self.rng.random() < 0.5:
            node.core.handle_posted()
        while node.inbox:
            node.core.handle(node.inbox.popleft())
        node.core.handle_posted()
        self.route(node)

    def deliver(self, stream: Stream) -> None:
        """The oldest message of one direction arrives, at the engine or only in its inbox."""
        ends = [
            (queue, node)
            for queue, node in ((stream.to_lender, stream.lender), (stream.to_borrower, stream.borrower))
            if queue and not node.stopped
        ]
        if not ends:
            return
        queue, node = self.rng.choice(ends)
        message = queue.popleft()
        if not node.alive:
            return
        stream.asked |= isinstance(message, Lend)
        node.inbox.append(message)
        if self.rng.random() < 0.5:
            self.receive(node)

    def break_stream(self, stream: Stream) -> None:
        """Both ends learn that the stream is over, each in its time; what was under way may be lost."""
        stream.broken = True
        for queue in (stream.to_lender, stream.to_borrower):
            for _ in range(self.rng.randint(0, len(queue))):
                queue.pop()
        stream.to_lender.append(LendClosed(stream.loan_id))
        stream.to_borrower.append(LoanFailed(stream.request_id, "the stream broke"))
        self.seen["broken"] += 1

    def deliverable(self) -> list[Stream]:
        return [
            stream
            for stream in self.streams
            if (stream.to_lender and not stream.lender.stopped) or (stream.to_borrower and not stream.borrower.stopped)
        ]

    # ------------------------------------------------------------------ what engines say

    def route(self, node: TrialNode) -> None:
        """Carry what an engine said."""
        said, node.said[:] = list(node.said), []
        for message in said:
            match message:
                case Token() | PromptScored() | Rejected():
                    if message.request_id not in self.forsaken:
                        self.answer(node, message)
                case OpenLoan():
                    self.on_open(node, message)
                case ReleaseLoan(request_id, first, count):
                    stream = self.stream_of(request_id)
                    self.seen["released"] += count
                    stream.to_lender.append(LendReleased(stream.loan_id, first, count))
                case CloseLoan(request_id):
                    stream = self.stream_of(request_id)
                    assert not stream.closed, "a loan was closed twice"
                    stream.closed = True
                    stream.to_lender.append(LendClosed(stream.loan_id))
                case LendStarting(loan_id, end, cached_end, queued_ms):
                    stream = self.loan(loan_id)
                    self.to_borrower(stream, LoanStarted(stream.request_id, node.endpoint, end, cached_end, queued_ms))
                case LendReady(loan_id, first, block_ids, fingerprints, fetched):
                    stream = self.loan(loan_id)
                    self.seen["lent on"] += fetched * len(block_ids)
                    self.to_borrower(stream, LoanBlocks(stream.request_id, first, block_ids, fingerprints, fetched))
                case LendRefused(loan_id, reason, bad_request):
                    assert not bad_request, reason
                    self.seen["refused"] += 1
                    self.note_shortage(node)
                    stream = self.loan(loan_id)
                    self.to_borrower(stream, LoanFailed(stream.request_id, reason))

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
            assert "early" not in account.loan_failure, account.loan_failure
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
            if node in (stream.borrower, stream.lender):
                self.cells.note("pool exhausted", stream)
        self.cells.note_restoring("pool exhausted", node)

    def on_open(self, node: TrialNode, message: OpenLoan) -> None:
        others = [other for other in self.nodes if other is not node] + self.dead[-1:]
        if message.request_id in self.attempts:
            attempt = self.attempts[message.request_id]
            tokens, priority = attempt.chain, attempt.client.priority
        else:
            tokens, priority = self.loan(message.request_id).tokens, 0
        tokens = tokens[: message.end_block * WIDTH]
        lender = self.rng.choice(others)
        if not message.may_compute and self.rng.random() < 0.8:  # the router says who holds most
            keys = block_keys(root_key(node.core._model_fingerprint, ""), tokens, WIDTH)
            lender = max(others, key=lambda other: len(other.core._cached.pool.match(keys)))
        stream = Stream(f"loan-{len(self.streams)}", message.request_id, node, lender, tokens)
        self.streams.append(stream)
        if not stream.lender.alive:
            stream.broken = True
            stream.to_borrower.append(LoanFailed(message.request_id, "nobody answers"))
            return
        has_source = message.may_compute and self.rng.random() < 0.7
        lend = Lend(stream.loan_id, tokens, message.first_block, "", message.may_compute, priority, borrow=has_source)
        stream.to_lender.append(lend._replace(fast_path=message.fast_path))

    def to_borrower(self, stream: Stream, message: ToEngine) -> None:
        """To a borrower that has closed already it arrives all the same, or not."""
        if not stream.broken and (not stream.closed or self.rng.random() < 0.5):
            stream.to_borrower.append(message)

    def stream_of(self, request_id: str) -> Stream:
        return next(stream for stream in self.streams if stream.request_id == request_id)

    def loan(self, loan_id: str) -> Stream:
        return next(stream for stream in self.streams if stream.loan_id == loan_id)
