"""Interface of executors, and the executor that does nothing."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from cluster.errors import TandemError
from cluster.roles import Role
from protos import inference_pb2 as pb


class ExecutorFailed(TandemError):
    """A failure to carry out desired sizes.

    The next round asks for all of them again.
    """


class Executor(ABC):
    """Interface used from one event loop, one call at a time.

    Every call may raise ExecutorFailed without side effects.
    """

    scales: bool = True
    """Whether the executor can start and stop workers."""
    switches: bool = False
    """Whether `switch` may be called."""

    @abstractmethod
    async def sizes(self) -> Mapping[Role, int]:
        """Return the number of workers last asked for, per role.

        Unknown roles are left out.
        """

    @abstractmethod
    async def scale(self, role: Role, count: int) -> None:
        """Set the number of workers.

        Returns when the change is in progress; removed workers drain first.
        """

    async def switch(self, workers: Sequence[pb.WorkerStatus], role: Role) -> None:
        """Switch these workers to `role`.

        Returns when they have it and `sizes` shows it.
        """
        raise ExecutorFailed(f"this executor cannot switch workers to {role}")

    async def close(self) -> None:  # noqa: B027 # most executors hold nothing
        """Release resources; no call follows."""


class NoExecutor(Executor):
    """Executor that does nothing: desired sizes are metrics for an autoscaler of your own."""

    async def sizes(self) -> Mapping[Role, int]:
        return {}

    async def scale(self, role: Role, count: int) -> None:
        """Do nothing."""
