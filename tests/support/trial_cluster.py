"""A few engines, their clients, and everything between them, moved by one random generator.

The harness stands where the fronts and the network are: it carries what the engines say to each other, late, twice, in
the wrong order, cut short or never. Its transport posts a read at one moment and lets it land at another, with garbage
written in between. After every single move the books of every engine must balance. Time is the number of moves.
"""

import math
from collections.abc import Sequence
from functools import partial

from engine.backends.sim.runner import prompt_logprob
from engine.core_types import StepBudget
from kvtransfer.transport import Pool
from support.hand_network import HandNetwork
from support.memory_objects import MemoryObjects
from support.sim_model import VOCAB, undisturbed
from support.trial_cells import lender_state
from support.trial_faults import Faults
from support.trial_node import Client, Node, TrialNode

NUM_CHOICES = 6 * [1] + [2, 3]
"""Choices of a request."""
FAULTS = [
    *4 * ["cancel"],
    *4 * ["cut"],
    *2 * ["kill"],
    *3 * ["stop"],
    *2 * ["give away"],
    *2 * ["delay"],
    "exhaust",
    *3 * ["damage local store"],
    *3 * ["damage store"],
    "duplicate",
    *2 * ["double"],
    *6 * ["reorder"],
]
"""By how often they are drawn."""
STUCK_MOVES = 25.0
"""In half of the trials a loan of which nothing has come for so many moves is given up."""


