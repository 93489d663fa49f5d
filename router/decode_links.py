"""The streams to all decode workers, each opened with the first request that goes there."""

import functools

import grpc

from cluster.errors import Unavailable
from cluster.rpc import channel
from router.decode_link import DecodeLink
from router.fleet import Fleet, Worker


class DecodeLinks:
    """One for each membership: a worker that joins again is another one."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._links: dict[Worker, DecodeLink] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}

    def to(self, worker: Worker) -> DecodeLink:
        """An unbroken one, which breaks when the worker falls silent."""
        link = self._links.get(worker)
        if link is None or link.broken:
            self._let_go()
            address = worker.hello.address
            if (to_worker := self._channels.get(address)) is None:
                to_worker = self._channels[address] = channel(address)
            link = self._links[worker] = DecodeLink(to_worker, worker.worker_id)
            silent = Unavailable(f"decode worker {worker.worker_id} fell silent")
            worker.on_lost.add(functools.partial(link.break_off, silent))
        return link

    def _let_go(self) -> None:
        """Of those to workers that left, once nothing runs there."""
        for worker, link in tuple(self._links.items()):
            if link.broken or (link.idle and self._fleet.worker(worker.worker_id) is not worker):
                link.break_off(Unavailable(f"decode worker {worker.worker_id} left"))
                del self._links[worker]
