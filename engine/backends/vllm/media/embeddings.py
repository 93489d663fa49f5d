"""vLLM's connector for embeddings that encode workers compute: in these it hands them over, in others it brings them.

A worker's front fetches embeddings and its engine offers them here, by the item's identifier. When vLLM schedules such
an item, the step's metadata has the tensor, and the process that computes puts it into vLLM's cache of encoder outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
from vllm.platforms import current_platform

from engine.media import Embeddings

ARGUMENTS = {"ec_connector": "EmbeddingsConnector", "ec_connector_module_path": __name__}
COMPUTED: dict[str, Embeddings] = {}
"""Embeddings that an encode worker's engine has computed, until they are taken."""


def consumer() -> ECTransferConfig:
    """Return the settings of a worker that serves requests."""
    return ECTransferConfig(**ARGUMENTS, ec_role="ec_consumer")


def producer() -> ECTransferConfig:
    """Return the settings of an encode worker, in which vLLM loads the encoder only."""
    return ECTransferConfig(**ARGUMENTS, ec_role="ec_producer")


@dataclass
class _Loads(ECConnectorMetadata):
    """Embeddings that a step needs, by identifier."""

    embeddings: dict[str, Embeddings] = field(default_factory=dict)


class EmbeddingsConnector(ECConnectorBase):
    """One end, in the scheduler's process or in one that computes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._offered: dict[str, tuple[Embeddings, int]] = {}
        """Embeddings, and the number of sequences that need them."""
        self._loads = _Loads()

    # ------------------------------------------------------------------ for the engine

    def offer(self, embeddings: Mapping[str, Embeddings]) -> None:
        """Keep embeddings for a sequence."""
        for identifier, each in embeddings.items():
            known, count = self._offered.get(identifier, (each, 0))
            self._offered[identifier] = known, count + 1

    def withdraw(self, identifiers: list[str]) -> None:
        """Forget what was offered for a sequence that is over."""
        for identifier in identifiers:
            known, count = self._offered.pop(identifier)
            if count > 1:
                self._offered[identifier] = known, count - 1

    # ------------------------------------------------------------------ for vLLM's scheduler

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self._offered

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        identifier = request.mm_features[index].identifier
        if identifier in self._offered:
            self._loads.embeddings[identifier] = self._offered[identifier][0]

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        loads, self._loads = self._loads, _Loads()
        return loads

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    # ------------------------------------------------------------------ where the model computes

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **options: Any) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, _Loads)
        for identifier, each in loads.embeddings.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = tensor_of(each).to(current_platform.device_type)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **options: Any) -> None:
        if self.is_producer:
            COMPUTED[mm_hash] = embeddings_of(encoder_cache[mm_hash])


def tensor_of(embeddings: Embeddings) -> torch.Tensor:
    """Return embeddings as a tensor in main memory."""
    flat = torch.frombuffer(bytearray(embeddings.data), dtype=getattr(torch, embeddings.dtype))
    return flat.reshape(embeddings.shape)


def embeddings_of(tensor: torch.Tensor) -> Embeddings:
    """Undo `tensor_of`."""
    dense = tensor.detach().cpu().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Embeddings(str(dense.dtype).removeprefix("torch."), tuple(dense.shape), data)
