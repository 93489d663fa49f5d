"""A process whose GPU memory others read: `python vram_lender.py NAME SEED NUM_BLOCKS BLOCK_BYTES`.

Prints its endpoint as one line of JSON; ends with its standard input, or with its parent.
"""

import ctypes
import json
import signal
import sys

import torch

from kvtransfer.registry import open_transport
from kvtransfer.transport import DevicePool

PR_SET_PDEATHSIG = 1


def contents(seed: int, num_blocks: int, block_bytes: int) -> torch.Tensor:
    """What the pool holds, on the CPU; the reader's test makes the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, generator=generator)


def device_pool(memory: torch.Tensor) -> DevicePool:
    """Of uint8 [num_blocks, block_bytes] on a GPU."""
    return DevicePool(memory.data_ptr(), *memory.shape, device=memory.get_device(), owner=memory)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    name, seed, num_blocks, block_bytes = sys.argv[1], *map(int, sys.argv[2:5])
    memory = contents(seed, num_blocks, block_bytes).cuda()
    torch.cuda.synchronize()
    transport = open_transport("nixl", name, on_gpu=True)
    print(json.dumps({"endpoint": transport.register(device_pool(memory)).decode()}), flush=True)
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    main()
