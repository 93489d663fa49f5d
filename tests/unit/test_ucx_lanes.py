"""Reading UCX's own account of what it uses."""

import os

import pytest

from kvtransfer.ucx.lanes import LaneLog, read_lanes

PREFIX = "[1700000000.123456] [host:42   :0]   +---+  "


def table(who: str, what: str, *rows: str) -> list[str]:
    """One of UCX's tables, as it stands in the log."""
    return [
        f"{PREFIX}+------------------------------+----------------------------------------------+\n",
        f"{PREFIX}| borrower {who} cfg#1         |                                              |\n",
        f"{PREFIX}| {what} | \n",
        f"{PREFIX}+------------------------------+-----------------------------+----------------+\n",
        *(f"{PREFIX}| {row} |\n" for row in rows),
        f"{PREFIX}+------------------------------+-----------------------------+----------------+\n",
    ]


READ = "remote memory read by ucp_get* into host memory"


TAGGED, PUT = "tagged message by ucp_tag_send* from host memory", "remote memory write by ucp_put* from host memory"
MESSAGE = "active message by ucp_am_send* from host memory"
BY_MEMORY = table("intra-node", READ, "0..inf | zero-copy | cma/memory")
TWO_RAILS = (
    "0..8K | short | rc_mlx5/mlx5_0:1",
    "8K..inf | zero-copy | 50% on rc_mlx5/mlx5_1:1 and 50% on rc_mlx5/mlx5_0:1",
)
LOGS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "shared memory": (BY_MEMORY, ("cma/memory",)),
    "several rows and lanes, in order of appearance, once each": (
        table("inter-node", READ, *TWO_RAILS) + table("intra-node", READ, "0..inf | software emulation | tcp/eth0"),
        ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1", "tcp/eth0"),
    ),
    "other operations, and reads from itself": (
        table("self", READ, "0..inf | zero-copy | self/memory")
        + table("intra-node", TAGGED, "0..inf | eager | sysv/memory")
        + table("intra-node", PUT, "0..inf | copy | posix/memory"),
        (),
    ),
    "what follows a table of reads": (
        BY_MEMORY + table("intra-node", MESSAGE, "0..inf | eager | sysv/memory"),
        ("cma/memory",),
    ),
    "nothing": ([], ()),
    "lines of no table": ([*table("intra-node", READ), "UCX  WARN something | odd | tcp/eth0\n", "\n"], ()),
}


@pytest.mark.parametrize(("log", "lanes"), LOGS.values(), ids=LOGS)
def test_lanes_of_reads(log: list[str], lanes: tuple[str, ...]) -> None:
    assert read_lanes(log, "ucp_get") == lanes


def test_the_log_is_read_as_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_PROTO_INFO", "UCX_LOG_FILE"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
    log = LaneLog("ucp_get")
    assert os.environ["UCX_PROTO_INFO"] == "y"
    assert log.lanes() == ()
    with open(os.environ["UCX_LOG_FILE"], "a", encoding="utf-8") as file:
        file.writelines(table("intra-node", READ, "0..inf | zero-copy | cma/memory"))
    assert log.lanes() == ("cma/memory",)
    assert log.lanes() == ("cma/memory",)
