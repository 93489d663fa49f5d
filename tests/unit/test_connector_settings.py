"""Settings of the connector, and references in `kv_transfer_params`: what they take, and what errors say."""

from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartError
from cluster.network.kubernetes import server_url
from loans.network import Peer
from tandem_connector.servers import read_reference, write_reference
from tandem_connector.settings import ConnectorSettings

INCARNATION = bytes(range(16))


def refusal(**extra: Any) -> str:
    with pytest.raises(StartError) as refused:
        ConnectorSettings.read(extra)
    return str(refused.value)


def test_lenders_are_a_list_or_a_text() -> None:
    both = "http://prefill:8000", "https://[::1]:443"
    assert ConnectorSettings.read({"lenders": ["prefill:8000", "https://[::1]"]}).lenders == both
    assert ConnectorSettings.read({"lenders": "prefill:8000, https://[::1]:443"}).lenders == both


@pytest.mark.parametrize("server", ["http://a:80/v1", "ftp://a", "http://", "a:80?x=1"])
def test_a_server_is_an_address_or_a_url(server: str) -> None:
    with pytest.raises(ValueError, match="is not host:port or a URL"):
        server_url(server)
    assert refusal(lenders=[server]).startswith("kv_connector_extra_config.lenders")


def test_errors_name_the_key() -> None:
    assert refusal(lender="a:1").startswith("kv_connector_extra_config.lender: unknown key; did you mean lenders?")
    assert refusal(loan_port=70000).startswith("kv_connector_extra_config.loan_port: ")
    assert refusal(patience_s=0).startswith("kv_connector_extra_config.patience_s: ")


def test_an_open_address_needs_a_guard(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"loan_host: 0\.0\.0\.0 is not loopback.*secret_file"):
        ConnectorSettings.read({"loan_host": "0.0.0.0"}).check()
    ConnectorSettings.read({"loan_host": "127.0.0.2"}).check()
    assert ConnectorSettings.read({}).host == "127.0.0.1"
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    guarded = ConnectorSettings.read({"secret_file": str(secret)})
    guarded.check()
    assert (guarded.host, guarded.secret()) == ("0.0.0.0", b"0123456789abcdef")


def test_a_secret_has_a_length(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("too short")
    with pytest.raises(StartError, match=r"secret_file: .* has 9 bytes; a secret has at least 16"):
        ConnectorSettings.read({"secret_file": short}).secret()
    with pytest.raises(StartError, match=r"lender_api_key_file: cannot read"):
        ConnectorSettings.read({"lender_api_key_file": tmp_path / "none"}).api_key()
    with pytest.raises(StartError, match="tls_key: is missing"):
        ConnectorSettings.read({"tls_cert": "a", "tls_ca": "b"}).trust()


def test_a_reference_comes_back() -> None:
    peer = Peer("host:5", "host:5", INCARNATION)
    params = write_reference(peer, 3, "r", 2)
    assert read_reference(params) == (peer, 3)
    assert {"do_remote_prefill", "do_remote_decode", "remote_block_ids", "tp_size", "remote_request_id"} < set(params)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_engine_id", "b9e8befd-ae29-471a-a5db-ecdb03c52f54"),
        ("remote_engine_id", "tandem-0102-0"),
        ("remote_engine_id", f"tandem-{INCARNATION.hex()}-x"),
        ("remote_engine_id", None),
        ("remote_host", ""),
        ("remote_host", ["a"]),
        ("remote_port", "5"),
        ("remote_port", 0),
        ("remote_port", 65536),
    ],
)
def test_a_damaged_reference_names_its_key(key: str, value: Any) -> None:
    params = write_reference(Peer("host:5", "host:5", INCARNATION), 0, "r", 1) | {key: value}
    with pytest.raises(ValueError, match=rf"^kv_transfer_params\.{key}: "):
        read_reference(params)
