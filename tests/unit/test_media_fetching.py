"""Which URLs a preprocessor reads: addresses, hosts, and files within `data:` URLs."""

import base64
import socket

import pytest

from cluster.errors import InvalidRequest, StartError
from preprocessor.config import PreprocessorConfig
from preprocessor.fetching import MAX_URL_CHARS, Fetcher, is_allowed, is_public


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700:4700::1111", "2001:4860:4860::8888"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "192.0.0.1", "198.18.0.1", "203.0.113.1", "224.0.0.1", "240.0.0.1"),
        *("255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "::ffff:169.254.169.254", "::127.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::1", "2002:a00:1::", "2001::1"),
        *("", "localhost", "example.org", "1.2.3", "0x7f.1"),
    ],
)
def test_other_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("images.example.org", True),
        ("IMAGES.example.ORG.", True),
        ("a.cdn.example.org", True),
        ("a.b.cdn.example.org", True),
        ("cdn.example.org", False),
        (".cdn.example.org", False),
        ("evilcdn.example.org", False),
        ("example.org", False),
        ("images.example.org.evil.com", False),
        ("ximages.example.org", False),
        ("", False),
    ],
)
def test_hosts(host: str, allowed: bool) -> None:
    assert is_allowed(host, ("images.example.org", "*.cdn.example.org")) is allowed


@pytest.mark.parametrize("host", ["*", "http://a.org", "a.org/x", "a b", "*.*.org", "user@a.org", ""])
def test_a_setting_that_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(StartError, match="allowed_hosts"):
        PreprocessorConfig.parse({"model": "m", "allowed_hosts": [host]})


def fetcher(max_bytes: int = 1 << 20, hosts: tuple[str, ...] = ()) -> Fetcher:
    return Fetcher(hosts, max_bytes, 5.0)


async def test_data_urls_are_decoded() -> None:
    text = base64.b64encode(b"a file").decode()
    for url in (f"data:image/png;base64,{text}", f"DATA:;base64,{text}", "data:,a%20file", "data:text/plain,a file"):
        assert await fetcher().fetch(url, "media[0]") == b"a file"
    large = base64.b64encode(bytes(2 << 20)).decode()
    assert await fetcher(2 << 20).fetch(f"data:;base64,{large}", "media[0]") == bytes(2 << 20)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:image/png;base64,a",
        "data:image/png;base64,&&&&",
        "data:;base64," + base64.b64encode(bytes((1 << 20) + 1)).decode(),
        "data:," + "%41" * ((1 << 20) + 1),
        "data:," + "a" * (4 << 20),
        "ftp://images.example.org/a",
        "file:///etc/passwd",
        "//images.example.org/a",
        "images.example.org/a",
        "http://user@images.example.org/a",
        "http://user:word@images.example.org/a",
        "http://images.example.org:99999/a",
        "http://[images.example.org/a",
        "http://images.example.org\\@127.0.0.1/",
        "http://127.0.0.1/a",
        "http://[::1]/a",
        "http://images.example.org.evil.com/a",
        "http://images.example.org/" + "a" * MAX_URL_CHARS,
        "",
    ],
)
async def test_other_urls_are_refused_before_anything_is_connected_to(url: str) -> None:
    def no_connection(address: str) -> bool:
        raise AssertionError(f"{address} was to be connected to")

    reader = Fetcher(("images.example.org",), 1 << 20, 5.0, no_connection)
    with pytest.raises(InvalidRequest) as refusal:
        await reader.fetch(url, "media[3]")
    assert refusal.value.field == "media[3]"
    await reader.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.1.2.3", "169.254.169.254"])
def test_no_socket_is_made_for_an_address_that_is_not_public(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with pytest.raises(OSError, match="not public"):
        fetcher().socket_for((family, socket.SOCK_STREAM, 0, "", (address, 80)))
