"""Which TLS settings go together, which files do, and what happens when they change."""

import ssl
from pathlib import Path
from typing import Any

import pytest

from cluster.config import secrets_of, to_overrides
from cluster.errors import StartError
from cluster.network.tls import ClientIdentity, Credentials, File, member_of
from engine.config import WorkerConfig
from router.config import RouterConfig
from support.certificates import Authority, Issued
from support.refusals import refusal_of
from tandem.topology import plan_topology


@pytest.fixture
def cluster(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "cluster")


def credentials_of(issued: Issued, authority: Authority) -> Credentials:
    return Credentials(File("tls_cert", issued.cert), File("tls_key", issued.key), [File("tls_ca", authority.path)])


def test_a_members_settings_go_together(cluster: Authority) -> None:
    issued = cluster.issue("member")
    given: dict[str, Any] = {"tls_cert": issued.cert, "tls_key": issued.key, "tls_ca": cluster.path}
    assert member_of(WorkerConfig(model=Path("m"))) is None
    assert member_of(WorkerConfig(model=Path("m"), **given)) is not None
    for left_out in given:
        some = {name: value for name, value in given.items() if name != left_out}
        with refusal_of(left_out, StartError):
            member_of(WorkerConfig(model=Path("m"), **some))
    with pytest.raises(StartError, match="tls_server_name"):
        member_of(WorkerConfig(model=Path("m"), tls_server_name="x"))


def test_files_that_do_not_fit_are_refused_with_their_setting(cluster: Authority, tmp_path: Path) -> None:
    one, other = cluster.issue("one"), cluster.issue("other")
    none, text = tmp_path / "none", tmp_path / "text"
    text.write_text("no certificate")
    for cert, key, ca, field in (
        (none, one.key, cluster.path, "tls_cert"),
        (one.cert, none, cluster.path, "tls_key"),
        (one.cert, one.key, none, "tls_ca"),
        (one.cert, other.key, cluster.path, "tls_cert"),
        (text, one.key, cluster.path, "tls_cert"),
        (one.cert, text, cluster.path, "tls_cert"),
        (one.cert, one.key, text, "tls_ca"),
    ):
        with pytest.raises(StartError) as refused:
            Credentials(File("tls_cert", cert), File("tls_key", key), [File("tls_ca", ca)])
        assert refused.value.field == field, (cert, key, ca)


def test_what_is_issued_again_is_used_and_what_is_half_written_is_not(
    cluster: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issued = cluster.issue("member")
    credentials = credentials_of(issued, cluster)
    before = credentials.current()
    assert credentials.current() is before
    cluster.issue("member")
    again = credentials.current()
    assert again.cert == issued.cert.read_bytes() != before.cert
    issued.key.write_bytes(cluster.issue("other").key.read_bytes())  # the certificate is yet to follow
    for _ in range(3):
        assert credentials.current() is again
    assert caplog.text.count("cannot be used") == 1
    issued.cert.unlink()
    assert credentials.current() is again
    cluster.issue("member")
    assert credentials.current().cert == issued.cert.read_bytes()


def router_of(**values: Any) -> RouterConfig:
    return RouterConfig.parse({"model": "m"} | values)


def test_clients_and_members_are_told_apart(cluster: Authority, tmp_path: Path) -> None:
    clients = Authority(tmp_path, "clients")
    issued = cluster.issue("router")
    tls = {"tls_cert": issued.cert, "tls_key": issued.key, "tls_ca": cluster.path, "internal_port": 0}
    public, member = router_of(**tls).frontends()
    assert member is not None
    assert public.for_http().verify_mode is ssl.CERT_NONE
    public, _ = router_of(**tls, tls_client_ca=clients.path).frontends()
    assert public.for_http().verify_mode is ssl.CERT_REQUIRED
    for wrong, field in (
        ({**tls, "internal_port": None}, "internal_port"),
        ({"api_keys_file": "k"}, "internal_port"),
        ({**tls, "tls_client_ca": cluster.path}, "tls_client_ca"),
        ({"tls_client_ca": clients.path}, "tls_client_ca"),
        ({**tls, "tls_public_cert": issued.cert}, "tls_public_key"),
    ):
        with pytest.raises(StartError) as refused:
            router_of(**wrong).frontends()
        assert refused.value.field == field, wrong


def test_a_certificate_for_clients_only_leaves_members_in_the_clear(cluster: Authority) -> None:
    issued = cluster.issue("router")
    public, member = router_of(tls_public_cert=issued.cert, tls_public_key=issued.key, internal_port=0).frontends()
    assert public is not None
    assert member is None


def test_launchers_give_a_guarded_router_a_port_for_workers() -> None:
    def planned(**router: Any) -> list[int | None]:
        plan = plan_topology(0, 1, {"model": "m", "port": 0} | router, {"model": "m"}, [0], num_routers=2)
        return [each.internal_port for each in plan.routers]

    assert planned() == [None, None]
    assert planned(api_keys_file="k") == [0, 0]
    assert planned(api_keys_file="k", internal_port=7000) == [7000, 7001]


def test_a_client_names_the_file_that_is_missing(cluster: Authority, tmp_path: Path) -> None:
    issued = cluster.issue("client")
    for visitor, field in (
        (ClientIdentity(tmp_path / "none"), "tls_ca"),
        (ClientIdentity(cluster.path, cert=issued.cert), "tls_key"),
        (ClientIdentity(cluster.path, key=issued.key), "tls_cert"),
    ):
        with refusal_of(field, StartError):
            visitor.pem()


def test_secrets_are_not_on_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    config = RouterConfig.parse({"model": "m", "redis_url": "redis://:hunter2@h:1/0"})
    arguments = to_overrides(config)
    assert "hunter2" not in repr(arguments)
    assert "hunter2" not in repr(config)
    monkeypatch.setattr("sys.stdin", io.StringIO(secrets_of(config)))
    assert RouterConfig.from_command_line("router", arguments) == config


def test_keys_in_the_clear_are_warned_of_where_others_reach_the_router(
    cluster: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"api_keys_file": "k", "internal_port": 0}
    router_of(**keys).frontends()
    assert not caplog.records, "nobody else reaches this host's loopback"
    router_of(**keys, host="0.0.0.0").frontends()
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in said] == [
        "API keys are sent unencrypted",
        "without tls_ca any process that reaches internal_port may join and be sent prompts",
    ]
    caplog.clear()
    issued = cluster.issue("router")
    tls = {"tls_cert": issued.cert, "tls_key": issued.key, "tls_ca": cluster.path}
    router_of(**keys, **tls, host="0.0.0.0").frontends()
    assert not caplog.records
