"""What vLLM's own input processor makes of a prompt with pictures: run by an interpreter with vLLM and torchvision.

`python -m support.vllm_media_reference MODEL TOKEN_IDS FILE ...` prints it as JSON. It also checks that each feature is
the same after `pack` and `unpack`.
"""

import json
import logging
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from PIL import Image
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    from engine.backends.vllm.media import pack

    arguments: dict[str, Any] = {"dtype": "float32", "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
    config = EngineArgs(model=sys.argv[1], mm_processor_cache_gb=0, **arguments).create_engine_config()
    pictures = [Image.open(path).convert("RGB") for path in sys.argv[3:]]
    prompt = {"prompt_token_ids": json.loads(sys.argv[2]), "multi_modal_data": {"image": pictures}}
    request = InputProcessor(config).process_inputs("r", prompt, SamplingParams(), supported_tasks=("generate",))
    items = []
    for feature in request.mm_features:
        item = pack(feature)
        check_round_trip(feature, item)
        digest = sha256(item.details + item.blob).hexdigest()
        items.append([item.identifier, item.offset, item.length, digest])
    print(json.dumps({"token_ids": list(request.prompt_token_ids), "items": items}))


def check_round_trip(feature: Any, packed: Any) -> None:
    """Fail where a feature differs from what an engine reads of its item."""
    import torch

    from engine.backends.vllm.media import unpack
    from engine.items import Item

    item = Item(bytes(16), packed.offset, packed.length, packed.details, "", len(packed.blob))
    again = unpack(item, packed.blob)
    assert again.modality == feature.modality
    assert again.mm_position.offset == feature.mm_position.offset
    assert again.mm_position.length == feature.mm_position.length
    masks = again.mm_position.is_embed, feature.mm_position.is_embed
    assert masks[0] is masks[1] is None or torch.equal(*masks)
    assert set(again.data) == set(feature.data)
    for name, each in feature.data.items():
        assert same(again.data[name].data, each.data), name
    for name, each in unpack(item, None).data.items():
        assert same(each.data, feature.data[name].data), name


def same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    main()
