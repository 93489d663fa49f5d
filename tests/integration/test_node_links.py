"""Links between nodes, over real sockets: who is let in, and what ends them."""

import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from engine.config import WorkerConfig
from engine.errors import EngineStartError
from engine.process.ranks.nodes import (
    Beat,
    Hello,
    NodeRefused,
    Nodes,
    RankHello,
    Sender,
    Welcome,
    address_of,
    connect_to,
    facts_of,
    heard,
    interface_of,
    key_of,
    own_address,
)
from support.ports import free_port


def settings(**others: Any) -> WorkerConfig:
    good = {"model": "m", "engine": "vllm", "tensor_parallel": 4, "nodes": 2, "master_addr": "127.0.0.1"}
    return WorkerConfig.parse(good | {"master_port": free_port(count=2)} | others)


class Site:
    """Node 0 and the connections that others made."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.ranks: SimpleQueue[tuple[int, Connection]] = SimpleQueue()
        self.lost: SimpleQueue[str] = SimpleQueue()
        self.nodes = Nodes(config, "agent", lambda *rank: self.ranks.put(rank), self.lost.put)
        self.facts = facts_of(config, "weights", "0.32.0")
        self.gathering = threading.Thread(target=self.nodes.gather, args=(self.facts,), daemon=True)
        self.gathering.start()
        self._connected: list[Connection] = []

    def connect(self) -> Connection:
        connection = connect_to(address_of(self.config), key_of(self.config))
        self._connected.append(connection)
        return connection

    def node(self, number: int = 1, **facts: str) -> Connection:
        connection = self.connect()
        Sender(connection).send(Hello(number, self.facts | facts))
        return connection

    def close(self) -> None:
        for connection in self._connected:
            connection.close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site(settings())
    yield site
    site.close()


def test_nodes_start_when_all_are_there_and_the_loss_of_one_is_noticed(site: Site) -> None:
    first = site.node()
    assert heard(first) == Welcome("agent")
    site.gathering.join(60)
    assert not site.gathering.is_alive()
    assert isinstance(first.recv(), Beat)
    first.close()
    assert "node 1 is gone" in site.lost.get(timeout=60)


def test_a_node_that_leaves_before_all_are_there_is_waited_for_again() -> None:
    site = Site(settings(nodes=4))
    site.node(1).close()
    others = [site.node(number) for number in (2, 3)]
    assert not others[0].poll(0.1) or isinstance(others[0].recv(), Beat)
    again = site.node(1)
    assert [heard(each) for each in (*others, again)] == [Welcome("agent")] * 3
    assert site.lost.empty()
    site.close()


def test_a_node_that_starts_again_is_a_lost_one(site: Site) -> None:
    assert heard(site.node()) == Welcome("agent")
    site.gathering.join(60)
    site.node()
    assert "node 1 has started again" in site.lost.get(timeout=60)


def test_a_rank_is_handed_on(site: Site) -> None:
    connection = site.connect()
    connection.send(RankHello(3))
    rank, other = site.ranks.get(timeout=60)
    assert rank == 3
    other.send("reads")
    assert connection.recv() == "reads"


@pytest.mark.parametrize(
    ("number", "facts", "field"),
    [(1, {"model": "other"}, "model"), (1, {"vllm_args": "--seed 1"}, "vllm_args"), (2, {}, "node_rank")],
)
def test_a_node_that_differs_is_refused_by_name(site: Site, number: int, facts: dict[str, str], field: str) -> None:
    answer = heard(site.node(number, **facts))
    assert (type(answer), answer.field) == (NodeRefused, field)
    assert site.gathering.is_alive(), "the right one is waited for"


def test_a_node_with_another_key_is_not_heard(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of the cluster")
    site = Site(settings(kv_store_secret_file=secret))
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        connect_to(address_of(site.config), key_of(settings()))
    assert heard(site.node()) == Welcome("agent")
    site.close()


def test_a_connection_that_says_nothing_holds_nobody_up(site: Site) -> None:
    with socket.create_connection(address_of(site.config)):
        assert heard(site.node()) == Welcome("agent")


def test_an_address_that_is_not_node_0s_is_refused() -> None:
    with pytest.raises(EngineStartError, match=r"cannot listen on 192\.0\.2\.1") as refused:
        Site(settings(master_addr="192.0.2.1"))
    assert refused.value.field == "master_addr"


def test_the_interface_of_an_address() -> None:
    config = settings()
    assert own_address(config) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
