"""Who may reach a cluster and use it: TLS between all, keys for clients, and tenants that cannot see each other.

Real processes over the sim engine, certificates made on the spot.
"""

import asyncio
import http.client
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from cluster.errors import Forbidden, ServiceError, StartError, Unauthenticated, Unavailable
from cluster.network.error_status import from_rpc_error
from cluster.network.mux_stream import MuxServer, MuxStream
from cluster.network.rpc import MAX_METADATA_BYTES, channel
from cluster.network.tls import ClientIdentity, Credentials, File, MemberIdentity
from conftest import Ask, ModelFactory
from protos import inference_pb2 as pb
from protos import membership_pb2, membership_pb2_grpc
from router.security.api_keys import entry_for, hash_of
from support.api_keys import keys_file
from support.certificates import Authority, Issued
from support.openai_http import http_cluster
from support.processes import LENDER_ALWAYS, engine_of, until
from tandem.client import Client, error_of
from tandem.local.local_cluster import LocalCluster
from tandem.members import await_members

VOCAB = 400
PROMPT = list(range(1, 130))


def member_of(issued: Issued, authority: Authority) -> MemberIdentity:
    files = File("tls_cert", issued.cert), File("tls_key", issued.key)
    return MemberIdentity(Credentials(*files, [File("tls_ca", authority.path)]))


class Site:
    """A cluster with everything on, and what its clients need."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.cluster_ca, self.client_ca = Authority(folder, "cluster"), Authority(folder, "clients")
        self.stranger_ca = Authority(folder, "strangers")
        self.issued = self.cluster_ca.issue("member")
        self.client, self.stranger = self.client_ca.issue("client"), self.stranger_ca.issue("stranger")
        self.keys = folder / "keys.yaml"
        self.keys.write_text(
            entry_for("tk-alice", "alice", "a", [], None)
            + entry_for("tk-bob", "bob", "b", [], None)
            + entry_for("tk-op", "op", "", [], None, operator=True)
        )
        tls = {"tls_cert": self.issued.cert, "tls_key": self.issued.key, "tls_ca": self.cluster_ca.path}
        metrics = {"metrics_port": 0, "tls_metrics_ca": self.client_ca.path}
        router = tls | metrics | LENDER_ALWAYS | {"api_keys_file": self.keys, "isolate_tenants": True}
        router |= {"tls_client_ca": self.client_ca.path, "internal_port": 0}
        self.cluster: LocalCluster = http_cluster(
            model, 1, router, engine="sim", kv_host_memory_mib=8, **tls, **metrics
        )

    @property
    def visitor(self) -> ClientIdentity:
        return self.trusting(self.client)

    def asks_as(self, key: str) -> Client:
        return Client(self.cluster.address, api_key=key, tls=self.visitor)

    def trusting(self, issued: Issued | None = None) -> ClientIdentity:
        """Of somebody who trusts the cluster, perhaps with a certificate."""
        return ClientIdentity(self.cluster_ca.path, *((issued.cert, issued.key) if issued else ()))

    async def https(
        self, path: str, body: Any = None, *, address: str = "", visitor: ClientIdentity | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """Status and content; by default the router's, for its visitor."""

        def ask() -> tuple[int, bytes]:
            at, context = address or self.cluster.router.http_address, (visitor or self.visitor).for_http()
            with closing(http.client.HTTPSConnection(at, timeout=20, context=context)) as connection:
                connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
                answer = connection.getresponse()
                return answer.status, answer.read()

        return await asyncio.to_thread(ask)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory, sim_model: ModelFactory) -> AsyncIterator[Site]:
    made = Site(tmp_path_factory.mktemp("certificates"), sim_model(VOCAB, speaks=True))
    async with made.cluster:
        yield made


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def refusal(call: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


# ------------------------------------------------------------------------------------------------ TLS


async def test_everything_works_over_tls(site: Site, ask: Ask) -> None:
    async with site.asks_as("tk-alice") as client:
        answer = await ask(client, PROMPT, cache_salt="first")
        assert answer.placement.lender, "router, decode and prefill worker had to speak to each other"
        assert answer.kv.moved_blocks
    body = {"model": "simulated", "prompt": "abc", "max_tokens": 4, "temperature": 0}
    status, said = await site.https("/v1/completions", body, authorization="Bearer tk-bob")
    assert status == 200, said
    assert json.loads(said)["usage"]["completion_tokens"] == 4


async def test_metrics_are_for_those_who_scrape(site: Site) -> None:
    for role in (site.cluster.router, *site.cluster.workers):
        status, said = await site.https("/metrics", address=role.metrics_address)
        assert status == 200
        assert b"tandem_" in said
        for visitor in (site.trusting(), site.trusting(site.stranger)):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await site.https("/metrics", address=role.metrics_address, visitor=visitor)


def _strangers(site: Site) -> dict[str, Any]:
    """Who is no member, each by what it opens channels with."""
    return {
        "sent unencrypted": None,
        "without a certificate": site.trusting(),
        "with a client's": site.visitor,
        "with another authority's": site.trusting(site.stranger),
        "with its own": site.trusting(Authority(site.keys.parent, "cluster2").issue("member2")),
    }


async def test_streams_are_for_members_only(site: Site) -> None:
    opened: list[bytes] = []
    member = member_of(site.issued, site.cluster_ca)
    server = MuxServer(lambda stream, opening: opened.append(opening), member.credentials)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0, 'stream_port')}"
    stream = MuxStream(b"member")
    await stream.connect(address, member)

    await until(lambda: opened == [b"member"], "the member's is taken")
    assert stream.ended is None
    for identity in (None, member_of(site.client, site.cluster_ca), member_of(site.stranger, site.cluster_ca)):
        refused = MuxStream(b"stranger")

        async def is_over(refused: MuxStream = refused) -> bool:
            return refused.ended is not None

        with suppress(OSError):  # TLS 1.3 tells a client that it is refused after the connection stands
            await refused.connect(address, identity)
            await until(is_over, "it is refused")
    assert opened == [b"member"]
    server.close()


