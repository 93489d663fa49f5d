"""Worlds of the transports in this repository, for the contract's tests.

`local` runs within this process, stepped by hand. `nixl` and `ucxx` read from other processes, over shared memory or,
where a read must be caught in flight, over TCP.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtransfer.contract.worlds import (
    BLOCK,
    LENDER_BLOCKS,
    Lender,
    ProcessWorld,
    World,
    contents,
)
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.nixl import NixlTransport
from kvtransfer.transport import Peer, Pool, Read, Span
from kvtransfer.ucx.nixl_lane import Job
from kvtransfer.ucxx import UcxxTransport


class LocalLender(Lender):
    def __init__(self, network: LocalNetwork, name: str, seed: int) -> None:
        self.data = contents(seed, LENDER_BLOCKS * BLOCK)
        self._transport = LocalTransport(network, name)
        self.endpoint = self._transport.register(Pool(self.data.copy().reshape(LENDER_BLOCKS, BLOCK)))

    def kill(self) -> None:
        self._transport.close()


class LocalWorld(World):
    another_format = b"nixl:whatever"

    def __init__(self) -> None:
        super().__init__()
        self._network = LocalNetwork()
        self._lenders: dict[int, Lender] = {}
        self.reader: LocalTransport = LocalTransport(self._network, "reader", eager=False)
        self.reader.register(self.pool)

    def lender(self, number: int) -> Lender:
        if number not in self._lenders:
            self._lenders[number] = LocalLender(self._network, f"lender-{number}", seed=number)
        return self._lenders[number]

    def mortal(self) -> Lender:
        return self.lender(99)

    def done(self, future: Read) -> None:
        while not future.done():
            assert self.reader.step()
        future.result(0)

    @contextmanager
    def held(self, peer: Peer, own_offset: int) -> Iterator[None]:
        self.done(self.reader.read(peer, [Span(own_offset, 0, BLOCK)]))
        yield


class NixlWorld(ProcessWorld):
    transport = "nixl"
    another_format = json.dumps({"format": "tandem-nixl-0", "base": 1, "bytes": 1, "metadata": ""}).encode()
    reader: NixlTransport

    def hold(self, peer: Peer, own_offset: int, hold: Callable[[], None]) -> None:
        def post_now(job: Job) -> bool:
            """Never on this thread, where a callback of a read that is done would run, too."""
            job.future.add_done_callback(lambda _: hold())
            return False

        self.reader.post_now = post_now  # type: ignore[method-assign]
        self.reader.read(peer, [Span(own_offset, 0, BLOCK)])
        del self.reader.post_now


class UcxxWorld(ProcessWorld):
    transport = "ucxx"
    another_format = json.dumps({"format": "tandem-ucxx-0"}).encode()
    reader: UcxxTransport

    def hold(self, peer: Peer, own_offset: int, hold: Callable[[], None]) -> None:
        self.done(self.reader.read(peer, [Span(own_offset, 0, BLOCK)]))
        self.reader.do(hold)


WORLDS: dict[str, type[ProcessWorld]] = {"nixl": NixlWorld, "ucxx": UcxxWorld}
