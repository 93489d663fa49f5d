"""The contract of engines, held by the torch and the sim engine; vLLM's is in tests/vllm_backend."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from support.engine_contract import EngineContract, Pair
from support.real_engines import RealEngine, engines
from support.vllm_engines import BLOCK, STORYTELLER

pytestmark = pytest.mark.asyncio(loop_scope="module")
TORCH: dict[str, Any] = {"dtype": "float32", "threads": 1}
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 5.0}


@pytest_asyncio.fixture(params=[TORCH, SIM], ids=["torch", "sim"], scope="module", loop_scope="module")
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    settings = {"block_tokens": BLOCK, "kv_memory_mib": 64, "max_prefill_tokens": 64} | request.param
    lender = RealEngine("lender", STORYTELLER, "prefill", **settings)
    borrower = RealEngine("borrower", STORYTELLER, "decode", **settings)
    async with engines(lender, borrower):
        yield Pair(lender, borrower)


class TestContract(EngineContract):
    pass
