"""A few engines, their clients, and everything between them, moved by one random generator.

The harness stands where the gRPC front will: it carries what the engines say to each other, late, cut short or
never. Its transport posts a read at one moment and lets it land at another, with garbage written in between. After
every single move the books of every engine must balance.
"""

import random
from collections import Counter

from engine.keys import block_keys, root_key
from engine.messages import (
    Cancel,
    CloseLoan,
    Generate,
    Lend,
    LendClosed,
    LendReady,
    LendRefused,
    LendReleased,
    LendStarting,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
    OpenLoan,
    PromptScored,
    Rejected,
    ReleaseLoan,
    ToEngine,
    Token,
)
from engine.scheduler import StepBudget
from engine.sim.runner import prompt_logprob
from engine.vocabulary import FinishReason
from kvtransfer.transport import Pool
from support.sim_model import LAYOUT, VOCAB, WIDTH, undisturbed
from support.trial_node import Client, Node, Stream, searched

KINDS = 6 * [(1, 0)] + [(2, 0), (3, 0), (1, 2), (2, 3)]
"""Choices and beams of a request."""


class Cluster:
    """A few engines, their clients, and everything between them, moved by one random generator."""

    def __init__(
        self, seed: int, num_nodes: int = 3, faults: bool = True, crowded: bool = False, reserve: int = 256
    ) -> None:
        self.rng = random.Random(seed)
        self.reserve = reserve
        """Output tokens that admission promises blocks for; a small one makes engines preempt."""
        self.max_tokens = 6 if reserve > 6 else 12
        self.faults = faults
        self.fault_rate = self.rng.choice([0.01, 0.03, 0.06])
        self.crowded = crowded
        """Every pool has room for one request, or two that will be too large, and every request wants a loan."""
        self.crowded_length = 17 if reserve > 6 else 9
        self.pool_range = (6, 7) if crowded else self.rng.choice([(6, 10), (8, 16), (10, 24)])
        self.network: dict[bytes, Pool] = {}
        self.num_started = 0
        self.nodes = [self.new_node() for _ in range(num_nodes)]
        self.dead: list[Node] = []
        self.clients: list[Client] = []
        self.attempts: dict[str, tuple[Client, Node]] = {}
        self.streams: list[Stream] = []
        self.num_duplicates = 0
        self.seen: Counter[str] = Counter()
        trunk = self.random_tokens(28)
        self.trunks = [trunk, trunk[:9] + self.random_tokens(19)]
        self.trunks += [self.random_tokens(28) for _ in range(self.rng.randint(0, 6))]

    def random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def new_node(self) -> Node:
        rng = self.rng
        self.num_started += 1
        budget = StepBudget(rng.randint(2, 16), rng.randint(2, 12))
        name, num_blocks = f"node-{self.num_started}", rng.randint(*self.pool_range)
        return Node(self.network, name, num_blocks, budget, self.reserve)

    # ------------------------------------------------------------------ what a trial is made of

    def run(self, num_requests: int, num_moves: int) -> None:
        for _ in range(num_requests):
            length = self.crowded_length if self.crowded else self.rng.randint(1, 28)
            prompt = tuple(self.rng.choice(self.trunks)[:length])
            client = Client(prompt, self.rng.randint(1, self.max_tokens), self.rng.randint(0, 1))
            client.num_choices, client.num_beams = self.rng.choice(KINDS)
            client.scored = self.rng.random() < 0.1
            self.clients.append(client)
        for move in range(num_moves):
            self.move()
            self.check(contents=move % 8 == 0)
        self.settle()
        self.check_at_rest()

    def move(self) -> None:
        """One thing happens."""
        rng = self.rng
        nodes = [node for node in self.nodes if node.transport.posted or node.transport.busy()]
        talk = [stream for stream in self.streams if stream.to_lender or stream.to_borrower]
        new = [client for client in self.clients if client.state == "new"]
        kinds = 4 * ["step"] + 6 * ["deliver"] * bool(talk) + 3 * ["transfer"] * bool(nodes) + ["submit"] * bool(new)
        if self.faults and rng.random() < self.fault_rate:
            kinds = 3 * ["cancel"] + 4 * ["break"] + 2 * ["kill"] + ["duplicate"]
        match rng.choice(kinds):
            case "step":
                self.step(rng.choice(self.nodes))
            case "deliver":
                self.deliver(rng.choice(talk))
            case "transfer":
                self.transfer(rng.choice(nodes))
            case "submit":
                self.submit(rng.choice(new), rng.choice(self.nodes))
            case "cancel":
                self.cancel()
            case "break":
                live = [s for s in self.streams if not s.closed and not s.broken]
                if live:
                    self.break_stream(rng.choice(live), "the stream broke")
            case "kill":
                self.kill(rng.choice(self.nodes))
            case "duplicate":
                self.duplicate()

    def step(self, node: Node) -> bool:
        """Half a step: it begins, or ends. In between anything else may happen to the engine."""
        self.receive(node)
        if node.batch:
            # The runner writes at any time between the halves: here just before the end, or just after the beginning.
            sampled = node.runner.execute(node.batch) if node.sampled is None else node.sampled
            batch, node.batch = node.batch, []
            node.core.end_step(batch, sampled)
            worked = True
        else:
            node.batch = node.core.begin_step()
            node.sampled = node.runner.execute(node.batch) if self.rng.random() < 0.5 else None
            worked = bool(node.batch)
        node.core.report()
        self.route(node)
        return worked

    def submit(self, client: Client, node: Node) -> None:
        client.state = "running"
        client.attempt = request_id = f"request-{len(self.attempts)}"
        self.attempts[request_id] = client, node
        node.tell(self.generate(request_id))
        self.route(node)

    def generate(self, request_id: str) -> Generate:
        client, _ = self.attempts[request_id]
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
        )

    def transfer(self, node: Node) -> None:
        transport, rng = node.transport, self.rng
        if transport.posted and rng.random() < 0.6:
            peer = rng.choice(sorted(transport.posted))
            chance = rng.random() if self.faults else 1.0
            if chance < 0.4:
                transport.scribble(peer, rng)
            elif chance < 0.47:
                self.seen["corrupted"] += 1
                transport.land_corrupted(peer, rng)
            elif chance < 0.5:
                transport.fail(peer)
            else:
                transport.land(peer)
        elif transport.busy():
            transport.post(rng.choice(transport.busy()))

    def deliver(self, stream: Stream) -> None:
        """The oldest message of one direction arrives, at the engine or only in its inbox."""
        if stream.to_lender and (not stream.to_borrower or self.rng.random() < 0.5):
            node, message = stream.lender, stream.to_lender.popleft()
        else:
            node, message = stream.borrower, stream.to_borrower.popleft()
        if not node.alive:
            return
        node.core.post(message)
        if self.rng.random() < 0.5:
            self.receive(node)

    def receive(self, node: Node) -> None:
        node.core.handle_posted()
        self.route(node)

    # ------------------------------------------------------------------ faults

    def cancel(self) -> None:
        running = [(rid, c, n) for rid, (c, n) in self.attempts.items() if c.state == "running" and n.alive]
        if running:
            request_id, client, node = self.rng.choice(running)
            self.receive(node)  # what arrived before may have ended it
            if request_id in node.core._requests._requests:
                client.state = "cancelled"
                node.tell(Cancel(request_id))
                self.route(node)

    def duplicate(self) -> None:
        node = self.rng.choice(self.nodes)
        self.receive(node)
        if node.core._requests.num_requests:
            request_id = self.rng.choice(sorted(node.core._requests._requests))
            self.num_duplicates += 1
            node.tell(self.generate(request_id))
            self.route(node)
            assert self.num_duplicates == 0, "a request was accepted twice"

    def break_stream(self, stream: Stream, reason: str) -> None:
        """Both ends learn that the stream is over, each in its time; what was under way may be lost."""
        stream.broken = True
        for queue in (stream.to_lender, stream.to_borrower):
            for _ in range(self.rng.randint(0, len(queue))):
                queue.pop()
        stream.to_lender.append(LendClosed(stream.loan_id))
        stream.to_borrower.append(LoanFailed(stream.request_id, reason))
        self.seen["broken"] += 1

    def kill(self, node: Node) -> None:
        """The process ends; another one starts in its place, and the router sends its requests elsewhere."""
        self.seen["killed"] += 1
        node.alive = False
        node.transport.close()
        self.dead.append(node)
        self.nodes[self.nodes.index(node)] = self.new_node()
        for stream in self.streams:
            if node in (stream.borrower, stream.lender) and not stream.broken:
                self.break_stream(stream, "the peer is gone")
        for client in self.clients:
            if client.state == "running" and self.attempts[client.attempt][1] is node:
                client.state = "new"

    # ------------------------------------------------------------------ the front's part

    def route(self, node: Node) -> None:
        """Carry what an engine said."""
        said, node.said[:] = list(node.said), []
        for message in said:
            match message:
                case Token():
                    self.on_token(node, message)
                case PromptScored():
                    client, _ = self.attempts[message.request_id]
                    client.scores += [of.logprob for of in message.logprobs]
                case Rejected():
                    self.on_rejected(message)
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
                case LendStarting(loan_id, end, cached_end, _):
                    stream = self.loan(loan_id)
                    self.to_borrower(stream, LoanStarted(stream.request_id, node.endpoint, end, cached_end, 0.0))
                case LendReady(loan_id, first, block_ids, fingerprints, fetched):
                    stream = self.loan(loan_id)
                    self.seen["lent on"] += fetched * len(block_ids)
                    self.to_borrower(stream, LoanBlocks(stream.request_id, first, block_ids, fingerprints, fetched))
                case LendRefused(loan_id, reason, bad_request):
                    assert not bad_request, reason
                    self.seen["refused"] += 1
                    stream = self.loan(loan_id)
                    self.to_borrower(stream, LoanFailed(stream.request_id, reason))

    def on_token(self, node: Node, message: Token) -> None:
        client, at = self.attempts[message.request_id]
        assert client.state == "running"
        assert client.attempt == message.request_id
        assert at is node
        tokens = client.tokens.setdefault(message.choice, [])
        tokens.append(message.token_id)
        if message.account is not None:
            account = message.account
            moved, reused, computed = account.moved_blocks, account.reused_blocks, account.computed_blocks
            if not account.preemptions and client.num_choices == 1 and not client.num_beams:
                given = len(client.prompt) + len(tokens) - 1
                assert moved + reused + computed == LAYOUT.blocks_for(given)
                assert account.computed_tokens == given - (moved + reused) * WIDTH
            self.seen["moved"] += moved
            self.seen["reused"] += reused
            self.seen["mismatched"] += account.mismatched_blocks
            self.seen["preempted"] += account.preemptions
        if message.finish is not None:
            assert message.finish is FinishReason.LENGTH
            client.finished.add(message.choice)
            if len(client.finished) == client.num_choices:
                client.state = "done"
                self.seen["parted"] += client.num_choices > 1 and not client.num_beams
                self.seen["searched"] += client.num_beams > 0

    def on_rejected(self, message: Rejected) -> None:
        if message.permanent and "of this id" in message.reason:
            self.num_duplicates -= 1
            return
        assert not message.permanent or "the pool has" in message.reason, message.reason
        self.seen["lost blocks" if "quarantined" in message.reason else "no room"] += 1
        client, _ = self.attempts[message.request_id]
        assert client.state == "running"
        retry = not message.permanent and self.rng.random() < 0.7
        client.state = "new" if retry else "rejected"

    def on_open(self, node: Node, message: OpenLoan) -> None:
        others = [other for other in self.nodes if other is not node] + self.dead[-1:]
        if message.request_id in self.attempts:
            client, _ = self.attempts[message.request_id]
            tokens, priority = client.chain(), client.priority
        else:
            tokens, priority = self.loan(message.request_id).tokens, 0
        tokens = tokens[: message.end_block * WIDTH]
        lender = self.rng.choice(others)
        if not message.may_compute and self.rng.random() < 0.8:  # the router says who holds most
            keys = block_keys(root_key(node.core._model_fingerprint, ""), tokens, WIDTH)
            lender = max(others, key=lambda other: len(other.core._books.pool.match(keys)))
        stream = Stream(f"loan-{len(self.streams)}", message.request_id, node, lender, tokens)
        self.streams.append(stream)
        if not stream.lender.alive:
            stream.broken = True
            stream.to_borrower.append(LoanFailed(message.request_id, "nobody answers"))
            return
        has_source = message.may_compute and self.rng.random() < 0.7
        lend = Lend(stream.loan_id, tokens, message.first_block, "", message.may_compute, priority, borrow=has_source)
        stream.to_lender.append(lend)

    def to_borrower(self, stream: Stream, message: ToEngine) -> None:
        """To a borrower that has closed already it arrives all the same, or not."""
        if not stream.broken and (not stream.closed or self.rng.random() < 0.5):
            stream.to_borrower.append(message)

    def stream_of(self, request_id: str) -> Stream:
        return next(stream for stream in self.streams if stream.request_id == request_id)

    def loan(self, loan_id: str) -> Stream:
        return next(stream for stream in self.streams if stream.loan_id == loan_id)

    # ------------------------------------------------------------------ what must hold

    def check(self, contents: bool) -> None:
        for node in self.nodes:
            node.check()
            self.seen["quarantined"] += bool(node.core._books.pool.num_quarantined)
            self.seen["waiting preempted"] += bool(node.core._requests.residency.preempted)
            if contents:
                node.check_contents()

    def settle(self) -> None:
        """No more faults: everything under way arrives, every read ends, every client is answered."""
        self.faults = False
        for _ in range(3000):
            if not self.progress() and not self.relieve():
                return
            self.check(contents=False)
        raise AssertionError("the cluster does not come to rest")

    def progress(self) -> bool:
        moved = False
        for client in self.clients:
            if client.state == "new":
                self.submit(client, self.rng.choice(self.nodes))
                moved = True
        for stream in self.streams:
            while stream.to_lender or stream.to_borrower:
                self.deliver(stream)
                moved = True
        for node in self.nodes:
            while node.transport.posted or node.transport.busy():
                self.transfer(node)
                moved = True
            moved |= self.step(node)
        return moved or any(s.to_lender or s.to_borrower for s in self.streams)

    def relieve(self) -> bool:
        """Deadlines: engines that wait for each other's room do so until the first of the streams ends."""
        waiting = [s for s in self.streams if not s.closed and not s.broken]
        if waiting:
            self.seen["deadline"] += 1
            self.break_stream(waiting[0], "deadline")
        return bool(waiting)

    def check_at_rest(self) -> None:
        self.check(contents=True)
        for node in self.nodes:
            audited = node.core.audit()
            left = (
                audited.held_blocks,
                audited.reserved_blocks,
                audited.quarantined_blocks,
                audited.sequences,
                audited.loans,
            )
            assert left == (0, 0, 0, 0, 0), f"{node.name} holds {left} at rest"
        for client in self.clients:
            self.seen[client.state] += 1
            assert client.state in ("done", "cancelled", "rejected"), "a request was lost"
            if client.num_beams:
                assert client.tokens == (searched(client) if client.state == "done" else {}), "a wrong beam"
                continue
            for choice, tokens in client.tokens.items():
                expected = undisturbed(client.prompt, client.max_tokens, choice)
                if client.state == "done":
                    assert tokens == expected, "a wrong token"
                else:
                    assert tokens == expected[: len(tokens)], "a wrong token before the end"
            wanted = range(1, len(client.prompt) if client.scored else 1)
            scores = [prompt_logprob(undisturbed(client.prompt[:end], 1)[0]) for end in wanted]
            assert client.scores == (scores if client.state == "done" else scores[: len(client.scores)])
