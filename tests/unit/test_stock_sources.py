"""Where stock servers come from: the settings, what sources read, and one list of all of them."""

import json
import logging
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.errors import StartError
from cluster.network.kubernetes import ApiServer, ApiServerSettings
from router.models.config import FleetConfig, ServerEntry
from router.stock.sources.kubernetes import EndpointSlice, Expired, Lines, Mirror, Pod, addresses_of, endpoints_of
from router.stock.sources.listings import listings, merged
from router.stock.sources.servers import Server, ServerFile, SourceFailed, Trouble, look_up, servers_at, servers_in
from support.refusals import refusal_of
from support.watch_api import Resource, endpoint_slice, pod

ENTRY = ServerEntry(file=Path("servers"), role="decode")
READY, SERVING, LEAVING = {"ready": True}, {"ready": False, "serving": True}, {"ready": False, "serving": False}


@pytest.mark.parametrize(
    ("values", "field", "said"),
    [
        ({}, "servers", "Field required"),
        ({"servers": []}, "servers", "at least 1"),
        ({"servers": [{}]}, "servers.0", "exactly one of url, dns, file, service, pods, and has none of them"),
        ({"servers": [{"url": "a:1", "dns": "b:2"}]}, "servers.0", "has url and dns"),
        ({"servers": [{"url": "a:1"}, {"url": "http://a:1/v1"}]}, "servers.1.url", "'http://a:1/v1' is not host:port"),
        ({"servers": [{"url": "a:70000"}]}, "servers.0.url", "a port must be 1 to 65535"),
        ({"servers": [{"dns": "grpc://a:1"}]}, "servers.0.dns", "is not host:port or a URL"),
        ({"servers": [{"url": "a:1", "role": "encode"}]}, "servers.0.role", "'decode', 'prefill' or 'both'"),
        ({"servers": [{"service": {"name": "a"}}]}, "servers.0.service.port", "Field required"),
        ({"servers": [{"pods": {"selector": "a=b", "port": 0}}]}, "servers.0.pods.port", "greater than or equal to 1"),
        ({"servers": [{"url": "a:1", "rol": "both"}]}, "servers.0.rol", "did you mean role?"),
        ({"servers": [{"url": "a:1"}], "kubernetes": {"api": "x"}}, "kubernetes.api", "unknown key"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(values: dict[str, Any], field: str, said: str) -> None:
    with refusal_of(field, StartError, says=said):
        FleetConfig.parse(values)


@pytest.mark.parametrize(
    ("said", "url"),
    [
        ("10.0.0.5:8000", "http://10.0.0.5:8000"),
        ("https://Host", "https://host:443"),
        ("http://host/", "http://host:80"),
        ("http://[FD00::5]:8000", "http://[fd00::5]:8000"),
    ],
)
def test_urls_have_one_form(said: str, url: str) -> None:
    assert FleetConfig.parse({"servers": [{"url": said}]}).servers[0].url == url


@pytest.mark.parametrize(
    ("server", "field"),
    [
        ("", "fleet.kubernetes.api_server"),
        ("api:6443", "fleet.kubernetes.api_server"),
        ("https://api:6443/x", "fleet.kubernetes.api_server"),
        ("https://api:6443", "fleet.kubernetes.account_dir"),
        ("http://api:6443", "fleet.servers.1.service.namespace"),
    ],
)
def test_kubernetes_must_be_reachable_by_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, field: str
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    kubernetes = {"api_server": server, "account_dir": str(tmp_path)}
    servers = [{"url": "a:1"}, {"service": {"name": "vllm", "port": 8000}}]
    with refusal_of(field, StartError):
        listings(FleetConfig.parse({"servers": servers, "kubernetes": kubernetes}))


def test_a_pod_knows_its_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (tmp_path / "ca.crt").write_text("none")
    with pytest.raises(StartError, match=r"kubernetes\.account_dir: cannot read .*ca\.crt"):
        ApiServer.of(ApiServerSettings(account_dir=tmp_path), "kubernetes")


# ---------------------------------------------------------------------- names


def found_at(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let the resolver answer with these addresses."""

    def getaddrinfo(*name: object, **asked: int) -> list[tuple[Any, ...]]:
        assert (name, asked) == (("vllm.serving.svc", 8000), {"type": socket.SOCK_STREAM})
        return [
            (socket.AF_INET6, 1, 6, "", (address, 8000, 0, 0))
            if ":" in address
            else (socket.AF_INET, 1, 6, "", (address, 8000))
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("dns", "addresses", "urls"),
    [
        ("vllm.serving.svc:8000", ("10.0.0.9", "10.0.0.10"), ["http://10.0.0.10:8000", "http://10.0.0.9:8000"]),
        ("https://vllm.serving.svc:8000", ("fd00::2",), ["https://[fd00::2]:8000"]),
        ("vllm.serving.svc:8000", ("fd00::2", "10.0.0.9", "10.0.0.9"), ["http://10.0.0.9:8000"]),
    ],
)
def test_each_address_of_a_name_is_a_server(
    monkeypatch: pytest.MonkeyPatch, dns: str, addresses: tuple[str, ...], urls: list[str]
) -> None:
    found_at(monkeypatch, *addresses)
    entry = ServerEntry(dns=dns, role="prefill")
    servers = look_up(entry)
    assert [server.url for server in servers] == urls
    assert {(server.role, server.entry, server.draining) for server in servers} == {("prefill", entry, False)}


def test_a_name_that_is_not_resolved_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(SourceFailed, match="Temporary failure in name resolution"):
        look_up(ServerEntry(dns="vllm:8000"))


# ---------------------------------------------------------------------- files


def said_of(text: str) -> list[tuple[str, str]]:
    return [(server.url, server.role) for server in servers_in(text, ENTRY)]


def test_a_file_has_a_url_a_line_or_a_yaml_list() -> None:
    lines = "# two\n10.0.0.5:8000  # new\n\nhttps://b\n"
    assert said_of(lines) == [("http://10.0.0.5:8000", "decode"), ("https://b:443", "decode")]
    listed = "- url: a:1\n  role: prefill\n- b:2\n- {url: 'http://c:3'}\n"
    assert said_of(listed) == [("http://a:1", "prefill"), ("http://b:2", "decode"), ("http://c:3", "decode")]
    assert said_of('[{"url": "a:1"}]') == [("http://a:1", "decode")]
    assert said_of("[]") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- url: [", "is not YAML"),
        ("{url: 'a:1'}", "holds no list"),
        ("- 5\n", "server 1 is 5"),
        ("- url: a:1\n- rol: both\n", "server 2: "),
        ("a:1\nb:70000\n", "server 2: url: 'b:70000': a port must be 1 to 65535"),
        ("- {url: 'a:1', role: encode}", "server 1: role: "),
        ("- url: ''", "server 1: url: "),
    ],
)
def test_a_wrong_file_is_a_failure_that_names_the_server(text: str, said: str) -> None:
    with pytest.raises(SourceFailed, match=said):
        servers_in(text, ENTRY)


class Served:
    """A file of servers, written at times of its own."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 1
        self.file = ServerFile(ENTRY, path)

    def write(self, text: str) -> None:
        self.now += 1
        self.path.write_text(text)
        os.utime(self.path, ns=(self.now, self.now))

    def look(self) -> list[str]:
        return [server.url for server in self.file.look()]


def test_a_file_is_read_when_it_stands_still(tmp_path: Path) -> None:
    served = Served(tmp_path / "servers")
    with pytest.raises(SourceFailed, match="cannot be read: No such file"):
        served.look()
    served.write("a:1\n")
    assert served.look() == ["http://a:1"], "nothing was listed, so nothing can be lost"
    served.write("a:1\nb:2")
    assert served.look() == ["http://a:1"]
    served.write("a:1\nb:234\n")
    assert served.look() == ["http://a:1"], "it still changes"
    assert served.look() == ["http://a:1", "http://b:234"]
    served.write("a:1\nb:x\n")
    assert served.look() == ["http://a:1", "http://b:234"]
    for _ in range(2):
        with pytest.raises(SourceFailed, match="server 2"):
            served.look()
    served.write("c:3\n")
    assert served.look() == ["http://a:1", "http://b:234"]
    assert served.look() == ["http://c:3"]
    served.path.unlink()
    with pytest.raises(SourceFailed, match="cannot be read"):
        served.look()
    served.path.write_bytes(b"\xff")
    served.look()
    with pytest.raises(SourceFailed, match="is not UTF-8"):
        served.look()


class FileWithWriters(RuleBasedStateMachine):
    """A file that is written, broken and removed between looks."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.served = Served(Path(self.folder.name) / "servers")
        self.contents: list[str | None] = []
        """At each look; None without a file."""
        self.listed: list[str] | None = None
        """By the last content that stood still, or by the first one that could be read."""
        self.now: str | None = None

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(text=st.sampled_from(("a:1\n", "a:1\nb:2\n", "b:2\nc:", "[]", "", "- url:")))
    def write(self, text: str) -> None:
        self.now = f"{text}# {len(self.contents)}.{self.served.now}"  # no two are equal
        self.served.write(self.now)

    @precondition(lambda self: self.now is not None)
    @rule()
    def remove(self) -> None:
        self.now = None
        self.served.path.unlink()

    @rule()
    def look(self) -> None:
        seen = [content for content in (*self.contents, self.now) if content is not None]
        self.contents.append(self.now)
        may_be_read = self.listed is None or seen[-2:-1] == [self.now]
        try:
            found = self.served.look()
        except SourceFailed:
            assert self.now is None or (may_be_read and urls_in(self.now) is None)
            return
        assert self.now is not None
        if may_be_read:
            self.listed = urls_in(self.now)
        assert found == self.listed


def urls_in(text: str) -> list[str] | None:
    """Return the URLs of a file's text; None for one that is wrong."""
    try:
        return [server.url for server in servers_in(text, ENTRY)]
    except SourceFailed:
        return None


TestFileWithWriters = FileWithWriters.TestCase


def test_one_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble("file servers")
    with caplog.at_level(logging.INFO):
        for reason in ("is empty", "is empty", "is not YAML", "is empty"):
            trouble.has(reason)
        trouble.is_over()
        trouble.is_over()
        trouble.has("is empty")
    stays = "its last servers stay"
    assert [record.getMessage() for record in caplog.records] == [
        f"file servers: is empty; {stays}",
        f"file servers: is not YAML; {stays}",
        f"file servers: is empty; {stays}",
        "file servers lists servers again",
        f"file servers: is empty; {stays}",
    ]


# ---------------------------------------------------------------------- Kubernetes


def mirror_of(kind: type[Any], *resources: Resource) -> Mirror[Any]:
    mirror = Mirror(kind)
    mirror.listed(json.dumps({"metadata": {"resourceVersion": "1"}, "items": resources}).encode())
    return mirror


def as_kind(kind: type[Any], *resources: Resource) -> list[Any]:
    return list(mirror_of(kind, *resources).held.values())


@pytest.mark.parametrize(
    ("conditions", "drains"),
    [
        ({}, False),
        (READY, False),
        (READY | {"serving": True, "terminating": False}, False),
        (READY | {"terminating": True}, True),
        (SERVING, True),
        (SERVING | {"terminating": True}, True),
        (LEAVING, None),
        (LEAVING | {"terminating": True}, None),
        ({"ready": False}, None),
    ],
)
def test_an_endpoint_serves_drains_or_is_absent(conditions: dict[str, bool], drains: bool | None) -> None:
    slices = as_kind(EndpointSlice, endpoint_slice("a", "vllm", {"10.0.0.1": conditions}))
    assert endpoints_of(slices) == ({} if drains is None else {"10.0.0.1": drains})


def test_the_slices_of_a_service_are_one_list_of_one_family() -> None:
    four = [endpoint_slice("a", "vllm", {"10.0.0.1": READY}), endpoint_slice("b", "vllm", {"10.0.0.2": SERVING})]
    six = endpoint_slice("c", "vllm", {"fd00::1": READY}, "IPv6")
    moving = endpoint_slice("d", "vllm", {"10.0.0.2": READY})
    assert endpoints_of(as_kind(EndpointSlice, six, *four)) == {"10.0.0.1": False, "10.0.0.2": True}
    assert endpoints_of(as_kind(EndpointSlice, six)) == {"fd00::1": False}
    assert endpoints_of(as_kind(EndpointSlice, six, endpoint_slice("a", "vllm", {}))) == {}
    for order in ((*four, moving), (moving, *four)):
        assert endpoints_of(as_kind(EndpointSlice, *order))["10.0.0.2"] is False
    several = endpoint_slice("a", "vllm", {"10.0.0.1": READY})
    several["endpoints"] = [{"addresses": ["10.0.0.1", "10.0.0.7"]}, {"addresses": []}]
    assert endpoints_of(as_kind(EndpointSlice, several)) == {"10.0.0.1": False}
    assert endpoints_of([]) == {}


def test_a_ready_pod_serves_until_its_deletion_begins() -> None:
    pods = as_kind(
        Pod,
        pod("new"),
        pod("starting", "10.0.0.1", ready=False),
        pod("ready", "10.0.0.2"),
        pod("leaving", "10.0.0.3", leaving=True),
        pod("left", "10.0.0.4", ready=False, leaving=True),
        pod("old", "10.0.0.5", leaving=True),
        pod("its-heir", "10.0.0.5"),
        pod("six", "fd00::1"),
    )
    found = addresses_of(pods)
    assert found == {"10.0.0.2": False, "10.0.0.3": True, "10.0.0.5": False, "fd00::1": False}
    servers = servers_at(ENTRY, "http", found, 8000)
    assert [(server.url, server.draining) for server in servers] == [
        ("http://10.0.0.2:8000", False),
        ("http://10.0.0.3:8000", True),
        ("http://10.0.0.5:8000", False),
        ("http://[fd00::1]:8000", False),
    ]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"metadata": {}, "items": []}', b'{"metadata": {"resourceVersion": 5}}']
)
def test_a_list_of_another_form_changes_nothing(body: bytes) -> None:
    mirror = mirror_of(Pod, pod("a", "10.0.0.1"))
    with pytest.raises(SourceFailed, match="a list has"):
        mirror.listed(body)
    assert list(mirror.held) == ["a"]


@pytest.mark.parametrize(
    "line",
    [
        b"nothing",
        b'{"type": "RENAMED", "object": {}}',
        b'{"type": "ADDED", "object": {"metadata": {"name": 5}}}',
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}',
    ],
)
def test_after_an_event_that_cannot_be_read_all_is_listed(line: bytes) -> None:
    mirror = mirror_of(Pod, pod("a", "10.0.0.1"))
    with pytest.raises(SourceFailed):
        mirror.happened(line)
    assert (mirror.version, list(mirror.held)) == ("", ["a"])


NAMES, IPS = st.sampled_from("abc"), st.sampled_from(("10.0.0.1", "10.0.0.2", "10.0.0.3"))


class WatchedPods(RuleBasedStateMachine):
    """Pods that a mirror follows, late and with breaks, against those that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 1
        self.there: dict[str, tuple[str, bool, bool]] = {}
        self.events: list[tuple[int, str, Resource]] = []
        self.oldest = 1
        self.mirror = Mirror(Pod)

    def record(self, kind: str, name: str, ip: str, ready: bool, leaving: bool) -> None:
        self.version += 1
        resource = pod(name, ip, ready, leaving)
        resource["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, kind, resource))

    @rule(name=NAMES, ip=IPS, ready=st.booleans(), leaving=st.booleans())
    def change(self, name: str, ip: str, ready: bool, leaving: bool) -> None:
        kind = "MODIFIED" if name in self.there else "ADDED"
        self.there[name] = ip, ready, leaving
        self.record(kind, name, ip, ready, leaving)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.there)))
        self.record("DELETED", name, *self.there.pop(name))

    @rule()
    def something_else_happens(self) -> None:
        """The version grows by what the query does not select."""
        self.version += 1

    @rule()
    def forget(self) -> None:
        """The server forgets what has happened."""
        self.oldest, self.events = self.version, []

    @rule(most=st.integers(0, 5), with_bookmark=st.booleans())
    def watch(self, most: int, with_bookmark: bool) -> None:
        """Go on from the mirror's version for some events, or list where that is not known any more."""
        if not self.mirror.version:
            items = [pod(name, *each) for name, each in self.there.items()]
            answer = {"metadata": {"resourceVersion": str(self.version)}, "items": items}
            self.mirror.listed(json.dumps(answer).encode())
            return
        if int(self.mirror.version) < self.oldest:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
            with pytest.raises(Expired):
                self.mirror.happened(json.dumps(gone).encode())
            return
        coming = [each for each in self.events if each[0] > int(self.mirror.version)]
        for _, kind, resource in coming[:most]:
            self.mirror.happened(json.dumps({"type": kind, "object": resource}).encode())
        if with_bookmark and len(coming) <= most:
            mark = {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}}
            self.mirror.happened(json.dumps({"type": "BOOKMARK", "object": mark}).encode())
            assert self.mirror.version == str(self.version)

    @invariant()
    def it_is_what_there_is(self) -> None:
        if self.mirror.version == str(self.version):
            ready = [(ip, leaving) for ip, is_ready, leaving in self.there.values() if is_ready]
            assert addresses_of(self.mirror.held.values()) == {
                ip: all(leaving for other, leaving in ready if other == ip) for ip, _ in ready
            }


