"""Interpreters with this folder in PYTHONPATH take three times as long for each step of an engine (`make test-slow`).

Python imports this module when it starts. It wraps the thread on which every engine computes, once that is imported.
"""

import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPUTES = "engine.process.engine_process"
TIMES = 3


class _Finder(PathFinder):
    """Finder of the one module that it changes."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COMPUTES or (spec := super().find_spec(fullname, path, target)) is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_slow(module: Any) -> None:
            execute(module)
            _slow(module.ComputeThread)

        loader.exec_module = execute_and_slow
        return spec


def _slow(thread: Any) -> None:
    submit = thread.submit

    def submit_slowed(self: Any, tag: Any, compute: Callable[[], Any]) -> None:
        def compute_slowly() -> Any:
            began_at = time.monotonic()
            try:
                return compute()
            finally:
                time.sleep((TIMES - 1) * (time.monotonic() - began_at))

        submit(self, tag, compute_slowly)

    thread.submit = submit_slowed


sys.meta_path.insert(0, _Finder)
