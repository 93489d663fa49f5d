"""vLLM's NixlConnector, unchanged but for a note of where its KV memory lies, so that a byte of it can be flipped."""

import json
import os
from pathlib import Path

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector


class NixlWhere(NixlConnector):
    """Connector of a server; the prefill server's note is read."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        tensors = list(kv_caches.values())
        item = tensors[0].element_size()
        note = {
            "pid": os.getpid(),
            "base": tensors[0].untyped_storage().data_ptr(),
            "offsets": [tensor.storage_offset() * item for tensor in tensors],
            "block": tensors[0].stride(0) * item,
        }
        Path(os.environ["TANDEM_BENCH_WHERE"]).write_text(json.dumps(note))
        super().register_kv_caches(kv_caches)
