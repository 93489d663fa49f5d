"""What vLLM's own input processor makes of a prompt with pictures: run by an interpreter with vLLM and torchvision.

`python -m support.vllm_media_reference MODEL TOKEN_IDS ITEMS FILE ...` prints tokens and places as JSON. It fails where
a feature differs after `pack` and `unpack`, and from what an engine reads of the item in the JSON file ITEMS.
"""

import json
import logging
import os
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from PIL import Image
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    from engine.backends.vllm.media.features import pack

    arguments: dict[str, Any] = {"dtype": "float32", "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
    config = EngineArgs(model=sys.argv[1], mm_processor_cache_gb=0, **arguments).create_engine_config()
    pictures = [Image.open(path).convert("RGB") for path in sys.argv[4:]]
    prompt = {"prompt_token_ids": json.loads(sys.argv[2]), "multi_modal_data": {"image": pictures}}
    request = InputProcessor(config).process_inputs("r", prompt, SamplingParams(), supported_tasks=("generate",))
    items = []
    of_preprocessor = json.loads(Path(sys.argv[3]).read_text())
    for feature, made in zip(request.mm_features, of_preprocessor, strict=True):
        packed = pack(feature)
        check_same(feature, packed.details, packed.blob)
        check_same(feature, b64decode(made["details"]), b64decode(made["blob"]))
        items.append([feature.identifier, feature.mm_position.offset, feature.mm_position.length])
    print(json.dumps({"token_ids": list(request.prompt_token_ids), "items": items}))


def check_same(feature: Any, details: bytes, blob: bytes) -> None:
    """Fail where a feature differs from what an engine reads of its item."""
    import torch

    from engine.backends.vllm.media.features import unpack
    from kvcache.items import Item

    item = Item(bytes(16), feature.mm_position.offset, feature.mm_position.length, details)
    again = unpack(item, blob)
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
