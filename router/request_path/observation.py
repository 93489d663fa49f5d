"""Observation of requests: metrics, records, traces and usage, in one place beside their path.

Usage is accounted before the client has the receipt.
"""

import asyncio
import time
from functools import partial
from types import TracebackType
from typing import Self

from cluster.errors import ServiceError
from cluster.process.tasks import Tasks
from protos import inference_pb2 as pb
from router.models.model_runtimes import ModelRuntimes
from router.observability.metrics import RouterMetrics
from router.observability.record_file import RecordFile, texts_of
from router.observability.records import Placement, Refused, RequestRecord, RequestRecords
from router.observability.tracing import CANCELLED, Tracing
from router.placement.fleet.worker_records import ActivePlacement
from router.placement.place import Decision
from router.prepared_request import PreparedRequest
from router.request_path.stream_state import StreamState
from router.security.api_keys import Principal
from router.usage import UsageEntry, UsageLedger

FINISH_TAG = b"\x22"
"""First byte of the field `finish` in a message. Of a message without this byte nothing is to be accounted."""


class Accounting:
    """Accounting of one router."""

    def __init__(self, ledger: UsageLedger, metrics: RouterMetrics) -> None:
        self.ledger = ledger
        self._metrics = metrics
        self._late = Tasks("usage could not be accounted")

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
        self._late.spawn(self.ledger.add(entry))  # the request's own task may be ending

    async def close(self) -> None:
        """Finish the late entries, then close the ledger."""
        await self._late.join()
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


class Observer:
    """Observer of all requests of one router."""

    def __init__(
        self,
        models: ModelRuntimes,
        metrics: RouterMetrics,
        file: RecordFile,
        tracing: Tracing,
        accounting: Accounting,
    ) -> None:
        self.metrics = metrics
        self.file = file
        self.tracing = tracing
        self.accounting = accounting
        self.records = RequestRecords()
        for model in models:
            model.fleet.keeps_snapshots = True

    def watch(self, request: pb.GenerateRequest, principal: Principal, is_warm: bool) -> "Observation":
        """Begin the observation of a request that has just arrived; `is_warm`: it has no output."""
        return Observation(self, request, principal, is_warm)


class Unobserved:
    """Observation that records nothing: what a request's path says of it; a context manager around the request."""

    keeps_texts = False
    """Whether the request's texts, and thumbnails of its pictures, are kept."""

    def checked(self, prepared: PreparedRequest) -> None:
        """Record that the request is valid."""

    def renewed(self, prepared: PreparedRequest) -> None:
        """Record that the request was read again, for another revision of its model."""

    def placed(self, attempt: int, placed_after_s: float, decision: Decision, placed: ActivePlacement) -> None:
        """Record a placement, and take its snapshot; `placed_after_s` counts from the request's arrival."""

    def started(self, ttft_s: float) -> None:
        """Record the first message of the last placement, `ttft_s` after it."""

    def attempt_failed(self, failure: ServiceError) -> None:
        """Record the failure of the last placement."""

    def attempt_finished(self, finish: pb.Finish) -> None:
        """Record the success of the last placement."""

    def message(self, message: bytes) -> bool:
        """Record a message before its client has it; return whether `account` must follow."""
        return False

    async def account(self, emitted: StreamState, message: bytes) -> None:
        """Account the request if its receipt is in the message."""

    def sent(self, emitted: StreamState) -> None:
        """Count the tokens of a checked request whose stream ended in whatever way."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record how the request ended."""


class Observation(Unobserved):
    """Observation of one request."""

    def __init__(self, observer: Observer, request: pb.GenerateRequest, principal: Principal, is_warm: bool) -> None:
        self._observer = observer
        self._principal = principal
        self._metrics = observer.metrics.watch()
        self._is_drawn = observer.file.draw()
        self.keeps_texts = not is_warm and observer.file.keeps_texts(self._is_drawn)
        self._kept: list[bytes] = []
        self._prepared: PreparedRequest | None = None
        self._record = RequestRecord(
            request.request_id, request.tenant, time.time(), request.model, bool(request.messages)
        )
        self._is_accounted = False

    def checked(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._record.checked(prepared)
        self._observer.records.add(self._record)
        self._metrics.checked(prepared)

    def renewed(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared

    def placed(self, attempt: int, placed_after_s: float, decision: Decision, placed: ActivePlacement) -> None:
        placement = Placement(attempt, placed_after_s, decision, placed.placement_snapshot)
        placed.placement_snapshot = None
        if self._is_drawn:
            self._observer.file.placed(self._record, placement)
        self._observer.records.placed(self._record, placement)

    def started(self, ttft_s: float) -> None:
        self._record.started(ttft_s)

    def attempt_failed(self, failure: ServiceError) -> None:
        self._record.failed(str(failure))

    def attempt_finished(self, finish: pb.Finish) -> None:
        self._record.finished(finish.receipt.kv)

    def message(self, message: bytes) -> bool:
        self._metrics.message()
        if self.keeps_texts:
            self._kept.append(message)
        return FINISH_TAG in message  # asked here, since most messages are single tokens

    async def account(self, emitted: StreamState, message: bytes) -> None:
        assert self._prepared is not None, "a message comes after the check"
        self._is_accounted |= await self._observer.accounting.message(self._prepared, emitted, message)

    def sent(self, emitted: StreamState) -> None:
        """Count the tokens; messages are parsed only of requests that ended early or have several choices."""
        prepared = self._prepared
        if emitted.empty or prepared is None:
            return
        finish = prepared.finish
        if finish is not None and prepared.sampling.n == 1:
            prepared.num_output_tokens, self._record.reasons = finish.usage.completion_tokens, [finish.reason]
        else:
            prepared.num_output_tokens = emitted.num_tokens
            self._record.reasons = [choice.reason for choice in emitted.choices if choice.reason is not None]
        num_prompt, num_output = len(prepared.prompt), prepared.num_output_tokens
        self._metrics.over(num_prompt, num_output)
        prepared.model.costs.used(num_prompt, num_output)
        if not self._is_accounted:
            self._observer.accounting.cut_off(prepared, emitted)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record, prepared, observer = self._record, self._prepared, self._observer
        record.ended, record.ended_at, record.ttft_s = True, time.time(), self._metrics.ttft_s
        error_type = ""
        if prepared is not None:
            record.num_output_tokens = prepared.num_output_tokens
        if isinstance(error, ServiceError):
            error_type = error.code
            self._failed(error)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            error_type = CANCELLED
            self._metrics.left()
        elif error is None and prepared is not None and prepared.finish is not None:
            record.finish = prepared.finish
            if self.keeps_texts and prepared.media is not None:
                record.thumbnails = prepared.media.thumbnails
            self._metrics.finished(prepared.finish)
            observer.records.ended(record)
        observer.tracing.ended(record, error_type)
        if self._is_drawn or record.refusal is not None:
            texts = None
            if self.keeps_texts and record.finish is not None and prepared is not None:
                texts = partial(texts_of, prepared, self._kept)
            observer.file.ended(record, texts)

    def _failed(self, error: ServiceError) -> None:
        record = self._record
        self._metrics.failed(error)
        record.refusal = Refused.of(error)
        if self._prepared is None and record.request_id:
            record.tenant = self._principal.tenant or record.tenant  # the tenant may not be known yet
            self._observer.records.add(record)
