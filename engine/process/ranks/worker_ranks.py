"""Ranks of a vLLM engine: the worker processes of vLLM's own executor, which have all of the engine's KV memory.

Some of them may run on other nodes (`nodes.py`). vLLM starts these processes and runs their steps. Each
connects back to the engine process before it makes its worker, and is told its settings
(`engine/process/vllm/worker.py`). Once its KV memory is allocated, a thread in it serves its part of every block.
Reads, copies and fingerprints so wait for no step.
"""

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from multiprocessing import reduction
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from engine.block_parts.messages import Joined
from engine.config import WorkerConfig
from engine.errors import EngineStartError, RankLost
from engine.process.ranks.nodes import SILENCE_S, Nodes
from engine.process.ranks.ranks import DistantLink, PartLink, Ranks
from engine.process.spec import EngineSpec, RankSpec

log = logging.getLogger(__name__)

ADDRESS = "TANDEM_RANKS"
"""Environment variable with the path of the socket at which worker processes of this host connect."""
LOOK_S = 0.5
"""Seconds between looks for ranks on other nodes that are silent."""
REASON_S = 1.0
"""Seconds in which a rank's reason for a failed start arrives after vLLM has noticed the failure."""


class WorkerRanks(Ranks):
    """Worker processes of an engine, in the order of their ranks."""

    def __init__(self, spec: EngineSpec, wake: Callable[[], None]) -> None:
        """Listen for the processes, which vLLM starts later from this one.

        `wake` is called, on any thread, when a rank is lost.
        """
        super().__init__()
        self._spec, self._wake = spec, wake
        self._by_rank: dict[int, PartLink] = {}
        self._failures: list[BaseException] = []
        """Failures of ranks to start, in the order in which they came."""
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-ranks-"))  # only this user may enter it
        self._listener = Listener(str(self._folder / "socket"))
        os.environ[ADDRESS] = str(self._folder / "socket")
        threading.Thread(target=self._accept, name="rank-listener", daemon=True).start()
        self._is_closing = False
        self._nodes: Nodes | None = None
        if spec.config.nodes > 1:
            self._nodes = Nodes(spec.config, spec.agent_name, self._add_distant, self._lost)
            threading.Thread(target=self._watch_distant, name="node-watch", daemon=True).start()

    def gather_nodes(self, facts: Mapping[str, str]) -> None:
        """Wait for all other nodes, which must have the same facts; then vLLM may start.

        From then on this process ends when a node is lost: the main thread may wait for its ranks for ever.
        """
        if self._nodes is not None:
            self._nodes.gather(facts)

    @property
    def links(self) -> Sequence[PartLink]:
        return [self._by_rank[rank] for rank in sorted(self._by_rank.copy())]

    @property
    def num_links(self) -> int:
        return self._spec.config.num_ranks

    def own_share(self, config: WorkerConfig) -> WorkerConfig:
        """Return the settings of a process that only schedules: on all cores, with the threads of one rank.

        The worker processes inherit both, and then bind themselves to their own cores.
        """
        return config.model_copy(update={"threads": config.of_rank(0).threads})

    def met(self) -> None:
        """Remove the socket once all ranks are connected."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self._is_closing = True
        self.met()
        for link in self.links:
            link.close()

    def why_not_started(self) -> EngineStartError | RankLost | None:
        """Return why a rank did not start, after vLLM has given up; None where every rank is well.

        A rank that names its reason goes before one that was only lost, perhaps for want of the other.
        """
        wait([link.joined for link in self.links], REASON_S, FIRST_EXCEPTION)
        failures = list(self._failures)
        for kind in (EngineStartError, RankLost):
            for failure in failures:
                if isinstance(failure, kind):
                    return failure
        return None

    def _accept(self) -> None:
        """Connect to each worker process, on a thread of its own."""
        for _ in range(self._spec.config.num_local_ranks):
            try:
                connection = self._listener.accept()
                rank = int(connection.recv())
                connection.send(RankSpec(self._spec, rank))
                reduction.send_handle(connection, self.memory.descriptor, None)
            except (EOFError, OSError) as error:
                log.warning("a worker process of vLLM did not connect: %s", error)  # vLLM notices its end
                continue
            self._add(PartLink(rank, connection, self.memory, self._wake))
        self._listener.close()

    def _add(self, link: PartLink) -> None:
        link.joined.add_done_callback(self._record)
        self._by_rank[link.rank] = link

    def _add_distant(self, rank: int, connection: Connection) -> None:
        """Take a rank on another node."""
        self._add(DistantLink(rank, connection, self.memory, self._wake))

    def _watch_distant(self) -> None:
        """End this process when a rank on another node is silent."""
        while True:
            time.sleep(LOOK_S)
            for link in self.links:
                if isinstance(link, DistantLink) and link.joined.done() and link.silent_s > SILENCE_S:
                    self._lost(f"rank {link.rank} was silent for {SILENCE_S:.0f} s")

    def _lost(self, how: str) -> None:
        """End this process: a node is lost. A reason that a rank gave for not starting goes first."""
        if self._is_closing:
            return
        reason = self.why_not_started()
        log.error("the engine cannot go on: %s", reason if isinstance(reason, EngineStartError) else how)
        os._exit(1)

    def _record(self, joined: "Future[Joined]") -> None:
        if (failure := joined.exception()) is not None:
            self._failures.append(failure)
