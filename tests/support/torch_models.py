"""What tests of the torch engine do with models: runners over them, prompts for them, changed copies of them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.torch.runner import TorchRunner
from engine.core_types import Chunk, EngineSequence, SamplingParams

BLOCK_TOKENS = 16
VOCAB = 500
"""Of the models that tests make."""


def runner_of(path: Path, dtype: str = "float32", num_blocks: int | None = None, **options: Any) -> TorchRunner:
    """In blocks of 16 tokens. `num_blocks` None: 8 MiB of them, which is room for all that a test asks at once."""
    kv_bytes = 8 << 20
    if num_blocks is not None:
        kv_bytes = num_blocks * TorchRunner(path, dtype, BLOCK_TOKENS, 1 << 20, **options).layout.block_bytes
    return TorchRunner(path, dtype, BLOCK_TOKENS, kv_bytes, **options)


def random_prompts(*lengths: int, seed: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(1, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


def in_blocks(runner: TorchRunner, prompt: tuple[int, ...], first_block: int = 0) -> EngineSequence:
    """A sequence of this prompt, its blocks side by side from `first_block` on."""
    blocks = list(range(first_block, first_block + runner.layout.blocks_for(len(prompt))))
    return EngineSequence("a", list(prompt), len(prompt), b"", 0, 0, sampling=SamplingParams(1), blocks=blocks)


def logits_after(runner: TorchRunner, prompt: tuple[int, ...], chunk: int = 30, first_block: int = 0) -> Tensor:
    """[vocab], the prompt computed in chunks."""
    sequence = in_blocks(runner, prompt, first_block)
    for start in range(0, len(prompt), chunk):
        logits = runner.logits([Chunk(sequence, start, min(chunk, len(prompt) - start))])
    return logits[0]


def copy_with(path: Path, to: Path, **changes: Any) -> Path:
    """A copy of the model directory at `to`, with these values in its config.json."""
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to