def _internal_calls(site: Site) -> dict[str, tuple[str, Any]]:
    """Every internal service, where it is."""
    worker = site.cluster.decode[0].address

    def join(link: Any) -> Any:
        hello = membership_pb2.WorkerMessage(hello=membership_pb2.Hello(worker_id="me"))
        return membership_pb2_grpc.MembershipStub(link).Join(iter([hello]), timeout=5).read()

    def audit(link: Any) -> Any:
        return membership_pb2_grpc.WorkerStub(link).Audit(membership_pb2.AuditRequest(), timeout=60)

    def drain(link: Any) -> Any:
        return membership_pb2_grpc.WorkerStub(link).Drain(membership_pb2.DrainRequest(), timeout=60)

    def members(link: Any) -> Any:
        return membership_pb2_grpc.MembershipStub(link).Members(membership_pb2.MembersRequest(), timeout=5)

    at_router = {"join": join, "members": members}
    at_worker = {"audit": audit, "drain": drain}
    calls = {name: (site.cluster.router.joined_at, call) for name, call in at_router.items()}
    return calls | {name: (worker, call) for name, call in at_worker.items()}


async def test_internal_services_refuse_who_is_no_member(site: Site) -> None:
    for name, (address, call) in _internal_calls(site).items():
        for who, trust in _strangers(site).items():
            async with channel(address, trust) as link:
                error = await refusal(call(link))
            assert isinstance(error, Unavailable), (name, who, error)
    await await_members(site.cluster.router.joined_at, member_of(site.issued, site.cluster_ca), 1, 1, 5)


