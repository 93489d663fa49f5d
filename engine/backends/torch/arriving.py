"""Tensors of weight files that are still arriving from a peer, as transformers' loader takes them.

The loader asks for one tensor after the other, on threads of its own; each waits for its bytes only.
"""

import json
from typing import Any

import torch
from torch import Tensor

from engine.model.model_dir import ModelDir
from engine.weights.fetch import WeightsFetch, WeightsLost

MAX_HEADER_BYTES = 100 << 20
"""Largest header of a safetensors file, as its format has it."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class ArrivingTensor:
    """One tensor, which is copied out of the fetch's memory when it is first sliced."""

    def __init__(self, fetch: WeightsFetch, begin: int, num_bytes: int, dtype: torch.dtype, shape: list[int]) -> None:
        """Describe a tensor whose bytes begin at `begin` in the fetch's memory."""
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self._fetch = fetch
        self._begin = begin
        self._end = begin + num_bytes

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, key: Any) -> Tensor:
        """Wait for the bytes and return a copy, so that the fetch's memory can go. Raises WeightsLost."""
        self._fetch.wait_for(self._end)
        raw = torch.from_numpy(self._fetch.memory[self._begin : self._end])
        return raw.clone().view(self.dtype).view(self.shape)[key]


def arriving_tensors(model_dir: ModelDir, fetch: WeightsFetch) -> dict[str, Any]:
    """Return the model's tensors by name, as soon as the files' headers are there.

    Raises WeightsLost where the headers cannot be read, or where it is not known which file has which tensor.
    """
    where = model_dir.read_json(INDEX).get("weight_map")
    arriving: dict[str, Any] = {}
    for file, offset in zip(fetch.offer.files, fetch.offsets, strict=True):
        if where is None and file.name != SINGLE:
            continue
        tensors = _tensors_of(fetch, offset, file.num_bytes)
        arriving |= {name: each for name, each in tensors.items() if where is None or where.get(name) == file.name}
    if not arriving:
        raise WeightsLost(f"the peer's files contain neither {SINGLE} nor {INDEX}")
    return arriving


def _tensors_of(fetch: WeightsFetch, offset: int, num_bytes: int) -> dict[str, ArrivingTensor]:
    """Read a file's header: its length in 8 bytes, then JSON; offsets of tensors count from its end."""
    fetch.wait_for(offset + 8)
    length = int.from_bytes(fetch.memory[offset : offset + 8].tobytes(), "little")
    if length > min(MAX_HEADER_BYTES, num_bytes - 8):
        raise WeightsLost(f"a header of {length} bytes exceeds the limit, or its file of {num_bytes} bytes")
    first = offset + 8 + length
    fetch.wait_for(first)
    try:
        header = json.loads(fetch.memory[offset + 8 : first].tobytes())
        return {
            name: _tensor(fetch, first, num_bytes - 8 - length, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsLost(f"a file's header is not one of safetensors: {error}") from error


def _tensor(fetch: WeightsFetch, first: int, num_bytes: int, entry: dict[str, Any]) -> ArrivingTensor:
    begin, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    if not 0 <= begin <= end <= num_bytes or end - begin != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError(f"a tensor {shape} of {dtype} at bytes {begin} to {end} of {num_bytes}")
    return ArrivingTensor(fetch, first + begin, end - begin, dtype, shape)
