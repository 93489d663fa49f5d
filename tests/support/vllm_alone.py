"""What vLLM alone answers to prompts with pictures, sounds or videos: run by an interpreter with vLLM and torchvision.

`python -m support.vllm_alone MODEL CASES` reads a JSON file of [token ids, files, max_tokens] and prints
the greedy tokens of each as JSON.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        **({"gpu_memory_utilization": 0.01} if torch.cuda.is_available() else {}),
        block_size=32,
        enable_prefix_caching=False,
        skip_tokenizer_init=False,
    )
    answers = []
    for token_ids, files, max_tokens in json.loads(Path(sys.argv[2]).read_text()):
        prompt = {"prompt_token_ids": token_ids}
        if files:
            prompt["multi_modal_data"] = read(files)
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    print(json.dumps(answers))


def read(files: list[str]) -> dict[str, list[Any]]:
    """What vLLM takes for files, which are of one kind."""
    from PIL import Image
    from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

    ending = Path(files[0]).suffix
    if ending == ".wav":
        import soundfile

        return {"audio": [soundfile.read(file, dtype="float32") for file in files]}
    if ending == ".mp4":
        return {"video": [VideoMediaIO(ImageMediaIO()).load_file(Path(file)).media for file in files]}
    return {"image": [Image.open(file).convert("RGB") for file in files]}


if __name__ == "__main__":
    main()
