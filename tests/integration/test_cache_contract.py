"""Pins, main memory and disk of the embedded engine, by the contract that vLLM keeps, too."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from support.cache_contract import SLOW, CacheContract, Opened, small
from support.real_engines import RealEngine, engines
from support.vllm_engines import BLOCK
from support.vllm_models import write_model

__all__ = ["small"]  # a fixture
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    model = write_model("llama", tmp_path_factory.mktemp("model"), **SLOW)
    common = {"dtype": "float32", "threads": 1, "block_tokens": BLOCK, "kv_memory_mib": 1, "max_prefill_tokens": 1024}

    @asynccontextmanager
    async def open_engine(name: str, **settings: Any) -> AsyncIterator[RealEngine]:
        engine = RealEngine(name, model, "decode", **(common | settings))
        async with engines(engine):
            yield engine

    def start(name: str, **settings: Any) -> AbstractAsyncContextManager[RealEngine]:
        return open_engine(name, **settings)

    return start


class TestCache(CacheContract):
    pass
