"""The contract of executors, and the one that does nothing."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from cluster.errors import TandemError
from cluster.roles import Role
from protos import inference_pb2 as pb


class ExecutorFailed(TandemError):
    """A wish was not carried out; the next one, which says all of it again, may be."""


class Executor(ABC):
    """Used from one event loop, a call at a time. Every call may raise ExecutorFailed, and harms nothing by that."""

    scales: bool = True
    """Workers come and go. Else there are as many as there are."""
    switches: bool = False
    """`switch` can be called."""

    @abstractmethod
    async def sizes(self) -> Mapping[Role, int]:
        """How many of each role it was asked for last, whether they are there yet or not. Roles it knows nothing of are
        left out."""

    @abstractmethod
    async def scale(self, role: Role, count: int) -> None:
        """There are to be so many. Returns when that is under way. Whoever goes is drained first."""

    async def switch(self, workers: Sequence[pb.WorkerStatus], role: Role) -> None:
        """These are to have that role. Returns when they have, and `sizes` says so."""
        raise ExecutorFailed(f"nobody here can make workers {role} workers")

    async def close(self) -> None:  # noqa: B027  # most hold nothing
        """Nothing is called afterwards."""


class NoExecutor(Executor):
    """Wishes are metrics only: for who has an autoscaler of their own."""

    async def sizes(self) -> Mapping[Role, int]:
        return {}

    async def scale(self, role: Role, count: int) -> None:
        """Somebody else does."""