async def _outcome(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_members_are_answered_by_the_same_calls(site: Site) -> None:
    """Or the test above would pass for calls that nobody could make."""
    member = member_of(site.issued, site.cluster_ca)
    for name, (address, call) in _internal_calls(site).items():
        if name == "drain":
            continue
        async with channel(address, member) as link:
            assert await _outcome(call(link)) in ("OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"), name


async def test_no_internal_service_is_on_the_public_port(site: Site) -> None:
    async with channel(site.cluster.address, site.visitor) as link:
        stub = membership_pb2_grpc.MembershipStub(link)
        key = (("authorization", "Bearer tk-alice"),)
        error = await refusal(stub.Members(membership_pb2.MembersRequest(), timeout=5, metadata=key))
        assert error.code == "UNIMPLEMENTED"


async def test_clients_need_a_certificate_of_their_own_authority(site: Site) -> None:
    distrusting = ClientIdentity(site.stranger_ca.path, site.client.cert, site.client.key)
    for visitor in (None, site.trusting(), site.trusting(site.issued), distrusting):
        async with Client(site.cluster.address, api_key="tk-alice", tls=visitor) as client:
            with pytest.raises(Unavailable):
                await client.list_models(timeout_s=5)
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            await site.https("/v1/models", visitor=visitor or ClientIdentity(site.stranger_ca.path))


# ------------------------------------------------------------------------------------------------ keys


async def test_no_key_no_service(site: Site) -> None:
    for key in ("", "tk-mallory", "tk-alice "[:-2]):
        async with site.asks_as(key) as client:
            with pytest.raises(Unauthenticated):
                await client.list_models()
            with pytest.raises(Unauthenticated):
                await client.explain(token_ids=PROMPT)
            with pytest.raises(Unauthenticated):
                async for _ in client.generate(token_ids=PROMPT):
                    pass
        for path, body in (
            ("/v1/models", None),
            ("/v1/models/x", None),
            ("/v1/completions", {}),
            ("/v1/chat/completions", {}),
        ):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            status, said = await site.https(path, body, **headers)
            assert status == 401, path
            assert json.loads(said)["error"]["code"] == "invalid_api_key"
    for path in ("/metrics", "/v1/usage", "/no/such/path"):
        assert (await site.https(path))[0] == 401, "closed unless opened"
    for path in ("/health", "/version", "/openapi.json", "/docs"):
        assert (await site.https(path))[0] == 200, path
    status, said = await site.https("/ready")
    assert (status, json.loads(said)) == (200, {"status": "ready"}), "and no models' names"
    async with channel(site.cluster.address, site.visitor) as link:
        for method in ("/tandem.v1.Inference/NoSuchMethod", "/tandem.internal.v1.Membership/Members"):
            assert isinstance(await refusal(link.unary_unary(method)(b"", timeout=5)), Unauthenticated)
        await link.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)


async def test_a_key_of_one_tenant_cannot_be_anothers(site: Site) -> None:
    async with site.asks_as("tk-alice") as client:
        with pytest.raises(Forbidden):
            async for _ in client.generate(token_ids=PROMPT, tenant="b"):
                pass


async def test_what_is_everybodys_is_for_operators(site: Site) -> None:
    """The console shows requests of all tenants, and ClusterStatus all models."""

    async def console(key: str) -> int:
        return (await site.https("/console/data", authorization=f"Bearer {key}"))[0]

    assert [await console(key) for key in ("tk-alice", "tk-op", "tk-nobody")] == [403, 200, 401]
    assert (await site.https("/console/data"))[0] == 401
    async with site.asks_as("tk-alice") as alice, site.asks_as("tk-op") as operator:
        with pytest.raises(Forbidden):
            await alice.cluster_status()
        assert (await operator.cluster_status()).models


async def test_every_call_of_the_public_api_asks_for_a_key(site: Site) -> None:
    async with channel(site.cluster.address, site.visitor) as link:
        for method in pb.DESCRIPTOR.services_by_name["Inference"].methods:
            call = link.unary_stream(f"/tandem.v1.Inference/{method.name}")(b"", timeout=5)
            assert isinstance(await refusal(call.read()), Unauthenticated), method.name


async def test_a_batch_and_tokenize_keep_to_the_keys_models_and_tenant(site: Site) -> None:
    async with site.asks_as("tk-alice") as client:
        requests = [
            pb.GenerateRequest(token_ids=PROMPT, tenant=tenant, sampling=pb.Sampling(max_tokens=2)) for tenant in "ab"
        ]
        failures = {result.index: error_of(result) async for result in client.generate_batch(requests, timeout_s=20)}
        assert failures[0] is None
        assert isinstance(failures[1], Forbidden)
        assert await client.tokenize("word1")


async def test_keys_come_and_go_while_it_runs(site: Site) -> None:
    before = site.keys.read_text()
    async with site.asks_as("tk-carol") as client:

        async def served() -> bool:
            try:
                return bool(await client.list_models())
            except Unauthenticated:
                return False

        async def refused() -> bool:
            return not await served()

        assert not await served()
        site.keys.write_text(before + entry_for("tk-carol", "carol", "c", ["simulated"], None))
        await until(served, "the new key is known")
        site.keys.write_text(before)
        await until(refused, "it is known no more")


