"""Discovery and quotas against a real redis-server that is killed, hung, restarted empty and misused."""

import asyncio
import contextlib
import datetime
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from cluster.discovery.discovery import RouterEntry
from cluster.discovery.redis_discovery import RedisDiscovery
from cluster.errors import StartError
from router.admission.limits.redis_quota import RedisLedger
from support.processes import until
from support.redis_server import RedisServer

NAME = "test"
WINDOW_S = 3600


class Watched:
    """The listings of a worker."""

    def __init__(self, url: str) -> None:
        self.discovery = RedisDiscovery(url, NAME, interval_s=0.05, expiry_s=1.0)
        self.listing: frozenset[str] | None = None
        self.count = 0
        self.task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        async for listing in self.discovery.listings():
            self.listing = listing
            self.count += 1

    async def sees(self, *addresses: str) -> None:
        await until(lambda: self.listing == set(addresses), f"{addresses} are listed, and not {self.listing}")

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.discovery.close()


def announced(url: str, name: str) -> RedisDiscovery:
    discovery = RedisDiscovery(url, NAME, interval_s=0.05, expiry_s=1.0)
    discovery.announce(RouterEntry(name, f"{name}:1", "00"))
    return discovery


@asynccontextmanager
async def tls_before(server: RedisServer, directory: Path) -> AsyncIterator[tuple[int, Path]]:
    """The port of a listener that speaks TLS for it (the server in the wheel does not), and whom to trust for that."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    write_certificate(certificate, key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while said := await reader.read(4096):
            writer.write(said)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)

    listener = await asyncio.start_server(serve, "localhost", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1], certificate
    finally:
        listener.close()


def write_certificate(certificate: Path, key: Path) -> None:
    """Of localhost, signed by itself, for an hour."""
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, secret.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(minutes=1)).not_valid_after(now + datetime.timedelta(hours=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    certificate.write_bytes(made.sign(secret, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


async def test_who_announces_is_found_and_who_is_gone_is_forgotten(redis: RedisServer) -> None:
    request_metrics, first, second = Watched(redis.url), announced(redis.url, "a"), announced(redis.url, "b")
    await request_metrics.sees("a:1", "b:1")
    await first.withdraw()
    await request_metrics.sees("b:1")
    await second.close()  # as if killed: it only stops announcing
    await request_metrics.sees()
    assert await redis.command("KEYS", "*") == []
    await first.close()
    await request_metrics.close()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    discovery = RedisDiscovery(redis.url, NAME, interval_s=0.0)
    sending = asyncio.Event()
    answer = Redis.execute_command

    async def swallowing(*words: Any, **options: Any) -> Any:
        """As `asyncio.wait_for` of Python 3.11 where both come at once."""
        said = await answer(*words, **options)
        sending.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)
        if refused:
            raise ResponseError("OOM command not allowed")
        return said

    monkeypatch.setattr(Redis, "execute_command", swallowing)
    discovery.announce(RouterEntry("a", "a:1", "00"))
    await sending.wait()
    await discovery.withdraw()
    await discovery.close()


async def test_discovery_heals_after_redis_is_killed_hung_and_restarted_empty(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    request_metrics, first = Watched(redis.url), announced(redis.url, "a")
    await request_metrics.sees("a:1")

    await redis.kill()
    await asyncio.sleep(0.3)
    await redis.start()
    assert await redis.command("DBSIZE") <= 1
    await request_metrics.sees("a:1")

    await redis.hang()
    counted = request_metrics.count
    second = announced(redis.url, "b")
    await asyncio.sleep(1.5)
    assert request_metrics.listing == {"a:1"}
    assert request_metrics.count <= counted + 1, "nothing is said while nobody answers"
    redis.wake()
    await request_metrics.sees("a:1", "b:1")
    said = [
        r.message for r in caplog.records if r.levelno >= logging.WARNING and "discovery does not work" in r.message
    ]
    assert 2 <= len(said) <= 5, "once by each process each time"
    for discovery in (first, second):
        await discovery.close()
    await request_metrics.close()


async def test_a_wrong_password_is_said_at_start_and_never_shown(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, password="open-sesame") as server:
        for url in (server.url.replace("open-sesame", "wrong-one"), f"redis://127.0.0.1:{server.port}"):
            discovery, ledger = RedisDiscovery(url, NAME), RedisLedger(url, NAME)
            for starting in (discovery.start(), ledger.start()):
                with pytest.raises(StartError) as caught:
                    await starting
                assert caught.value.field == "redis_url"
                assert "wrong-one" not in str(caught.value)
                assert str(server.port) in str(caught.value)
            await discovery.close()
            await ledger.close()
        right = RedisDiscovery(server.url, NAME)
        await right.start()
        await right.close()


async def test_the_wrong_type_at_the_key_is_said_at_start_and_mended_later(
    redis: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.discovery.redis_discovery.REFUSED_INTERVAL_S", 0.2)
    await redis.command("SET", f"{NAME}:routers", "a string")
    discovery = RedisDiscovery(redis.url, NAME)
    with pytest.raises(StartError, match="test:routers") as caught:
        await discovery.start()
    assert caught.value.field == "cluster_name"
    await discovery.close()

    running = announced(redis.url, "a")

    def said() -> int:
        return sum("has 'test:routers' in use" in record.getMessage() for record in caplog.records)

    await until(lambda: said() > 0, "it is logged")
    await asyncio.sleep(1.0)
    assert said() == 1, "logged once, tried again and again"
    await redis.command("DEL", f"{NAME}:routers")
    request_metrics = Watched(redis.url)
    await request_metrics.sees("a:1")
    await running.close()
    await request_metrics.close()


async def test_nobody_there_is_no_reason_not_to_start(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    discovery = RedisDiscovery(server.url, NAME, interval_s=0.05)
    await discovery.start()
    discovery.announce(RouterEntry("a", "a:1", "00"))
    async with server:
        request_metrics = Watched(server.url)
        await request_metrics.sees("a:1")
        await request_metrics.close()
        await discovery.close()


async def test_entries_of_others_are_passed_over(redis: RedisServer) -> None:
    soon = int(time.time() * 1e3) + 60_000
    for entry in ("no json", "[1]", '{"address": "x:1"}', '{"router_id":"x","address":7,"incarnation":"0"}'):
        await redis.command("ZADD", f"{NAME}:routers", soon, entry)
    request_metrics, first = Watched(redis.url), announced(redis.url, "a")
    await request_metrics.sees("a:1")
    await first.close()
    await request_metrics.close()


async def test_over_tls_and_only_with_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, password="open-sesame") as server, tls_before(server, tmp_path) as (port, trusted):
        url = f"rediss://:open-sesame@localhost:{port}/0"
        discovery, distrusting = RedisDiscovery(f"{url}?ssl_ca_certs={trusted}", NAME), RedisDiscovery(url, NAME)
        request_metrics = Watched(f"{url}?ssl_ca_certs={trusted}")
        await discovery.start()
        discovery.announce(RouterEntry("a", "a:1", "00"))
        await request_metrics.sees("a:1")
        distrusting.announce(RouterEntry("b", "b:1", "00"))
        await asyncio.sleep(0.5)
        assert request_metrics.listing == {"a:1"}
        for each in (discovery, distrusting, request_metrics):
            await each.close()


# ------------------------------------------------------------------------------------------------- quotas


async def test_a_limit_holds_for_all_routers_together(redis: RedisServer) -> None:
    ledgers = [RedisLedger(redis.url, NAME, limit_s=30.0) for _ in range(3)]
    answers = await asyncio.gather(*(ledgers[i % 3].charge("t", 7, 100, WINDOW_S) for i in range(30)))
    assert answers.count(None) == 14, "14 * 7 <= 100 < 15 * 7"
    for refused in answers:
        assert refused is None or 0 < refused <= WINDOW_S
    assert await ledgers[0].charge("t", 2, 100, WINDOW_S) is None
    assert await ledgers[1].charge("t", 1, 100, WINDOW_S) is not None
    assert await ledgers[2].charge("another tenant", 100, 100, WINDOW_S) is None
    assert await ledgers[2].charge("t", 100, 100, 2 * WINDOW_S) is None, "windows of another length count apart"
    await ledgers[1].refund("t", 10, WINDOW_S)
    assert await ledgers[0].charge("t", 11, 100, WINDOW_S) is not None
    assert await ledgers[0].charge("t", 10, 100, WINDOW_S) is None
    await ledgers[0].refund("nobody", 10, WINDOW_S)
    assert await ledgers[0].charge("nobody", 101, 100, WINDOW_S) is not None, "nobody is refunded below nothing"
    for ledger in ledgers:
        await ledger.close()


async def test_a_burst_is_counted_together_though_its_routers_are_busy(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """More charges at once than calls could be answered within the limit, by processes that do something else."""
    ledgers = [RedisLedger(redis.url, NAME, limit_s=2.0) for _ in range(2)]
    burst = [asyncio.ensure_future(ledgers[i % 2].charge("t", 1, 500, WINDOW_S)) for i in range(3000)]
    for _ in range(3):
        await asyncio.sleep(0)
        time.sleep(0.8)  # noqa: ASYNC251  # as a busy process
    answers = await asyncio.gather(*burst)
    assert answers.count(None) == 500
    assert not caplog.records
    for ledger in ledgers:
        await ledger.close()


async def test_who_leaves_before_the_answer_is_not_charged(redis: RedisServer) -> None:
    ledger = RedisLedger(redis.url, NAME, limit_s=30.0)
    leaves = asyncio.ensure_future(ledger.charge("t", 90, 100, WINDOW_S))
    stays = asyncio.ensure_future(ledger.charge("u", 90, 100, WINDOW_S))
    await asyncio.sleep(0)
    leaves.cancel()
    assert await stays is None
    assert await ledger.charge("t", 100, 100, WINDOW_S) is None
    await ledger.close()


async def test_a_window_ends_at_a_multiple_of_its_length(redis: RedisServer) -> None:
    ledger = RedisLedger(redis.url, NAME, limit_s=30.0)
    began_at, ended_at, attempt = 0.5, 1.5, 0
    while int(began_at) != int(ended_at):  # until both charges fall into one window
        began_at, attempt = time.time(), attempt + 1
        assert await ledger.charge(f"t{attempt}", 10, 10, 1) is None
        left_s = await ledger.charge(f"t{attempt}", 1, 10, 1)
        ended_at = time.time()
    assert left_s is not None
    assert 1 - ended_at % 1 - 0.01 <= left_s <= 1 - began_at % 1 + 0.01
    await asyncio.sleep(left_s + 0.01)
    assert await ledger.charge(f"t{attempt}", 10, 10, 1) is None
    await ledger.close()


@pytest.mark.parametrize("how", ["killed", "hung"])
async def test_without_redis_each_router_counts_alone(
    redis: RedisServer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From what was seen last; no charge waits longer than the limit, and of many none after the first ones."""
    ledger = RedisLedger(redis.url, NAME, limit_s=3.0)
    assert await ledger.charge("t", 60, 100, WINDOW_S) is None
    await (redis.kill() if how == "killed" else redis.hang())
    assert await ledger.charge("t", 30, 100, WINDOW_S) is None
    began_at = time.monotonic()
    assert await ledger.charge("t", 11, 100, WINDOW_S) is not None
    await ledger.refund("t", 5, WINDOW_S)
    assert await ledger.charge("t", 15, 100, WINDOW_S) is None
    assert time.monotonic() - began_at < 3.0
    alone = [record for record in caplog.records if "counts tenants' tokens alone" in record.message]
    assert len(alone) == 1
    await (redis.start() if how == "killed" else asyncio.to_thread(redis.wake))

    await until(lambda: any("again" in record.message for record in caplog.records), "the ledger has noticed")
    shared = RedisLedger(redis.url, NAME, limit_s=30.0)
    assert await shared.charge("u", 100, 100, WINDOW_S) is None
    assert await ledger.charge("u", 1, 100, WINDOW_S) is not None, "counted together again"
    await shared.close()
    await ledger.close()


async def test_the_wrong_type_at_a_tenants_key_harms_no_other(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = RedisLedger(redis.url, NAME, limit_s=30.0)
    await redis.command("SET", f"{NAME}:quota:{WINDOW_S}:t", "a string")
    for _ in range(3):
        assert await ledger.charge("t", 30, 100, WINDOW_S) is None
    assert await ledger.charge("t", 30, 100, WINDOW_S) is not None
    assert len(caplog.records) == 1
    assert "test:quota:3600:t" in caplog.text
    assert await ledger.charge("u", 1, 100, WINDOW_S) is None
    assert await redis.command("HGET", f"{NAME}:quota:{WINDOW_S}:u", "tokens") == "1"
    await ledger.close()
