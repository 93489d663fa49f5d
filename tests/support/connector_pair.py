"""Two stock vLLM engines with TandemConnector: `python -m support.connector_pair CASES RESULTS`, in vLLM's environment.

CASES is a JSON file: `lender` and `borrower` have the arguments of each LLM, and `prompts` lists [token ids or None,
text, files, cache salt, adapter]. The lender computes each prompt; the borrower answers it with the reference of the
lender's answer; then the lender answers it with its own cached KV. The lender's worker is in the engine's process, the
borrower's in another. RESULTS gets, for each prompt, both answers and the borrower's receipt.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from support.vllm_alone import read

COMMON = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "skip_tokenizer_init": True,
    "kv_transfer_config": {
        "kv_connector": "TandemConnector",
        "kv_connector_module_path": "tandem_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"peer_silence_s": 300, "patience_s": 300},  # however busy the machine is
    },
}
MAX_TOKENS = 24
PHASE = {"do_remote_decode": True, "do_remote_prefill": False}


def main() -> None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    logging.getLogger("vllm").setLevel(logging.ERROR)
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    cases = json.loads(Path(sys.argv[1]).read_text())
    on_gpu = {"gpu_memory_utilization": 0.01} if torch.cuda.is_available() else {}
    apart = {"distributed_executor_backend": "mp"}  # vLLM has room for one worker of an engine in a process
    lender = LLM(**(COMMON | on_gpu | cases["lender"]))
    borrower = LLM(**(COMMON | on_gpu | apart | cases["borrower"]))

    def answer(llm: Any, prompt: dict[str, Any], adapter: str, params: dict[str, Any] | None, count: int) -> Any:
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, extra_args=extra)
        lora = LoRARequest("adapter", 1, adapter) if adapter else None
        (output,) = llm.generate([prompt], sampling, use_tqdm=False, lora_request=lora)
        return list(output.outputs[0].token_ids), output.kv_transfer_params

    results = []
    for token_ids, text, files, salt, adapter in cases["prompts"]:
        prompt = {"prompt_token_ids": token_ids} if token_ids is not None else {"prompt": text}
        prompt |= {"multi_modal_data": read(files)} if files else {}
        prompt |= {"cache_salt": salt} if salt else {}
        _, reference = answer(lender, prompt, adapter, PHASE, 1)
        borrowed, receipt = answer(borrower, prompt, adapter, reference, MAX_TOKENS)
        cached, _ = answer(lender, prompt, adapter, None, MAX_TOKENS)
        results.append([borrowed, cached, (receipt or {}).get("tandem")])
    Path(sys.argv[2]).write_text(json.dumps(results))
    os._exit(0)  # vLLM's engines would end one after the other, with worker processes


if __name__ == "__main__":
    main()
