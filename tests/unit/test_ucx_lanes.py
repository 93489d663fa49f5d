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


def test_reads_over_shared_memory() -> None:
    log = table("intra-node", READ, "0..inf | zero-copy | cma/memory")
    assert read_lanes(log, "ucp_get") == ("cma/memory",)


def test_several_rows_and_lanes_in_order_of_appearance_once_each() -> None:
    log = table(
        "inter-node",
        READ,
        "0..8K | short | rc_mlx5/mlx5_0:1",
        "8K..inf | zero-copy | 50% on rc_mlx5/mlx5_1:1 and 50% on rc_mlx5/mlx5_0:1",
    ) + table("intra-node", READ, "0..inf | software emulation | tcp/eth0")
    assert read_lanes(log, "ucp_get") == ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1", "tcp/eth0")


def test_other_operations_and_reads_from_itself_do_not_count() -> None:
    log = (
        table("self", READ, "0..inf | zero-copy | self/memory")
        + table("intra-node", "tagged message by ucp_tag_send* from host memory", "0..inf | eager | sysv/memory")
        + table("intra-node", "remote memory write by ucp_put* from host memory", "0..inf | copy | posix/memory")
    )
    assert read_lanes(log, "ucp_get") == ()


def test_what_follows_a_table_of_reads_is_judged_anew() -> None:
    log = table("intra-node", READ, "0..inf | zero-copy | cma/memory")
    log += table("intra-node", "active message by ucp_am_send* from host memory", "0..inf | eager | sysv/memory")
    assert read_lanes(log, "ucp_get") == ("cma/memory",)


def test_lines_that_are_not_of_a_table() -> None:
    assert read_lanes([], "ucp_get") == ()
    log = [*table("intra-node", READ), "UCX  WARN something | odd | tcp/eth0\n", "\n"]
    assert read_lanes(log, "ucp_get") == ()


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
