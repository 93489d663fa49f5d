"""Accounting of requests: an entry of the ledger for each, before its client has the receipt."""

import asyncio
import time

from protos import inference_pb2 as pb
from router.observability.metrics import RouterMetrics
from router.prepared_request import PreparedRequest
from router.request_path.stream_state import StreamState
from router.usage import UsageEntry, UsageLedger

FINISH_TAG = b"\x22"
"""First byte of the field `finish` in a message. Of a message without this byte nothing is to be accounted."""


class Accounting:
    """Accounting of one router."""

    def __init__(self, ledger: UsageLedger, metrics: RouterMetrics) -> None:
        self.ledger = ledger
        self._metrics = metrics
        self._late: set[asyncio.Task[None]] = set()

    async def message(self, prepared: PreparedRequest, emitted: StreamState, message: bytes) -> bool:
        """Account a request whose receipt is in this message; return whether it is."""
        finish = pb.GenerateResponse.FromString(message).finish
        if not finish.HasField("receipt"):
            return False
        usage = finish.usage
        is_single = prepared.sampling.n == 1
        output = usage.completion_tokens if is_single else emitted.num_tokens
        entry = self._entry(prepared, usage.prompt_tokens, usage.cached_tokens, output, is_complete=True)
        await self.ledger.add(entry)
        return True

    def cut_off(self, prepared: PreparedRequest, emitted: StreamState) -> None:
        """Account a request that ended after its first token and without a receipt."""
        entry = self._entry(prepared, len(prepared.prompt), 0, emitted.num_tokens, is_complete=False)
        task = asyncio.ensure_future(self.ledger.add(entry))  # the request's own task may be ending
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def close(self) -> None:
        """Finish the late entries, then close the ledger."""
        await asyncio.gather(*self._late)
        await self.ledger.close()

    def _entry(
        self, prepared: PreparedRequest, num_input: int, num_cached: int, num_output: int, is_complete: bool
    ) -> UsageEntry:
        tenant, model, reasoning = prepared.request.tenant, prepared.model.name, prepared.output.num_reasoning
        self._metrics.used(model, tenant, num_input, num_cached, num_output)
        return UsageEntry(
            prepared.request_id,
            time.time(),
            tenant,
            model,
            num_input,
            num_cached,
            num_output,
            min(reasoning, num_output),
            is_complete,
        )
