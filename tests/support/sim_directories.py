"""Model directories with what the sim engine, and a router, read of one."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

NUM_BYTES = 256


def write_sim_model(path: Path, vocab_size: int | None, context: int = 100_000, **values: Any) -> Path:
    """`values` go into its config.json."""
    path.mkdir()
    config = {"model_type": "llama", "vocab_size": vocab_size, "max_position_embeddings": context}
    (path / "config.json").write_text(json.dumps(config | values))
    return path


def write_tokenizer(path: Path, vocab_size: int, pad: str = "") -> None:
    """Its tokens are words, ending in `pad`, and single bytes, so that text lags behind tokens."""
    pieces = sorted(ByteLevel.alphabet()) + [f"Ġword{number}{pad}" for number in range(vocab_size - NUM_BYTES)]
    tokenizer = Tokenizer(BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
