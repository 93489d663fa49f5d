"""vLLM alone, as a process that answers loads: `python -m bench.vllm.plain JSON`, in vLLM's environment.

JSON has `arguments` of vLLM's AsyncEngineArgs and, on CPUs, the `cores` that its engine computes on and the
`other_cores` for its front, which is this process.
"""

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from bench.vllm.streams import answer_loads, private_output
from cluster.process.tree import descendants


async def main(output: TextIO, arguments: dict[str, Any], cores: set[int], other_cores: set[int]) -> None:
    if cores:  # OpenMP binds threads to no core that the process does not have
        os.sched_setaffinity(0, cores | other_cores)
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(skip_tokenizer_init=True, disable_log_stats=True, **arguments))
    numbers = count()

    async def generate(prompt: Sequence[int], options: dict[str, Any]) -> AsyncIterator[Sequence[int]]:
        params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **options)
        async for output in engine.generate({"prompt_token_ids": list(prompt)}, params, f"r{next(numbers)}"):
            yield list(output.outputs[0].token_ids)

    if cores:
        for process in descendants(os.getpid()):
            _stay_on(cores, process)
        _stay_on(other_cores, os.getpid())
    config = engine.vllm_config
    about = {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "compilation": f"{config.compilation_config.mode}, {config.compilation_config.cudagraph_mode}",
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }
    try:
        await answer_loads(generate, output, about)
    finally:
        engine.shutdown()


def _stay_on(cores: set[int], process: int) -> None:
    """Bind the threads of a process, but for those that vLLM has bound to one of these cores."""
    for entry in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            if not os.sched_getaffinity(int(entry.name)) <= cores:
                os.sched_setaffinity(int(entry.name), cores)


if __name__ == "__main__":
    if importlib.util.find_spec("flashinfer") is None:  # vLLM's sampler takes it for installed
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    results, asked = private_output(), json.loads(sys.argv[1])
    import uvloop

    uvloop.run(main(results, asked["arguments"], set(asked["cores"]), set(asked["other_cores"])))
