"""vLLM's NixlConnector with NIXL's progress thread off, which polls without a pause and would take the model's core.

vLLM has no setting for it. Without the thread its agents make progress when the connector looks at its transfers, at
every step. The prefill server also notes where its KV memory lies, so that a byte of it can be flipped.
"""

import json
import os
from functools import partial
from pathlib import Path

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

base_worker.nixl_agent_config = partial(base_worker.nixl_agent_config, enable_prog_thread=False)


class NixlCalm(NixlConnector):
    """Connector of both servers."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        if (file := os.environ.get("TANDEM_BENCH_WHERE")) is not None:
            tensors = list(kv_caches.values())
            item = tensors[0].element_size()
            note = {
                "pid": os.getpid(),
                "base": tensors[0].untyped_storage().data_ptr(),
                "offsets": [tensor.storage_offset() * item for tensor in tensors],
                "block": tensors[0].stride(0) * item,
            }
            Path(file).write_text(json.dumps(note))
        super().register_kv_caches(kv_caches)
