"""A data-parallel group over real connections: its ranks meet, agree on steps, and drain. Losses end processes, so
tests/vllm_backend/test_vllm_data_parallel.py has them."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.errors import StartError
from engine.config import WorkerConfig
from engine.messages.from_engine import FromEngine, GroupDrains
from engine.messages.to_engine import DrainGroup, TakeSnapshot
from engine.process.data_parallel.step_group import StepGroup
from support.ports import free_port
from support.refusals import refusal_of

FACTS = {"model": "m", "vllm_args": "--enable-expert-parallel"}


class Rank:
    """One rank, in a thread of this process until it has met the others."""

    def __init__(self, rank: int, size: int, port: int, worker_id: str = "") -> None:
        config = WorkerConfig(
            model=Path("m"), engine="vllm", data_parallel=size, data_parallel_rank=rank, data_parallel_port=port
        )
        self.woken = threading.Event()
        self.group = StepGroup(config, worker_id or f"worker-{rank}", self.woken.set)
        self.answers: list[FromEngine] = []

    def until(self, condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < give_up_at
            self.woken.wait(0.1)
            self.woken.clear()
            self.answers += self.group.answers()

    def hears(self, message: FromEngine) -> None:
        self.until(lambda: message in self.answers)


def met(ranks: list[Rank], facts: dict[str, str] = FACTS) -> list[int]:
    """Return the port that each rank was told."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank: rank.group.meet(facts, 4), ranks))


def drained(ranks: list[Rank]) -> None:
    """Let the group end, without which its threads would go on."""
    for rank in ranks:
        rank.group.passes(DrainGroup(is_empty=True))
    for rank in ranks:
        rank.until(lambda rank=rank: any(isinstance(each, GroupDrains) and each.is_over for each in rank.answers))  # type: ignore[misc]


def test_ranks_meet_get_the_same_steps_and_drain_together() -> None:
    port = free_port()
    ranks = [Rank(rank, 3, port) for rank in range(3)]
    assert len(set(met(ranks))) == 1
    assert not any(rank.group.may_launch for rank in ranks)
    for asking in (ranks[2], ranks[0]):
        asking.group.ask()
        for rank in ranks:
            rank.until(lambda rank=rank: rank.group.may_launch)  # type: ignore[misc]
            for _ in range(4):
                rank.group.launched()
            assert not rank.group.may_launch
    assert ranks[1].group.passes(TakeSnapshot())
    assert not ranks[1].group.passes(DrainGroup(is_empty=False))
    for rank in ranks:
        rank.hears(GroupDrains(1, is_over=False))
    ranks[0].group.passes(DrainGroup(is_empty=True))
    ranks[1].group.passes(DrainGroup(is_empty=True))
    ranks[2].group.ask()  # it has work yet
    for rank in ranks:
        rank.until(lambda rank=rank: rank.group.may_launch)  # type: ignore[misc]
        assert len(rank.answers) == 1
    drained(ranks)


def test_a_new_process_of_a_rank_replaces_the_one_that_waited() -> None:
    """It is the same worker's; another worker of the same rank is refused, and so is a rank with another setting."""
    port = free_port()
    head, rank = Rank(0, 2, port), Rank(1, 2, port)
    old = socket.socket()
    with ThreadPoolExecutor(1) as threads:
        meeting = threads.submit(head.group.meet, FACTS | {"data_parallel": "2"}, 4)
        while old.connect_ex(("127.0.0.1", port)):
            time.sleep(0.01)
        with refusal_of("data_parallel", StartError, match="3 here, and 2 at rank 0"):
            Rank(1, 2, port).group.meet(FACTS | {"data_parallel": "3"}, 4)
        hello = b'{"kind": "hello", "rank": %d, "worker_id": "%s", "facts": {"model": "m", "data_parallel": "2", '
        hello += b'"vllm_args": "--enable-expert-parallel"}}\n'
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"kind": "hello"}\n', hello % (7, b"seventh")):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(garbage)
                while stranger.recv(1 << 16):
                    pass
        assert not meeting.done()
        told = rank.group.meet(FACTS | {"data_parallel": "2"}, 4)
        assert meeting.result() == told
        assert old.recv(1) == b"", "a connection that never said who it is"
    old.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    drained([head, rank])


def test_one_worker_cannot_have_the_rank_of_another_and_its_own_next_process_can() -> None:
    port = free_port()
    head, last = Rank(0, 3, port), Rank(2, 3, port)
    with ThreadPoolExecutor(2) as threads:
        meeting = threads.submit(head.group.meet, FACTS, 4)
        hello = b'{"kind": "hello", "rank": 1, "worker_id": "worker-1", "facts": {"model": "m", "vllm_args": "%s"}}\n'
        with socket.create_connection(("127.0.0.1", port)) if _listens(port) else socket.socket() as before:
            before.sendall(hello % b"--enable-expert-parallel")
            head.until(lambda: 1 in head.group.peers)
            with pytest.raises(StartError, match="worker worker-1 is rank 1 of the group already"):
                Rank(1, 3, port, "other").group.meet(FACTS, 4)
            after = Rank(1, 3, port)
            joining = threads.submit(after.group.meet, FACTS, 4)
            assert before.recv(1) == b"", "its next process has come"
        told = last.group.meet(FACTS, 4)
        assert meeting.result() == joining.result() == told
    drained([head, after, last])


def _listens(port: int) -> bool:
    """Wait until somebody listens there."""
    while True:
        with socket.socket() as tried:
            if not tried.connect_ex(("127.0.0.1", port)):
                return True
        time.sleep(0.01)


def test_settings_that_make_no_group_are_refused() -> None:
    with pytest.raises(StartError, match="2 is no rank of 2"):
        WorkerConfig(model=Path("m"), engine="vllm", data_parallel=2, data_parallel_rank=2)
    with pytest.raises(StartError, match="needs engine: vllm"):
        WorkerConfig(model=Path("m"), data_parallel=2)


def test_a_port_that_somebody_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.data_parallel.step_group.FREED_S", 0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        refusal_of("data_parallel_port", StartError, match="cannot listen"),
    ):
        Rank(0, 2, taken.getsockname()[1]).group.meet(FACTS, 4)
