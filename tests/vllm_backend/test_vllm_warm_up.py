"""A vLLM engine is warm when it is ready, and the warm-up has left nothing."""

from typing import Any

import pytest

from engine.messages.from_engine import CacheChanged, CacheInspected, Connected, LoadReport
from engine.messages.to_engine import ConnectPeers, InspectCache, TakeSnapshot
from support.engine_contract import named, prompt_of
from support.long_runs import mostly_long
from support.real_engines import engines
from support.vllm_engines import BLOCK, PYTHON, V2, ids, need_vllm, vllm_engine

pytestmark = need_vllm
KINDS: dict[str, dict[str, Any]] = {"V1": {"vllm_python": PYTHON}, "V2 asynchronous": {"vllm_python": V2}}


@pytest.mark.parametrize("kind", mostly_long(KINDS, "V1", "V2 asynchronous"))
async def test_what_was_computed_to_warm_up_is_gone(kind: str) -> None:
    engine, lender = vllm_engine("warm", **KINDS[kind]), vllm_engine("lender", "prefill", **KINDS[kind])
    async with engines(engine, lender):
        assert engine.ready.warm_up_s > 0
        await engine.audited()
        engine.send(InspectCache(2), TakeSnapshot(), ConnectPeers(3, (lender.peer,)))
        for kind_of in (CacheInspected, CacheChanged, Connected, LoadReport):
            await engine.until(lambda kind_of=kind_of: engine.has_said(kind_of))
        (inspected,) = [message for message in engine.said if isinstance(message, CacheInspected)]
        assert (inspected.held, inspected.filled) == (0, 0)
        assert all(not message.events for message in engine.said if isinstance(message, CacheChanged))
        loads = [message for message in engine.said if isinstance(message, LoadReport)]
        assert all(load.preemptions == load.running == 0 for load in loads)
        assert [message for message in engine.said if isinstance(message, Connected)] == [Connected(3)]
        await engine.audited()
        prompt = prompt_of(2 * BLOCK + 5, 1)
        alone = ids(await engine.answer(named(prompt, 8)))
        assert ids(await lender.answer(named(prompt, 8))) == alone
        await engine.audited()
