"""The loop of every engine process, whatever computes in it.

One loop on the main thread handles messages, collects results, starts the next steps and sends answers. It never waits
for a slow front (see `message_socket.py`) and never for a step. The process ends with its front: by the closed socket,
or at once by the kernel when the front is killed. With several ranks the others are in processes of their own,
see `engine/process/ranks/ranks.py`.
"""

import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cluster.errors import StartError
from cluster.logs import set_up
from cluster.process.garbage_collection import spare_the_started
from engine.core.loan_host import LoanHost
from engine.errors import RankLost
from engine.messages.from_engine import Ready, StartFailed
from engine.process.assembly import IDLE_TURN_S
from engine.process.data_parallel.step_group import StepGroup
from engine.process.front_link import FrontLink, receive_spec
from engine.process.message_socket import MessageSocket
from engine.process.ranks.ranks import Ranks, leave, serve, start_failure
from engine.process.spec import EngineSpec
from engine.process.start_up import become_child, prepare
from engine.sampling.grammar_gate import GrammarGate
from kvtransfer.errors import TransportUnavailable


class Steps(ABC):
    """Steps of an engine, computed beside its loop."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether a step could begin or end now, so that the loop should not wait for messages."""

    @abstractmethod
    def begin(self) -> None:
        """Begin as many steps as may be in flight; do nothing when there is nothing to compute."""

    @abstractmethod
    def end(self) -> bool:
        """Process the results of steps that have ended; return whether there were any.

        Raises what computing raised.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop computing, after what is in flight if that ends soon."""


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine that is ready to serve."""

    core: LoanHost
    steps: Steps
    ready: Ready
    grammars: GrammarGate
    group: StepGroup | None = None
    """Data-parallel group with which it steps."""


OtherRanks = TypeVar("OtherRanks", bound=Ranks)
OpenEngine = Callable[[EngineSpec, FrontLink, OtherRanks | None], OpenedEngine]
"""Function that loads a model and makes its engine.

Raises EngineStartError, TransportUnavailable or RankLost."""
OpenRanks = Callable[[EngineSpec, Callable[[], None]], OtherRanks]
"""Function open(spec, wake) that makes the ranks in other processes; `wake` is called when one is lost."""


def run_engine(open_engine: OpenEngine[OtherRanks], open_ranks: OpenRanks[OtherRanks] | None = None) -> None:
    """Serve the front at the other end of the socket whose descriptor is the program's argument.

    `open_ranks`: None for an engine that has no ranks in other processes.
    """
    become_child()
    link = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    spec = receive_spec(link)
    front = FrontLink(link)
    ranks: OtherRanks | None = None
    set_up(spec.role, f"{spec.worker_id}/engine", spec.config)
    try:
        spec.config.kind.check(spec.config, spec.role)
        if open_ranks is not None and spec.config.num_ranks > 1:
            ranks = open_ranks(spec, front.wake)
        prepare(spec.config if ranks is None else ranks.own_share(spec.config))
        engine = open_engine(spec, front, ranks)
    except (StartError, TransportUnavailable, RankLost) as error:
        front.send(StartFailed(str(error) if isinstance(error, StartError) else start_failure(error)))
        front.finish()
        if ranks is not None:
            ranks.close()
        os._exit(0)  # threads of a half-started engine may hang
    front.send(engine.ready)
    front.flush()
    if engine.group is not None:
        engine.group.serves()
    spare_the_started()
    serve(partial(_loop, engine, front, ranks), ranks is not None or engine.group is not None)
    engine.steps.stop()
    engine.core.close()
    leave(ranks)


def _loop(engine: OpenedEngine, front: FrontLink, ranks: Ranks | None) -> None:
    core, steps, group = engine.core, engine.steps, engine.group
    while True:
        if ranks is not None:
            ranks.check()
        for message in front.listen(0.0 if steps.ready else IDLE_TURN_S):
            if all(part is None or part.passes(message) for part in (engine.grammars, group)):
                core.handle(message)
        for news in group.answers() if group is not None else ():
            front.send(news)
        for released in engine.grammars.released():
            core.handle(released)
        core.handle_posted()
        if not steps.end():  # its messages wait until the next step has begun
            front.flush()  # a caller waits for an answer
        core.flush()  # a borrower reads these blocks while the next step computes
        steps.begin()
        if not any(part is not None and part.silent for part in (ranks, group)):
            core.report()
        core.flush()
        front.flush()
