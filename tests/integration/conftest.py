"""Processes to read from, for tests of transports: some for all tests of a file."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvtransfer.contract.worlds import ProcessLender, start_lenders
from support.redis_server import RedisServer


@pytest.fixture(scope="module", autouse=True)
def _forked(forked_roles: None) -> None:
    """Role processes of all these tests are forks of one process."""


@pytest.fixture(scope="module")
def lenders() -> Iterator[list[ProcessLender]]:
    yield from start_lenders("nixl")


@pytest.fixture(scope="module")
def file_lenders() -> Iterator[list[ProcessLender]]:
    yield from start_lenders("nixl", LENDER_IN_FILE="1")


@pytest.fixture(scope="module")
def ucxx_lenders() -> Iterator[list[ProcessLender]]:
    yield from start_lenders("ucxx")


@pytest.fixture(scope="module")
def ucxx_tcp_lenders() -> Iterator[list[ProcessLender]]:
    yield from start_lenders("ucxx", UCX_TLS="tcp")


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path) as server:
        yield server