@given(st.lists(st.sampled_from((b"{}", b"", b"[1]", b'{"a": "b"}')), max_size=5), st.data())
def test_lines_are_whole_however_they_arrive(lines: list[bytes], data: st.DataObject) -> None:
    text, reader, found = b"".join(line + b"\n" for line in lines) + b"cut of", Lines(), []
    while text:
        size = data.draw(st.integers(1, len(text)))
        found += reader.feed(text[:size])
        text = text[size:]
    assert found == [line for line in lines if line]


TestWatchedPods = WatchedPods.TestCase


# ---------------------------------------------------------------------- all together

SERVERS = st.builds(
    Server,
    st.sampled_from(("http://a:1", "http://b:2", "http://c:3")),
    st.just(ENTRY),
    st.sampled_from(("decode", "prefill", "both")),
    st.booleans(),
)


@given(st.lists(st.lists(SERVERS, max_size=4).map(tuple), max_size=4))
def test_each_url_is_listed_once_as_the_first_entry_says(lists: list[tuple[Server, ...]]) -> None:
    found, all_of_them = merged(lists), [server for servers in lists for server in servers]
    assert [server.url for server in found] == list(dict.fromkeys(server.url for server in all_of_them))
    for server in found:
        assert next(each for each in all_of_them if each.url == server.url) is server


async def test_urls_are_listed_at_once_and_only_once() -> None:
    listing = listings(FleetConfig.parse({"servers": [{"url": "a:1", "role": "prefill"}, {"url": "http://a:1"}]}))
    assert [(server.url, server.role) for server in await anext(listing)] == [("http://a:1", "prefill")]
    await listing.aclose()
