"""gRPC servers and channels as every process of the cluster sets them up."""

import socket
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.errors import StartError

MAX_MESSAGE_BYTES = 16 << 20
"""A prompt of a million tokens fits; a message of 100 MB is refused before it is read."""

_KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
# A server that does not allow what its clients do closes quiet streams with too_many_pings.
_ALLOW_PINGS: list[tuple[str, int]] = [
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.max_ping_strikes", 0),
]
_SIZES: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


class Server:
    """One grpc.aio server with health and reflection. Not serving until `mark_serving`."""

    def __init__(self) -> None:
        # Without so_reuseport=0 a second process would silently share a port in use.
        options = [*_KEEPALIVE, *_ALLOW_PINGS, *_SIZES, ("grpc.so_reuseport", 0)]
        self.grpc = grpc.aio.server(options=options)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._services: list[str] = []

    async def start(self, host: str, port: int, services: Sequence[str]) -> int:
        """Listen; returns the port, chosen by the system when `port` is 0. Raises StartError."""
        self._services = ["", *services]
        names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc)
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            bound = self.grpc.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise StartError("port", f"cannot listen on {host}:{port}: {_bind_reason(host, port)}") from error
        await self.grpc.start()
        return bound

    async def mark_serving(self) -> None:
        await self._set(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)

    async def _set(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for service in self._services:
            await self._health.set(service, status)


def channel(address: str) -> grpc.aio.Channel:
    """A channel to another process of the cluster."""
    reconnect = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2_000)]
    return grpc.aio.insecure_channel(address, options=[*_KEEPALIVE, *_SIZES, *reconnect])


def _bind_reason(host: str, port: int) -> str:
    """What the system says; gRPC's own error hides it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return "refused"
