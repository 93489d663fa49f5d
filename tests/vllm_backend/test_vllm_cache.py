"""Pins, main memory and disk of vLLM engines on both model runners, by the contract of every engine."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from support.cache_contract import SLOW, CacheContract, Opened, small
from support.real_engines import RealEngine, engines
from support.vllm_engines import PYTHON, V2, need_vllm, vllm_engine
from support.vllm_models import write_model

__all__ = ["small"]  # a fixture
pytestmark = [need_vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module", params=[PYTHON, V2], ids=["V1", "V2"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    model = write_model("llama", tmp_path_factory.mktemp("model"), **SLOW)
    common = {"max_prefill_tokens": 1024, "max_batch_tokens": 1024, "kv_memory_mib": 1}
    common |= {"vllm_options": {"max_model_len": 640}, "vllm_python": request.param}

    @asynccontextmanager
    async def open_engine(name: str, **settings: Any) -> AsyncIterator[RealEngine]:
        engine = vllm_engine(name, model=model, **(common | settings))
        async with engines(engine):
            yield engine

    def start(name: str, **settings: Any) -> AbstractAsyncContextManager[RealEngine]:
        return open_engine(name, **settings)

    return start


class TestCache(CacheContract):
    pass
