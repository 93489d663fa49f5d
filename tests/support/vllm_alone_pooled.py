"""What vLLM alone answers on its pooling runner, run by an interpreter with vLLM.

`python -m support.vllm_alone_pooled MODEL METHOD CASES` reads a JSON file: for `embed` and `classify` a list of token
ids, for `score` a list of pairs of texts. It prints the vectors, or the scores, as JSON.
"""

import json
import logging
import os
import sys
from pathlib import Path


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from vllm import LLM

    model, method, cases = sys.argv[1], sys.argv[2], json.loads(Path(sys.argv[3]).read_text())
    llm = LLM(
        model,
        runner="pooling",
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
    )
    if method == "score":
        scored = [llm.score(left, right, use_tqdm=False)[0] for left, right in cases]
        print(json.dumps([each.outputs.score for each in scored]))
        return
    prompts = [{"prompt_token_ids": token_ids} for token_ids in cases]
    if method == "embed":
        print(json.dumps([each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]))
    else:
        print(json.dumps([each.outputs.probs for each in llm.classify(prompts, use_tqdm=False)]))


if __name__ == "__main__":
    main()
