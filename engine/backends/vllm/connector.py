"""KV connector through which vLLM hands its KV memory to Tandem, here and in `tandem_connector/`.

Blocks are borrowed before vLLM schedules a request, straight into blocks of its pool, and verified blocks enter its
prefix cache. So vLLM sees a prefix-cache hit, and the connector neither loads nor saves: it is the public place where
vLLM offers its memory, its pool, and the room for another allocation.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform

from engine.backends.vllm.batch_runner import mark_launched
from engine.backends.vllm.kv.memory import LayerPlace, VllmKvMemory, orders_of, pool_allocation
from engine.backends.vllm.kv.stages import Stage, StagePool
from kvtransfer.transport import Pool

if TYPE_CHECKING:
    from engine.backends.vllm.kv.groups import KvGroups

IN_FILE = "in_file"
"""Key of the connector's own configuration: whether KV memory should be a memory file."""


@dataclass(slots=True)
class Offered:
    """Things that vLLM offered the connectors of one engine in this process."""

    pools: list[Pool] = field(default_factory=list)
    caches: dict[str, Tensor | list[Tensor]] = field(default_factory=dict)
    """KV tensors by layer name; a layer with a recurrent state has several."""
    block_pool: Any = None
    """vLLM's `BlockPool`."""
    drafted: Any = None
    """CUDA event after the KV that the last step's drafts wrote; None without draft layers, and on CPUs."""

    def wait_for_drafts(self) -> None:
        """Wait until the drafts of all steps whose results are known have written their KV.

        From any thread.
        """
        if (event := self.drafted) is not None:
            event.synchronize()

    def memory(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        unit: int,
        groups: "KvGroups | None",
        ranks: int = 1,
        rank: int = 0,
        stage: Stage | None = None,
        attention: Iterable[str] = (),
    ) -> VllmKvMemory:
        """Return this rank's KV memory; blocks have `unit` tokens.

        It is share `rank` of `ranks` of the heads in the layers of a pipeline `stage`. Other stages have layers of the
        classes `attention`. Raises EngineStartError.
        """
        import vllm

        classes = sorted({*_attention_of(vllm_config), *attention})
        about = f"{vllm.__version__},{'+'.join(classes)},{vllm_config.cache_config.cache_dtype}"
        pools = self.pools if current_platform.is_cpu() else None
        num_blocks, places = int(kv_cache_config.num_blocks), _places_of(kv_cache_config)
        return VllmKvMemory(self.caches, places, num_blocks, unit, about, pools, groups, ranks, rank, stage)

    def stage_pool(self, vllm_config: Any, kv_cache_config: Any) -> StagePool:
        """Return facts about this rank's KV memory, one of several pipeline stages."""
        counts = tuple(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
        if not sum(counts):
            return StagePool(counts, 0, frozenset(), ())
        places = _places_of(kv_cache_config)
        block_bytes = kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks
        orders = orders_of(self.caches, sorted({place.offset for place in places}), places[0].stride)
        return StagePool(counts, int(block_bytes), orders, tuple(_attention_of(vllm_config)))


offered = Offered()
"""Offers to a Tandem engine, which is alone in its process."""


def _attention_of(vllm_config: Any) -> list[str]:
    """Return the names of the attention classes of this process's layers."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return sorted({type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")})


def _places_of(kv_cache_config: Any) -> list[LayerPlace]:
    return [
        LayerPlace(each.offset + number * each.layer_stride, each.block_stride)
        for each in kv_cache_config.kv_cache_tensors
        for number in range(len(each.layers))
    ]


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector of both roles, in one process or, with several ranks, in the scheduler's and each worker's.

    It neither borrows nor lends: a Tandem engine does that around vLLM's core.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.offered = offered
        drafts = vllm_config.speculative_config
        self._marks_drafts = drafts is not None and drafts.uses_draft_kv_cache() and not current_platform.is_cpu()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout in which a block is one span, on GPUs.

        vLLM takes another where a backend does not have it, and then a block is one span for each layer.
        """
        return None if current_platform.is_cpu() else "BHLNC"

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a preempted request must be computed again before it may finish: loans hold their own blocks."""
        return False

    def get_mem_pool_context(self) -> AbstractContextManager[None]:
        """Return the context in which vLLM allocates KV memory."""
        return pool_allocation(bool(self._kv_transfer_config.get_from_extra_config(IN_FILE, False)), self.offered.pools)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.offered.caches.update(kv_caches)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.offered.block_pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return that nothing is left to load: borrowed blocks are cached by now."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return that vLLM may free a finished request's blocks at once: loans hold their own."""
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the same for a model with several KV groups."""
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        """Mark the end of what a step has launched: vLLM calls it after the drafts."""
        if self._marks_drafts:
            self.offered.drafted = mark_launched()
