"""Two processes, KV from the GPU memory of one into that of the other, by NIXL."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.torch.kv import TensorFingerprints
from kvtransfer.registry import open_transport
from kvtransfer.transport import Span

SCRIPT = Path(__file__).with_name("vram_lender.py")
NUM_BLOCKS, BLOCK_BYTES, SEED = 64, 2 << 20, 5
TIMEOUT_S = 60.0


@pytest.fixture
def lender() -> Iterator[bytes]:
    """The endpoint of a process of its own."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), f"vram-lender-{os.getpid()}", str(SEED), str(NUM_BLOCKS), str(BLOCK_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), *sys.path])},
        text=True,
    )
    line = process.stdout.readline()
    assert line, "the lender did not start"
    yield json.loads(line)["endpoint"].encode()
    process.kill()
    process.wait()


def script() -> Any:
    spec = importlib.util.spec_from_file_location("vram_lender", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blocks_move_between_gpu_memories(lender: bytes) -> None:
    """And what arrives has the fingerprints of what was lent. Prints the bandwidth and the lanes."""
    theirs = script().contents(SEED, NUM_BLOCKS, BLOCK_BYTES)
    memory = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    transport = open_transport("nixl", f"vram-reader-{os.getpid()}", on_gpu=True)
    transport.register(script().device_pool(memory))
    peer = transport.connect(lender)
    step = transport.blocks_per_read(BLOCK_BYTES)
    for measured in (False, True):  # the first reads set the connection up
        started_at = time.monotonic()
        reads = [
            transport.read(peer, [Span(first * BLOCK_BYTES, first * BLOCK_BYTES, step * BLOCK_BYTES)])
            for first in range(0, NUM_BLOCKS, step)
        ]
        for read in reads:
            read.result(TIMEOUT_S)
        if measured:
            rate = NUM_BLOCKS * BLOCK_BYTES / (time.monotonic() - started_at) / 1e9
            print(f"{rate:.1f} GB/s over {peer.lanes}")
    assert all("cuda_ipc" in lane for lane in peer.lanes), peer.lanes
    assert torch.equal(memory.cpu(), theirs)
    blocks = list(range(NUM_BLOCKS))
    arrived, lent = TensorFingerprints(memory, 8).of(blocks), TensorFingerprints(theirs, 8).of(blocks)
    assert (arrived == lent).all()
    transport.close()


def test_main_memory_reads_from_gpu_memory(lender: bytes) -> None:
    """A worker without a GPU may borrow from one that has one."""
    import numpy as np

    from kvtransfer.nixl import NixlTransport
    from kvtransfer.transport import Pool

    memory = np.zeros((4, BLOCK_BYTES), np.uint8)
    transport = NixlTransport(f"dram-reader-{os.getpid()}")
    transport.register(Pool(memory))
    peer = transport.connect(lender)
    transport.read(peer, [Span(0, BLOCK_BYTES, BLOCK_BYTES)]).result(TIMEOUT_S)
    assert memory[0].tobytes() == script().contents(SEED, NUM_BLOCKS, BLOCK_BYTES)[1].numpy().tobytes()
    transport.close()


@pytest.mark.parametrize("planes", [1, 4])
def test_fingerprints_wait_for_the_step_that_writes_the_blocks(planes: int) -> None:
    """On the GPU, not in the caller; those of blocks that arrived do not wait for it."""
    import numpy as np

    from kvtransfer.fingerprint import PlaneFingerprints, fingerprint_blocks

    contents = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (planes, 64, 1 << 18), np.uint8))
    computed = contents.cuda()
    memory = torch.zeros_like(computed)
    memory[:, :32] = computed[:, :32]
    step = torch.randn(8192, 8192, device="cuda")
    prints = TensorFingerprints(memory, 8, planes, num_blocks=64)
    torch.cuda.synchronize()
    for _ in range(20):
        step = step @ step
    memory.copy_(computed)
    written = torch.cuda.Event()
    written.record()
    pending = prints.begin(range(32, 64), after=written)
    early = prints.of(range(32))
    pool = contents.numpy()
    if planes == 1:
        wanted = fingerprint_blocks(pool[0], range(64), 8)
    else:
        wanted = PlaneFingerprints(pool, 64, planes, 8).of(range(64))
    assert (early == wanted[:32]).all()
    assert (pending.result() == wanted[32:]).all()
    assert pending.ready
