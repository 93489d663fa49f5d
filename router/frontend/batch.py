"""Batches of prompts in one call: several at a time, each result whole, when it is finished."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from cluster.errors import InvalidRequest, ServiceError
from cluster.network.error_status import to_proto
from cluster.process.tasks import Tasks
from protos import inference_pb2 as pb
from router.request_path.late_messages import joined
from router.validation import check_whole_answer

MAX_REQUESTS = 4096
MAX_CONCURRENT = 256
DEFAULT_CONCURRENT = 32
MAX_UNREAD = 64
"""Results that may wait for a client that reads slowly; then no further request starts."""

Generate = Callable[[int, pb.GenerateRequest], AsyncGenerator[Sequence[bytes]]]
"""Function that yields the serialised GenerateResponses of one request, of that number in its batch."""


@dataclass(slots=True)
class _Gathered:
    """Output of one request so far."""

    choices: dict[int, pb.BatchChoice]
    finish: pb.Finish
    embedding: list[float] = field(default_factory=list)

    def add(self, response: pb.GenerateResponse) -> None:
        if response.prompt_logprobs and not response.token_ids:
            return
        if response.embedding:
            self.embedding = list(response.embedding)
            self.finish.CopyFrom(response.finish)
            return
        choice = self.choices.setdefault(response.index, pb.BatchChoice())
        choice.text += response.text
        choice.token_ids.extend(response.token_ids)
        choice.parts.extend(response.parts)
        choice.logprobs.extend(response.logprobs)
        if response.HasField("finish"):
            choice.reason, choice.stop_match = response.finish.reason, response.finish.stop_match
            num_tokens = self.finish.usage.completion_tokens + response.finish.usage.completion_tokens
            self.finish.CopyFrom(response.finish)
            self.finish.usage.completion_tokens = num_tokens


async def generate_batch(batch: pb.GenerateBatchRequest, generate: Generate) -> AsyncGenerator[pb.BatchResult]:
    """Run each request of a batch once.

    Closing it ends those in flight. Raises InvalidRequest for the whole batch.
    """
    count, concurrent = len(batch.requests), batch.max_concurrent or DEFAULT_CONCURRENT
    if not 1 <= count <= MAX_REQUESTS:
        raise InvalidRequest("requests", f"must have 1 to {MAX_REQUESTS} requests, not {count}")
    if concurrent > MAX_CONCURRENT:
        raise InvalidRequest("max_concurrent", f"must be at most {MAX_CONCURRENT}, not {concurrent}")
    results: asyncio.Queue[pb.BatchResult | Exception] = asyncio.Queue(MAX_UNREAD)
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:  # one iterator for all tasks: each takes the next number
            await asyncio.sleep(0)  # other streams go on between requests that are refused at once
            try:
                await results.put(await _one(number, batch.requests[number], generate))
            except Exception as error:  # a bug here, raised below
                await results.put(error)

    async with Tasks() as tasks:
        for _ in range(min(concurrent, count)):
            tasks.spawn(work())
        for _ in range(count):
            if isinstance(result := await results.get(), Exception):
                raise result
            yield result


async def _one(number: int, request: pb.GenerateRequest, generate: Generate) -> pb.BatchResult:
    gathered = _Gathered({}, pb.Finish())
    try:
        check_whole_answer([request])
        request.stream_tool_calls = False  # the result has each call whole
        async with contextlib.aclosing(generate(number, request)) as messages:
            async for batch in messages:
                for message in joined(batch):
                    gathered.add(message)
    except ServiceError as error:
        return pb.BatchResult(index=number, status=to_proto(error).SerializeToString())
    choices = [gathered.choices[index] for index in sorted(gathered.choices)]
    return pb.BatchResult(index=number, choices=choices, finish=gathered.finish, embedding=gathered.embedding)