async def test_a_key_sees_its_models_only(site: Site) -> None:
    before = site.keys.read_text()
    site.keys.write_text(before + entry_for("tk-dora", "dora", "d", ["elsewhere"], None))
    async with site.asks_as("tk-dora") as client:

        async def sees_nothing() -> bool:
            try:
                return not await client.list_models()
            except Unauthenticated:
                return False

        await until(sees_nothing, "the new key is known")
        with pytest.raises(Forbidden):
            await client.tokenize("word1", model="simulated")
        for model in ("", "simulated", "elsewhere-too", "auto"):
            with pytest.raises(Forbidden):
                async for _ in client.generate(token_ids=PROMPT, model=model):
                    pass
    site.keys.write_text(before)


async def test_metadata_beyond_the_limit_is_refused_before_anybody_hears_of_it(site: Site) -> None:
    async with channel(site.cluster.address, site.visitor) as link:
        call = link.unary_unary("/tandem.v1.Inference/ListModels")
        error = await refusal(call(b"", timeout=10, metadata=(("x-pad", "x" * 2 * MAX_METADATA_BYTES),)))
        assert error.code == "RESOURCE_EXHAUSTED"
    async with site.asks_as("tk-alice") as client:
        assert await client.list_models()


# ------------------------------------------------------------------------------------------------ re-issue, secrets


async def test_certificates_are_issued_again_while_it_runs(site: Site, ask: Ask) -> None:
    site.cluster_ca.issue("member", hosts=("localhost", "again"))
    renamed = MemberIdentity(member_of(site.issued, site.cluster_ca).credentials, "again")
    for role in (site.cluster.router, *site.cluster.workers):
        async with channel(role.joined_at, renamed) as link:
            await link.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
    async with site.asks_as("tk-alice") as client:
        await ask(client, PROMPT, cache_salt="again")


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


async def test_no_secret_is_in_a_command_line(site: Site) -> None:
    hashes = [line.split("sha256: ")[1][:64] for line in site.keys.read_text().splitlines()]
    pids = [site.cluster.router.pid, *(role.pid for role in site.cluster.workers)]
    pids += [engine_of(worker) for worker in site.cluster.workers]
    for pid in pids:
        assert not any(secret in _command_line(pid) for secret in ("tk-alice", *hashes))


# ------------------------------------------------------------------------------------------------ tenants


async def _probe(client: Client, prompt: list[int]) -> pb.Finish:
    sampling = pb.Sampling(max_tokens=4, temperature=0)
    async for piece in client.generate(token_ids=prompt, sampling=sampling, timeout_s=30):
        last = piece
    return last.finish


def _is_fresh(finish: pb.Finish) -> bool:
    """Nothing of it was known anywhere: here, at a lender, in a tier."""
    kv = finish.receipt.kv
    known = kv.reused_blocks + kv.restored_blocks + kv.lender_cached_blocks + kv.lender_fetched_blocks
    return finish.usage.cached_tokens == 0 and known == 0


async def test_one_tenant_cannot_see_what_another_asked(site: Site) -> None:
    secret = [(7 * number) % (VOCAB - 1) + 1 for number in range(200)]
    async with site.asks_as("tk-alice") as alice, site.asks_as("tk-bob") as bob:
        assert _is_fresh(await _probe(alice, secret))
        assert not _is_fresh(await _probe(alice, secret)), "its own it finds, or this test could not fail"
        assert _is_fresh(await _probe(bob, secret))
        assert not _is_fresh(await _probe(bob, secret))


async def test_without_isolation_one_tenant_sees_what_another_asked(sim_model: ModelFactory, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, *({"name": n, "sha256": hash_of(f"tk-{n}"), "tenant": n} for n in "ab"))
    cluster = http_cluster(sim_model(VOCAB), 1, {"api_keys_file": keys} | LENDER_ALWAYS, engine="sim")
    async with cluster, Client(cluster.address, api_key="tk-a") as a, Client(cluster.address, api_key="tk-b") as b:
        assert _is_fresh(await _probe(a, PROMPT))
        assert not _is_fresh(await _probe(b, PROMPT))


async def test_a_router_does_not_start_half_guarded(sim_model: ModelFactory, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "cluster")
    issued = authority.issue("member", days=1)
    other = authority.issue("other")
    tls = {"tls_cert": issued.cert, "tls_key": other.key, "tls_ca": authority.path}
    with pytest.raises(StartError, match="tls_cert"):
        async with http_cluster(sim_model(VOCAB), 1, tls, engine="sim"):
            pass
