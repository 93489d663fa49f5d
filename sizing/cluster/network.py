"""Network between engines in virtual time: every message takes as long, and none is lost but by the end of a worker."""

from collections.abc import Callable

from loans.in_process import InProcessNetwork
from sizing.cluster.clock import VirtualClock


class VirtualNetwork(InProcessNetwork):
    """The network of one worker. Its peers are never silent: a worker that ends is noticed at once."""

    def __init__(
        self,
        engines: dict[bytes, InProcessNetwork],
        incarnation: bytes,
        wake: Callable[[], object],
        clock: VirtualClock,
        message_s: float,
    ) -> None:
        super().__init__(engines, incarnation, wake, clock.time)
        self._virtual_clock = clock
        self._message_s = message_s

    def deliver(self, to: InProcessNetwork, call: Callable[..., object], *arguments: object) -> None:
        self._virtual_clock.after(self._message_s, super().deliver, to, call, *arguments)

    def beat(self, is_alive: bool) -> None:
        """Do nothing."""

    def quiet_s(self, peer: InProcessNetwork, since: float) -> float:
        return 0.0
