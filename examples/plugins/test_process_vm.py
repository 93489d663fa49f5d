"""Hold the example transport to the contract of every transport."""

from collections.abc import Iterator

import pytest

from kvtransfer.contract.suite import *  # noqa: F403
from kvtransfer.contract.worlds import ProcessLender, ProcessWorld, World, start_lenders


class ProcessVmWorld(ProcessWorld):
    transport = "process_vm"


@pytest.fixture(scope="module")
def lenders() -> Iterator[list[ProcessLender]]:
    yield from start_lenders("process_vm")


@pytest.fixture
def world(lenders: list[ProcessLender]) -> Iterator[World]:
    opened = ProcessVmWorld(lenders)
    yield opened
    opened.close()