class Cluster(Faults):
    """One trial."""

    has_scores = True
    """Whether its engines score prompts."""

    def __init__(
        self, seed: int, num_nodes: int = 3, faults: bool = True, crowded: bool = False, reserve: int = 256
    ) -> None:
        super().__init__(seed, crowded)
        self.seed = seed
        self.reserve = reserve
        """Output tokens that admission promises blocks for; a small one makes engines preempt."""
        self.max_tokens = 6 if reserve > 6 else 12
        self.faults = faults
        self.read_silence = STUCK_MOVES if faults and seed % 2 else math.inf
        self.fault_rate = self.rng.choice([0.025, 0.05, 0.1])
        self.one_sided = self.rng.random() < 0.5
        """Reads from a stopped process end all the same, as over shared memory."""
        self.crowded_length = 17 if reserve > 6 else 9
        self.pool_range = (6, 7) if crowded else self.rng.choice([(6, 10), (8, 16), (10, 24)])
        self.network: dict[bytes, Pool] = {}
        self.engines: dict[bytes, HandNetwork] = {}
        self.num_started = 0
        self.now = 0
        self.objects = MemoryObjects(self.rng.choice([1, 3, 8]), self.rng.choice([20, 1000])) if seed % 5 < 3 else None
        """The store that all nodes share, in three fifths of the trials."""
        self.restoring: list[TrialNode] = []
        """Whose store is in the middle of a read, the innermost last."""
        self.nodes = [self.new_node() for _ in range(num_nodes)]
        trunk = self.random_tokens(28)
        self.trunks = [trunk, trunk[:9] + self.random_tokens(19)]
        self.trunks += [self.random_tokens(28) for _ in range(self.rng.randint(0, 6))]

    def random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def new_node(self) -> TrialNode:
        rng = self.rng
        self.num_started += 1
        budget = StepBudget(rng.randint(2, 16), rng.randint(2, 12))
        name, num_blocks = f"node-{self.num_started}", rng.randint(*self.pool_range)
        local_blocks = rng.choice([0, 12, 40])
        local = MemoryObjects(rng.choice([1, 3, 8]), local_blocks) if local_blocks else None
        on_gpu = (self.seed + self.num_started) % 3 == 0
        node = self.open_node(name, num_blocks, budget, local, on_gpu)
        self.by_network[node.network] = node
        node.network.on_said = partial(self.said, node)
        node.interrupted = lambda: self.in_mid_restore(node)
        return node

    def open_node(
        self,
        name: str,
        num_blocks: int,
        budget: StepBudget,
        local: MemoryObjects | None,
        on_gpu: bool,
    ) -> TrialNode:
        silence_s, objects = self.read_silence, self.objects
        return Node(
            self.network, name, num_blocks, budget, self.reserve, local, silence_s, self.clock, objects, on_gpu,
            self.engines,
        )  # fmt: skip

    def clock(self) -> float:
        return float(self.now)

    # ------------------------------------------------------------------ what a trial is made of

    def run(self, num_requests: int, num_moves: int) -> None:
        for _ in range(num_requests):
            length = self.crowded_length if self.crowded else self.rng.randint(1, 28)
            prompt = tuple(self.rng.choice(self.trunks)[:length])
            client = Client(prompt, self.rng.randint(1, self.max_tokens), self.rng.randint(0, 1))
            client.num_choices = self.rng.choice(NUM_CHOICES)
            client.scored = self.has_scores and self.rng.random() < 0.1
            if self.faults and self.rng.random() < 0.15:
                client.deadline = self.rng.randint(1, num_moves)
            self.clients.append(client)
        while self.now < num_moves:
            self.move()
            self.check(contents=self.now % 8 == 0)
        self.settle()
        self.check_at_rest()

    def move(self) -> None:
        """One thing happens."""
        rng = self.rng
        self.now += 1
        self.expire(self.now)
        if self.faults and rng.random() < self.fault_rate:
            self.fault(rng.choice(FAULTS))
            return
        awake, talk = self.awake, self.deliverable()
        transports = [node for node in awake if node.transport.posted or node.transport.busy()]
        new = [client for client in self.clients if client.state == "new"]
        stopped = [node for node in self.nodes if node.stopped]
        kinds = 4 * ["step"] + 6 * ["deliver"] * bool(talk) + 3 * ["transfer"] * bool(transports)
        stores = [node for node in awake if node.stores and node not in self.restoring]
        kinds += ["submit"] * bool(new) + 8 * ["store"] * bool(stores)
        borrowing = [node for node in awake if node.core.borrower_manager.num_loans]
        kinds += ["quiet"] * bool(self.faults and borrowing and rng.random() < 0.1)
        arrived = [node for node in awake if node.verifying.waiting]
        kinds += ["verify"] * bool(arrived)
        kinds += ["silence", "wake"] * bool(stopped) + ["notice end"] * bool(self.unaware)
        match rng.choice(kinds):
            case "step":
                self.step(rng.choice(awake))
            case "deliver":
                self.deliver(rng.choice(talk))
            case "transfer":
                self.transfer(rng.choice(transports), rng, self.faults, self.now)
            case "submit":
                self.submit(rng.choice(new), rng.choice(awake))
            case "store":
                self.use_store(rng.choice(stores))
            case "verify":
                self.verify(rng.choice(arrived))
            case "silence":
                self.notice_silence()
            case "wake":
                self.wake()
            case "quiet":
                self.be_quiet(rng.choice(borrowing))
            case "notice end":
                self.notice_end(rng.choice(self.unaware))

    def fault(self, kind: str) -> None:
        match kind:
            case "cancel":
                self.cancel()
            case "cut":
                self.cut()
            case "kill":
                self.kill(self.rng.choice(self.nodes))
            case "stop":
                self.stop()
            case "give away":
                self.give_away()
            case "delay":
                self.delay(self.now)
            case "exhaust":
                self.exhaust(self.rng.choice(self.awake))
            case "damage local store":
                self.damage_local_store()
            case "damage store":
                self.damage_store()
            case "duplicate":
                self.duplicate()
            case "double" | "reorder":
                self.garble(kind)

    def step(self, node: TrialNode) -> bool:
        """Part of a step. In between anything else may happen to the engine."""
        self.receive(node)
        worked = node.turn(self.rng)
        node.core.report()
        self.route(node)
        return worked

    def use_store(self, node: TrialNode) -> bool:
        """A store reads or writes once; in the middle of a copy into the pool, `in_mid_restore` is called."""
        self.restoring.append(node)
        worked = any(store.step() for store in self.rng.sample(node.stores, len(node.stores)))
        self.restoring.remove(node)
        return worked

    def verify(self, node: TrialNode) -> None:
        """All blocks that arrived in its GPU's memory are verified."""
        assert node.core.own_rank is not None
        verifier = node.core.own_rank.batch_verifier
        self.seen["verified together"] += len(verifier.waiting) > 1
        self.seen["withdrawn before verified"] += any(arrival.withdrawn for arrival in verifier.waiting)
        node.verifying.step()

    def in_mid_restore(self, node: TrialNode) -> None:
        """Half of a block has been written. Its engine's loop turns meanwhile, and so does everybody else's."""
        if not node.alive:
            return
        node.check()
        if not self.faults or self.rng.random() < 0.5 or len(self.restoring) > 2:
            return
        self.cells.note_restoring("completion delayed", node)
        for _ in range(self.rng.randint(1, 6)):
            self.move()
            self.check(contents=False)
        block = node.writing
        if node.alive and block in node.quarantined:
            self.seen["store wrote late"] += 1
            self.cells.counts["late write", "borrower", "over"] += 1

    def is_out_of_reach(self, peer: str) -> bool:
        return not self.one_sided and any(node.name == peer and node.stopped for node in self.nodes)

    # ------------------------------------------------------------------ what must hold

    def check(self, contents: bool) -> None:
        for node in self.nodes:
            node.check()
            self.seen["quarantined"] += bool(node.core.cached.pool.num_quarantined)
            self.seen["hedged and reading"] += any(s.held_at is not None for s in node.core.requests.sequences)
            self.seen["waiting preempted"] += bool(node.core.requests.running_set.preempted)
            if contents:
                node.check_contents()

    def settle(self) -> None:
        """No more faults: everything under way arrives, every read ends, every client is answered."""
        self.faults = False
        if self.objects is not None:
            self.objects.broken = False
        while any(node.stopped for node in self.nodes):
            self.wake()
        for client in self.clients:
            client.deadline = float("inf")
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
        for stream in [*self.unaware]:
            self.notice_end(stream)
        for stream in self.streams:
            while stream.to_lender or stream.to_borrower:
                self.deliver(stream)
                moved = True
        for node in self.nodes:
            while node.transport.posted or node.transport.busy():
                self.transfer(node, self.rng, faults=False, now=self.now)
                moved = True
            while node.verifying.waiting:
                self.verify(node)
                moved = True
            while self.use_store(node):
                moved = True
            moved |= self.step(node)
        moved |= any(node.transport.busy() for node in self.nodes)
        moved |= any(store.is_busy for node in self.nodes for store in node.stores)
        return moved or any(s.to_lender or s.to_borrower for s in self.streams)

    def relieve(self) -> bool:
        """Deadlines: engines that wait for each other's room do so until the first of the streams ends."""
        live = [stream for stream in self.streams if not stream.over]
        waiting = [stream for stream in live if lender_state(stream) == "queued"]
        assert bool(waiting) == bool(live), "a loan hangs that waits for nobody's room"
        if waiting:
            self.seen["relieved"] += 1
            self.break_stream(waiting[0])
        return bool(waiting)

    def check_at_rest(self) -> None:
        self.check(contents=True)
        for node in self.nodes:
            node.check_at_rest()
        for client in self.clients:
            self.seen[client.state] += 1
            assert client.state in ("done", "cancelled", "expired", "rejected"), "a request was lost"
            self.check_answer(client)

    def check_answer(self, client: Client) -> None:
        """It is that of an engine which nothing disturbed, or the beginning of it."""
        done = client.state == "done"
        for choice, tokens in client.tokens.items():
            expected = self.undisturbed(client.prompt, client.max_tokens, choice)
            assert tokens == expected[: None if done else len(tokens)], "a wrong token"
        wanted = range(1, len(client.prompt) if client.scored else 1)
        scores = [prompt_logprob(self.undisturbed(client.prompt[:end], 1, 0)[0]) for end in wanted]
        assert client.scores == (scores if done else scores[: len(client.scores)])

    def undisturbed(self, prompt: Sequence[int], max_tokens: int, choice: int) -> list[int]:
        """What the model answers when nothing disturbs it."""
        return undisturbed(prompt, max_tokens, choice)
