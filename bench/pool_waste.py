"""Share of the allocated KV that holds no token, by the engine's scheduler over random lengths, without a model."""

import random

from engine.backends.sim.runner import SimRunner
from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits
from engine.core_types import SamplingParams, StepBudget
from engine.messages.to_engine import Generate
from kvcache.layout import KvLayout
from kvtransfer.local import LocalNetwork, LocalTransport

REQUESTS = 200
LENGTHS = (16, 1024)
MAX_OUTPUT = 256


def measure_waste() -> float:
    """Return the share of allocated slots that hold no token, averaged over all steps."""
    layout = KvLayout(layers=1, kv_heads=1, head_dim=4, block_tokens=16, dtype="float32")
    runner = SimRunner(layout, num_blocks=20_000)
    core = EngineCore(
        runner, LocalTransport(LocalNetwork(), "waste"), EngineLimits(StepBudget(4096, 2048)), emit=lambda message: None
    )
    core.start()
    generator = random.Random(0)
    for number in range(REQUESTS):
        tokens = tuple(generator.randrange(1000) for _ in range(generator.randint(*LENGTHS)))
        sampling = SamplingParams(max_tokens=generator.randint(1, MAX_OUTPUT), temperature=0)
        core.handle(Generate(str(number), tokens, (), sampling, "", 0, lender=None))
    room = used = 0
    while batch := core.begin_step():
        core.end_step(batch, runner.execute(batch))
        for sequence in {chunk.sequence for chunk in batch}:
            room += len(sequence.blocks) * layout.block_tokens
            used += sequence.num_computed if sequence.blocks else 0
    return 1 - used / room
