"""What may go wrong in a trial."""

import math
import random
from collections import deque
from typing import Any

from engine.messages.to_engine import Cancel
from loans.loan import LenderSource
from loans.network import Want
from loans.store import StoreSource
from support.hand_network import Closed, Ended, Stream
from support.memory_objects import MemoryObjects, StepStore
from support.trial_cells import borrower_state, lender_state
from support.trial_front import Front
from support.trial_node import Client, TrialNode


class Faults(Front):
    """Each fault by itself, drawn by the trial's random generator, and noted with the states that it met."""

    objects: MemoryObjects | None

    def new_node(self) -> TrialNode:
        raise NotImplementedError

    def step(self, node: TrialNode) -> bool:
        raise NotImplementedError

    def random_tokens(self, count: int) -> list[int]:
        raise NotImplementedError

    @property
    def awake(self) -> list[TrialNode]:
        return [node for node in self.nodes if not node.stopped]

    # ------------------------------------------------------------------ clients that go

    def give_up(self, client: Client, state: str, fault: str) -> None:
        """The client goes away; its engine is told, or finds it in its inbox when it wakes."""
        if client.state == "running":
            request_id, node = client.attempt, self.attempts[client.attempt].node
            if not node.stopped:
                self.receive(node)  # what arrived before may have ended it
                if client.state != "running":
                    return
            for stream in self.streams:
                if stream.borrower is node.network and stream.borrower_id == request_id:
                    self.cells.note(fault, stream)
            self.cells.note_restoring(fault, node, request_id)
            self.forsaken.add(request_id)
            node.send(Cancel(request_id))
            assert node.stopped or request_id not in node.core.requests.by_id, "a request outlives its client"
            self.route(node)
        client.state = state

    def cancel(self) -> None:
        running = [client for client in self.clients if client.state == "running"]
        if running:
            self.give_up(self.rng.choice(running), "cancelled", "cancelled")

    def expire(self, now: int) -> None:
        """Whose deadline has passed is answered, wherever it is."""
        for client in self.clients:
            if client.deadline < now and client.state in ("new", "running"):
                self.give_up(client, "expired", "deadline")

    def duplicate(self) -> None:
        """A request arrives a second time at the engine that has it."""
        node = self.rng.choice(self.awake)
        self.receive(node)
        if node.core.requests.num_requests:
            request_id = self.rng.choice(sorted(node.core.requests.by_id))
            self.num_duplicates += 1
            node.send(self.generate(request_id))
            self.route(node)
            assert self.num_duplicates == 0, "a request was accepted twice"

    # ------------------------------------------------------------------ processes and connections

    def cut(self) -> None:
        live = [stream for stream in self.streams if not stream.over or (not stream.broken and self.rng.random() < 0.1)]
        if live:
            stream = self.rng.choice(live)
            self.cells.note("connection cut", stream)
            self.break_stream(stream)

    def garble(self, kind: str) -> None:
        """A message comes twice, or before the one ahead of it. A loan has nothing wrong in it, or ends."""
        places: list[tuple[Stream, deque[Any], int]] = [
            (stream, queue, place)
            for stream in self.streams
            for queue in (stream.to_lender, stream.to_borrower)
            for place, message in enumerate(queue)
            if not isinstance(message, Want) and (kind == "double" or _may_swap(queue[place - 1], message, place))
        ]
        if not places:
            return
        stream, queue, place = self.rng.choice(places)
        self.cells.note("message doubled" if kind == "double" else "messages reordered", stream)
        self.garbled.append(stream)
        self.seen[kind] += 1
        if kind == "double":
            queue.insert(place, queue[place])
        else:
            queue[place - 1], queue[place] = queue[place], queue[place - 1]

    def kill(self, node: TrialNode) -> None:
        """The process ends; another one starts in its place, and the router sends its requests elsewhere."""
        self.seen["killed"] += 1
        self._note_process(node, "killed")
        node.alive = False
        node.stopped = False
        node.transport.close()
        self.dead.append(node)
        self.nodes[self.nodes.index(node)] = self.new_node()
        for stream in self.streams:
            if self.are_ends(stream, node) and not stream.broken:
                self.break_stream(stream)
        self._move_requests(node)

    def stop(self) -> None:
        """A process does nothing for a while; those that it talks to do not know yet."""
        if len(self.awake) > 1:
            node = self.rng.choice(self.awake)
            self.seen["stopped"] += 1
            self._note_process(node, "stopped")
            node.stopped = True

    def notice_silence(self) -> None:
        """Somebody gives up a stopped process: the other end of a stream, or the router."""
        node = self.rng.choice([node for node in self.nodes if node.stopped])
        streams = [s for s in self.streams if self.are_ends(s, node) and not s.broken]
        if streams and self.rng.random() < 0.7:
            self.break_stream(self.rng.choice(streams))
        else:
            self._move_requests(node)

    def be_quiet(self, node: TrialNode) -> None:
        """A borrower hears that a lender has been silent for long, whether that is so or not."""
        loan_id = self.rng.choice(sorted(node.core.borrower_manager.loans))
        loan = node.core.borrower_manager.loans[loan_id]
        loan.heard_at = -math.inf
        if isinstance(loan.source, LenderSource):
            self.stream_of(node, loan_id).quiet_for_s = 1e6
        node.core.report()
        self.seen["hedged"] += any(chain.hedged for chain in node.core.requests.sequences)
        self.route(node)

    def wake(self) -> None:
        """It goes on with what it thinks it holds, before it hears what has happened meanwhile."""
        node = self.rng.choice([node for node in self.nodes if node.stopped])
        self.seen["woken"] += 1
        node.stopped = False
        inbox, arrived = list(node.inbox), list(node.network.arrived)
        node.inbox.clear()
        node.network.arrived.clear()
        for _ in range(self.rng.randint(0, 3)):
            self.step(node)
        node.inbox.extendleft(reversed(inbox))
        node.network.arrived.extendleft(reversed(arrived))

    def _move_requests(self, node: TrialNode) -> None:
        """The router places what ran there anew."""
        for client in self.clients:
            if client.state == "running" and self.attempts[client.attempt].node is node:
                self.forsaken.add(client.attempt)
                client.state = "new"
                if node.alive:
                    node.send(Cancel(client.attempt))

    def _note_process(self, node: TrialNode, what: str) -> None:
        for stream in self.streams:
            if stream.borrower is node.network:
                self.cells.note(f"borrower {what}", stream)
            if stream.lender is node.network:
                self.cells.note(f"lender {what}", stream)
        self.cells.note_restoring(f"borrower {what}", node)

    # ------------------------------------------------------------------ room, and blocks given away

    def exhaust(self, node: TrialNode) -> None:
        """Somebody else's request takes all the room that is left, and evicts what is cached."""
        num_blocks = node.core.cached.pool.num_available
        if num_blocks > 0:
            prompt = tuple(self.random_tokens(node.tokens_for(num_blocks) - 1))
            client = Client(prompt, 1, 2)
            self.clients.append(client)
            self.submit(client, node)
        if node.core.cached.pool.num_available <= 0:
            self.seen["exhausted"] += 1
            self.note_shortage(node)

    def give_away(self) -> None:
        """The lender hears that a stream is over and gives its blocks to others; the borrower has not noticed."""
        reads = [(node, read) for node in self.awake for read in node.transport.posted.values()]
        streams = [self.stream_of(node, str(read.flow)) for node, read in reads]
        streams = [s for s in streams if not s.over and self.lender_in(s) in self.awake]
        if not streams:
            return
        stream = self.rng.choice(streams)
        self.cells.note("connection cut", stream)
        self.seen["given away"] += 1
        stream.broken = True
        stream.to_lender.clear()
        self.unaware.append(stream)
        lender = self.lender_in(stream)
        lender.network.arrived.append((stream, Closed()))
        self.receive(lender)
        self.exhaust(lender)
        for _ in range(8):
            self.step(lender)

    def notice_end(self, stream: Stream) -> None:
        self.unaware.remove(stream)
        stream.to_borrower.append(Ended("the connection broke a while ago"))

    # ------------------------------------------------------------------ bytes

    def transfer(self, node: TrialNode, rng: random.Random, faults: bool, now: int) -> None:
        """A read is posted, writes a little, is done, or fails."""
        transport = node.transport
        if transport.posted and rng.random() < 0.6:
            peer = rng.choice(sorted(transport.posted))
            chance = rng.random() if faults else 1.0
            if faults and (transport.stalled_until.get(peer, 0) > now or self.is_out_of_reach(peer)):
                chance *= 0.4
            self._note_late(node, peer)
            if chance < 0.4:
                transport.scribble(peer, rng)
            elif chance < 0.47:
                self.seen["corrupted"] += 1
                self.cells.note("bytes corrupted", self.stream_of(node, str(transport.posted[peer].flow)))
                transport.land_corrupted(peer, rng)
            elif chance < 0.5:
                transport.fail(peer)
            else:
                transport.land(peer)
        elif transport.busy():
            transport.post(rng.choice(transport.busy()))

    def is_out_of_reach(self, peer: str) -> bool:
        """Its process is stopped, and the link needs it to take part."""
        raise NotImplementedError

    def _note_late(self, node: TrialNode, peer: str) -> None:
        stream = self.stream_of(node, str(node.transport.posted[peer].flow))
        if borrower_state(stream) == "over":
            self._note_always("late write", stream)
        if self.lender_in(stream).alive and lender_state(stream) == "over":
            self._note_always("late read", stream)

    def _note_always(self, fault: str, stream: Stream) -> None:
        """Also when both sides are over for good."""
        self.cells.counts[fault, "borrower", borrower_state(stream)] += 1
        if (lender := lender_state(stream)) is not None:
            self.cells.counts[fault, "lender", lender] += 1

    def delay(self, now: int) -> None:
        """A posted read does not end for a long while."""
        posted = [(node, peer) for node in self.awake for peer in sorted(node.transport.posted)]
        if posted:
            node, peer = self.rng.choice(posted)
            node.transport.stalled_until[peer] = now + self.rng.randint(20, 100)
            self._note_always("completion delayed", self.stream_of(node, str(node.transport.posted[peer].flow)))

    def damage_local_store(self) -> None:
        """An object in the memory of a host is damaged."""
        stores = [store for node in self.awake for store in node.stores if store.is_local]
        if not stores:
            return
        store = self.rng.choice(stores)
        assert isinstance(store.objects, MemoryObjects)
        if store.objects.stored:
            self.seen["local store damaged"] += 1
            self.damage(store.objects, is_local=True)

    def damage_store(self) -> None:
        """An object of the shared store is damaged, or the store breaks."""
        if self.objects is not None:
            self.objects.broken = self.rng.random() < 0.1
            if self.objects.stored:
                self.seen["store damaged"] += 1
                self.damage(self.objects, is_local=False)

    def damage(self, objects: MemoryObjects, is_local: bool) -> None:
        """An object is damaged, cut short, mistaken for another or lost: one that is being read, where there is one."""
        wanted: list[str] = []
        for node in self.awake:
            for loan in node.core.borrower_manager.loans.values():
                source = loan.source
                if isinstance(source, StoreSource) and source.is_local == is_local:
                    assert isinstance(source.store, StepStore)
                    names = map(source.store.object_format.name, source.keys)
                    wanted += [name for name in names if source.store.objects is objects and name in objects.stored]
                    self.cells.note_restoring("bytes corrupted", node)
        name = self.rng.choice(wanted or list(objects.stored))
        stored = bytearray(objects.stored[name])
        match self.rng.randrange(4) if stored else 3:  # it may have been cut to nothing
            case 0:
                stored[self.rng.randrange(len(stored))] ^= 1 << self.rng.randrange(8)
                objects.stored[name] = bytes(stored)
            case 1:
                objects.stored[name] = bytes(stored[: self.rng.randrange(len(stored))])
            case 2:
                objects.stored[name] = self.rng.choice(list(objects.stored.values()))
            case 3:
                del objects.stored[name]


def _may_swap(before: object, message: object, place: int) -> bool:
    return place > 0 and before != message and not isinstance(before, Want)
