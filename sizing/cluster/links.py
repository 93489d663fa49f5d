"""Links between workers, each of which has one full-duplex NIC that its transfers share.

A transfer runs at the smaller of two equal shares: its sender's outgoing and its receiver's incoming bandwidth, each
divided by its transfers. So no NIC exceeds its bandwidth. What a transfer leaves of one share, being slower at its
other end, is not given to others: max-min fairness would be slightly faster where both ends are crowded, but must
consider all transfers whenever one begins or ends.
"""

from collections.abc import Callable, Hashable

from sizing.cluster.clock import ScheduledEvent, VirtualClock


class Flow:
    """One transfer in progress."""

    __slots__ = ("event", "on_over", "rate", "receiver", "remaining", "sender", "since")

    def __init__(self, sender: "Nic", receiver: "Nic", num_bytes: float, on_over: Callable[[bool], object]) -> None:
        self.sender = sender
        self.receiver = receiver
        self.remaining = num_bytes
        self.on_over = on_over
        self.rate = 0.0
        """Bytes per second since `since`, when `remaining` were left."""
        self.since = 0.0
        self.event: ScheduledEvent | None = None


class Nic:
    """NIC of one worker."""

    __slots__ = ("bytes_per_s", "incoming", "outgoing", "received_bytes", "sent_bytes")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        """Bandwidth in each direction."""
        self.outgoing: dict[Flow, None] = {}
        self.incoming: dict[Flow, None] = {}
        self.sent_bytes = 0.0
        self.received_bytes = 0.0


class Links:
    """All NICs, by the name of their worker."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._nics: dict[Hashable, Nic] = {}

    def add(self, name: Hashable, bytes_per_s: float) -> None:
        assert name not in self._nics
        assert bytes_per_s > 0
        self._nics[name] = Nic(bytes_per_s)

    def nic(self, name: Hashable) -> Nic:
        return self._nics[name]

    def transfer(self, sender: Hashable, receiver: Hashable, num_bytes: int, on_over: Callable[[bool], object]) -> None:
        """Start a transfer.

        `on_over(True)` when all bytes arrived, `on_over(False)` when one end was cut off before.
        """
        source, target = self._nics.get(sender), self._nics.get(receiver)
        if source is None or target is None:
            self._clock.after(0.0, on_over, False)
            return
        flow = Flow(source, target, num_bytes, on_over)
        flow.since = self._clock.now
        source.outgoing[flow] = target.incoming[flow] = None
        self._share_anew(source, target)

    def cut(self, name: Hashable) -> None:
        """End all transfers of a worker that is gone."""
        nic = self._nics.pop(name)
        for flow in dict.fromkeys([*nic.outgoing, *nic.incoming]):  # a transfer to itself is in both
            self._settle(flow)
            self._remove(flow)
            flow.on_over(False)

    def check(self) -> None:
        """Check that no NIC exceeds its bandwidth.

        Raises AssertionError.
        """
        for nic in self._nics.values():
            for flows in (nic.outgoing, nic.incoming):
                assert sum(flow.rate for flow in flows) <= nic.bytes_per_s * (1 + 1e-9)

    def _finish(self, flow: Flow) -> None:
        flow.event = None
        flow.sender.sent_bytes += flow.remaining
        flow.receiver.received_bytes += flow.remaining
        flow.remaining = 0.0
        self._remove(flow)
        flow.on_over(True)

    def _remove(self, flow: Flow) -> None:
        if flow.event is not None:
            flow.event.cancel()
        del flow.sender.outgoing[flow]
        del flow.receiver.incoming[flow]
        self._share_anew(flow.sender, flow.receiver)

    def _share_anew(self, sender: Nic, receiver: Nic) -> None:
        for flow in dict.fromkeys([*sender.outgoing, *receiver.incoming]):
            out_share = flow.sender.bytes_per_s / len(flow.sender.outgoing)
            in_share = flow.receiver.bytes_per_s / len(flow.receiver.incoming)
            rate = min(out_share, in_share)
            if rate != flow.rate:
                self._settle(flow)
                flow.rate = rate
                if flow.event is not None:
                    flow.event.cancel()
                flow.event = self._clock.after(flow.remaining / rate, self._finish, flow)

    def _settle(self, flow: Flow) -> None:
        """Count the bytes sent since the last change of rate."""
        gone = min(flow.remaining, flow.rate * (self._clock.now - flow.since))
        flow.since = self._clock.now
        flow.remaining -= gone
        flow.sender.sent_bytes += gone
        flow.receiver.received_bytes += gone
