"""Replacement of vLLM's executor in every process that has this folder on PYTHONPATH and NULL_EXECUTOR set.

Tandem's engine chooses its executor itself, so the class that it finds has to be another one.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

REPLACED = "vllm.v1.executor.uniproc_executor"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REPLACED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader = spec.loader
        assert loader is not None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from bench.fleet.null_executor import NullExecutor

            for method in ("_requests", "_computed", "execute_model", "sample_tokens"):
                setattr(module.UniProcExecutor, method, getattr(NullExecutor, method))

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("NULL_EXECUTOR"):
    sys.meta_path.insert(0, _Finder())
