"""Model Runner V2 and asynchronous scheduling of vLLM on a CPU, by Triton's interpreter, and data-parallel ranks.

Without the interpreter there are data-parallel ranks only, with Model Runner V1.

vLLM takes V2 where Triton has a driver, which it has on GPUs only. Each change below is made when the module that it
concerns is imported, so that a process which needs none of them starts as fast as before.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def offer_a_driver(_: ModuleType) -> None:
    """Let vLLM see a Triton driver, and let the interpreter take integer masks, which some kernels have."""
    import numpy as np
    import triton.backends
    import triton.runtime.interpreter as interpreter

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        compiler, driver = None, Driver

    triton.backends.backends["cpu"] = Backend

    def with_boolean_mask(name: str, at: int) -> None:
        original = getattr(interpreter.InterpreterBuilder, name)

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            if (mask := arguments[at]) is not None and mask.data.dtype != np.bool_:
                mask.data = mask.data.astype(np.bool_)
            return original(self, *arguments, **named)

        setattr(interpreter.InterpreterBuilder, name, call)

    with_boolean_mask("create_masked_load", 1)
    with_boolean_mask("create_masked_store", 2)


def filter_by_torch(module: Any) -> None:
    """Apply top-k and top-p by torch: the interpreter keeps constants as plain ints, which Triton's kernel converts."""

    def apply(logits: Any, k: Any, p: Any, **_: Any) -> Any:
        return logits if k is None and p is None else module.apply_top_k_top_p_pytorch(logits, k, p)

    module.apply_top_k_top_p = apply


def count_nans_by_torch(module: Any) -> None:
    """Count NaNs by torch: the kernel calls a function of CUDA's library, which the interpreter does not have."""

    def get_num_nans(logits: Any) -> Any:
        return logits.isnan().sum(-1).int()

    module.get_num_nans = get_num_nans


def keep_asynchronous(module: Any) -> None:
    """Keep `async_scheduling` as it was: the CPU's platform switches it off for every config that is made."""
    original = module.CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        original(cls, config)
        config.scheduler_config.async_scheduling = bool(wanted)

    module.CpuPlatform.check_and_update_config = classmethod(check)


def launch_as_on_a_gpu(module: Any) -> None:
    """Let Tandem's loop launch batches, and another thread wait for them, as where a launch returns at once."""
    module.computes_at_launch = lambda: False


def gather_unlike_batches(module: Any) -> None:
    """Let the CPU's communicator gather and scatter rows of which each rank has a number of its own."""
    import torch
    import torch.distributed as dist

    def gathered(self: Any, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def all_gatherv(self: Any, rows: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        assert dim == 0
        each = rows if isinstance(rows, list) else [rows]
        answers = [gathered(self, one, sizes or [len(one)] * self.world_size) for one in each]
        return answers if isinstance(rows, list) else answers[0]

    def reduce_scatterv(self: Any, rows: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Any:
        assert dim in (0, -rows.dim())
        summed = rows.contiguous().clone()
        dist.all_reduce(summed, group=self.device_group)
        counts = sizes or [len(summed) // self.world_size] * self.world_size
        first = sum(counts[: self.rank_in_group])
        return summed[first : first + counts[self.rank_in_group]].contiguous()

    module.CpuCommunicator.all_gatherv = all_gatherv
    module.CpuCommunicator.reduce_scatterv = reduce_scatterv


COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator"
BEFORE = {"vllm.triton_utils.importing": offer_a_driver}
AFTER = {
    COMMUNICATOR: gather_unlike_batches,
    "vllm.v1.sample.ops.topk_topp_sampler": filter_by_torch,
    "vllm.v1.worker.gpu.metrics.logits": count_nans_by_torch,
    "vllm.platforms.cpu": keep_asynchronous,
    "engine.process.vllm.process": launch_as_on_a_gpu,
}
if "TRITON_INTERPRET" not in os.environ:
    BEFORE, AFTER = {}, {COMMUNICATOR: gather_unlike_batches}
NOTHING: Callable[[ModuleType], None] = lambda _: None  # noqa: E731


class Changes(MetaPathFinder):
    """Finder that makes the changes when their modules are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in BEFORE and name not in AFTER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        original = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            BEFORE.get(name, NOTHING)(module)
            original(module)
            AFTER.get(name, NOTHING)(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Changes())
