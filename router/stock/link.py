"""Requests of a router at one stock server: the part of a decode worker's front that a stock server lacks.

A request becomes one HTTP request, whose tokens become the client's messages here (worker/requests), so
that text, stop strings and receipts are those of Tandem's own workers.

Accounts of KV for requests at stock servers: what placement predicted, corrected by what the servers tell.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from cluster.errors import DeadlineExceeded, ServiceError, Unavailable
from cluster.process.loop_watch import loop_time
from cluster.process.tasks import Endable, Tasks
from engine.messages.from_engine import Filled, PromptScored, Token
from kvcache.block_keys import BlockKey, split_keys
from loans.account import KvAccount
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb
from router.stock.completions import (
    Call,
    Chunk,
    PlainOutput,
    calls_of,
    plain_call,
    prompt_scores,
    read_chunk,
    tokens_of,
)
from router.stock.facts import EventReader, ServerApi, ServerFacts
from worker.requests.output_stream import OutputStream


def account_of(request: pb.DecodeRequest, block_tokens: int, sent_at: float, first_token_at: float) -> KvAccount:
    """Return the account of a request before its server tells anything: what placement predicted.

    A lender's blocks are told by no stream. Times are seconds of the monotonic clock.
    """
    num_tokens = len(request.prompt_token_ids) + len(request.emitted_token_ids)
    usable = (num_tokens - 1) // block_tokens if block_tokens else 0
    hits = min(usable, request.placement.predicted_hit_blocks)
    times = {"admitted": sent_at, "first_token": first_token_at}
    if not request.HasField("lender"):
        computed = num_tokens - hits * block_tokens
        times["compute_started"] = sent_at
        return KvAccount(
            reused_blocks=hits,
            computed_blocks=usable - hits,
            computed_tokens=computed,
            times=times,
            is_predicted=True,
        )
    computed = usable - hits if request.lender.may_compute else 0
    times |= {"loan_opened": sent_at, "loan_started": sent_at, "last_blocks_ready": first_token_at}
    return KvAccount(
        moved_blocks=hits + computed,
        lender_cached_blocks=hits,
        lender_computed_blocks=computed,
        times=times,
        is_predicted=True,
    )


def tell_cached(account: KvAccount, num_cached: int, num_tokens: int, block_tokens: int) -> None:
    """Correct an account without a lender by what the server told."""
    if not account.moved_blocks and block_tokens:
        account.reused_blocks = num_cached // block_tokens
        account.computed_tokens = num_tokens - num_cached
        account.computed_blocks = (num_tokens - 1) // block_tokens - account.reused_blocks
        account.is_predicted = False


DONE = b"[DONE]"
OUTPUT_TOKENS = 256
"""Output tokens that are expected where nothing is known. vLLM reserves none: they are counted for placement only."""
MOST_DONE = 0.9
"""Largest share of a prompt that counts as computed before its first token."""
OnBlocks = Callable[[Sequence[BlockKey]], object]
Message = Token | PromptScored | Filled


class StockLink:
    """Requests at one server, from its joining until it leaves; in the place of a DecodeStream."""

    connected = True

    def __init__(
        self,
        api: ServerApi,
        worker_id: str,
        facts: ServerFacts,
        adapters: dict[bytes, str],
        tokenizer: Tokenizer | None,
        block_tokens: int,
        approximately: bool,
        on_sent: OnBlocks,
        on_ended: OnBlocks,
    ) -> None:
        """Create it; `adapters` are the server's names of LoRA adapters by fingerprint.

        `on_sent` and `on_ended` get the keys of the blocks of a request's prompt, once each.
        """
        self._api = api
        self._worker_id = worker_id
        self._facts = facts
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._block_tokens = block_tokens
        self._approximately = approximately
        self._on_sent = on_sent
        self._on_ended = on_ended
        self._running: dict[_Attempt | GatewayRequest, None] = {}
        """Attempts there, in order of their sending."""
        self.num_decoding = 0
        """Number of requests past their prompt."""
        self.num_blocks = 0
        """Number of blocks that its requests are expected to take."""
        self._computed_at = 0.0
        """Time of the last first token, by the monotonic clock."""
        self.last_sequence = 0
        """Number of the last placement that was sent there."""
        self.on_change: Callable[[], object] = lambda: None
        """Function called when a request was sent, got its first token or ended."""
        self.failure: ServiceError | None = None
        """Reason why it takes no more requests."""
        self.heard_at = loop_time()
        """Time of the last token of any request, or of the start of the first after none."""
        self.failed = asyncio.Event()
        """Signal that a request failed below HTTP: the server may be gone. Its owner may have another event set."""

    @property
    def broken(self) -> bool:
        """Whether it takes no more requests."""
        return self.failure is not None

    @property
    def idle(self) -> bool:
        return not self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    def queued_tokens(self, tokens_per_s: float) -> int:
        """Return the prompt tokens that the server has yet to compute, at this speed.

        It computes prompts in the order of their arrival, and the oldest one since the last first token.
        """
        waiting = [attempt for attempt in self._running if not attempt.decodes]
        if not waiting:
            return 0
        since_s = time.monotonic() - max(self._computed_at, waiting[0].sent_at)
        done = min(MOST_DONE * waiting[0].num_own_tokens, since_s * tokens_per_s)
        return round(sum(attempt.num_own_tokens for attempt in waiting) - done)

    def break_off(self, failure: ServiceError) -> None:
        """Fail all requests with this error, and take no more."""
        if self.failure is None:
            self.failure = failure
            for attempt in tuple(self._running):
                attempt.cut()

    async def generate(self, request: pb.DecodeRequest, timeout_s: float) -> AsyncGenerator[Sequence[bytes]]:
        """Yield serialised GenerateResponses.

        Raises the ServiceError that ended the request; closing early cancels it.
        """
        if self.failure is not None:
            raise self.failure
        prompt = list(request.prompt_token_ids)
        model = self._adapters[request.adapter] if request.adapter else self._facts.model
        lender = request.lender.worker.loan_address if request.HasField("lender") else ""
        if self._facts.returns_token_ids:
            calls = calls_of(request, model, prompt, lender, self._approximately)
        else:
            calls = [plain_call(request, model, prompt, self._tokenizer, self._facts.takes_token_ids)]
        attempt = _Attempt(self._api, request, prompt, timeout_s, self._block_tokens)
        keys = split_keys(request.block_keys)
        self._begins(attempt, request.placement_sequence, keys)
        responses = self._responses if self._facts.returns_token_ids else self._plain_responses
        try:
            async with aclosing(responses(request, prompt, attempt, calls)) as stream:
                async for response in stream:
                    self._heard(attempt)
                    yield (response.SerializeToString(),)
        except Unavailable as error:
            self.failed.set()
            raise self.failure or error from None
        finally:
            attempt.cut()
            self._ends(attempt, keys)

    def follow(self, sequence: int, num_own_tokens: int, num_blocks: int, keys: Sequence[BlockKey]) -> "GatewayRequest":
        """Count a request that a gateway sends to the server, until it `end`s.

        `sequence` is the number of its placement; the others are those of an attempt.
        """
        request = GatewayRequest(self, num_own_tokens, num_blocks, keys)
        self._begins(request, sequence, request.keys)
        return request

    def _begins(self, attempt: "_Attempt | GatewayRequest", sequence: int, keys: Sequence[BlockKey]) -> None:
        if not self._running:
            self.heard_at = loop_time()
        self._running[attempt] = None
        self.num_blocks += attempt.num_blocks
        self.last_sequence = max(self.last_sequence, sequence)
        self._on_sent(keys)
        self.on_change()

    def _heard(self, attempt: "_Attempt | GatewayRequest") -> None:
        self.heard_at = loop_time()
        if not attempt.decodes:
            attempt.decodes, self._computed_at = True, time.monotonic()
            self.num_decoding += 1
            self.on_change()

    def _ends(self, attempt: "_Attempt | GatewayRequest", keys: Sequence[BlockKey]) -> None:
        del self._running[attempt]
        self.num_blocks -= attempt.num_blocks
        self.num_decoding -= attempt.decodes
        self._on_ended(keys)
        self.on_change()

    async def _responses(
        self, request: pb.DecodeRequest, prompt: Sequence[int], attempt: "_Attempt", calls: Sequence[Call]
    ) -> AsyncGenerator[public_pb.GenerateResponse]:
        """Yield the client's messages. Raises ServiceError."""
        output = OutputStream(request, self._tokenizer, self._worker_id, self._block_tokens)
        while (response := output.take()) is not None:  # text that an earlier attempt held back
            yield response
        account: KvAccount | None = None
        async for news in attempt.messages(calls):
            if account is None:
                account = account_of(request, self._block_tokens, attempt.sent_at, time.monotonic())
                news = _with_account(news, account, request)
            if attempt.cached_tokens is not None:
                num_tokens = len(prompt) + len(request.emitted_token_ids)
                tell_cached(account, attempt.cached_tokens, num_tokens, self._block_tokens)
            for each in news:
                output.absorb(each)
            while (response := output.take()) is not None:
                yield response
            output.take_stopped()  # closing the connection is all that stops a choice, once no other goes on
            if output.finished:
                return
        raise Unavailable(f"server {self._api.name} ended the answer before the request was done")

    async def _plain_responses(
        self, request: pb.DecodeRequest, prompt: Sequence[int], attempt: "_Attempt", calls: Sequence[Call]
    ) -> AsyncGenerator[public_pb.GenerateResponse]:
        """Yield the client's messages of an answer without token ids. Raises ServiceError."""
        output = PlainOutput(request, self._worker_id, f"server {self._api.name}")
        async for chunk in attempt.chunks(calls[0]):
            for response in output.absorb(chunk):
                yield response
        for response in output.ended():
            yield response


class GatewayRequest:
    """Request that a gateway sends to the server, and whose answer it shows to the router."""

    def __init__(self, link: StockLink, num_own_tokens: int, num_blocks: int, keys: Sequence[BlockKey]) -> None:
        self._link = link
        self.num_own_tokens = num_own_tokens
        self.num_blocks = num_blocks
        self.keys = list(keys)
        """Keys of its prompt's blocks, in a list of its own: requests are told apart by it."""
        self.decodes = False
        self.sent_at = time.monotonic()

    def heard(self) -> None:
        """Process a part of the answer."""
        self._link._heard(self)

    def failed(self) -> None:
        """Have the server looked at."""
        self._link.failed.set()

    def end(self) -> None:
        self._link._ends(self, self.keys)

    def cut(self) -> None:
        """Do nothing: its connection is the gateway's."""


def _with_account(news: list[Message], account: KvAccount, request: pb.DecodeRequest) -> list[Message]:
    """Return the first messages with the account; of a request without output, its end."""
    if request.HasField("warm"):
        return [Filled(request.request_id, account)]
    at = next((at for at, each in enumerate(news) if isinstance(each, Token)), None)
    if at is not None:
        token = news[at]
        assert isinstance(token, Token)
        news[at] = token._replace(account=account)
    return news


class _Attempt:
    """HTTP requests of one attempt at a request."""

    def __init__(
        self, api: ServerApi, request: pb.DecodeRequest, prompt: Sequence[int], timeout_s: float, block_tokens: int
    ) -> None:
        self._api = api
        self._where = f"server {api.name}"
        self._request = request
        self._prompt = prompt
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._answers: list[aiohttp.ClientResponse] = []
        self._opening: set[Endable] = set()
        num_tokens = len(prompt) + len(request.emitted_token_ids)
        hits = 0 if request.HasField("lender") else request.placement.predicted_hit_blocks
        self.num_own_tokens = max(1, num_tokens - hits * block_tokens)
        """Prompt tokens that the server is expected to compute."""
        self.num_blocks = -(-(num_tokens + (request.reserve_output_tokens or OUTPUT_TOKENS)) // block_tokens)
        """Blocks that the request is expected to take."""
        self.decodes = False
        """Whether its first token has come."""
        self.sent_at = time.monotonic()
        self.cached_tokens: int | None = None
        """Prompt tokens that the server had cached, once it told."""

    def cut(self) -> None:
        """Close all connections, which ends the request at the server."""
        for answer in self._answers:
            answer.close()
        for block in self._opening:
            block.end(Unavailable(f"{self._where} was left"))

    async def messages(self, calls: Sequence[Call]) -> AsyncIterator[list[Message]]:
        """Yield what comes of all calls. Raises ServiceError."""
        if len(calls) == 1:
            async for messages in self._messages_of(calls[0]):
                yield messages
            return
        queue: asyncio.Queue[list[Message] | ServiceError | None] = asyncio.Queue()

        async def follow(call: Call) -> None:
            try:
                async for messages in self._messages_of(call):
                    queue.put_nowait(messages)
                queue.put_nowait(None)
            except ServiceError as error:
                queue.put_nowait(error)

        async with Tasks() as tasks:
            for call in calls:
                tasks.spawn(follow(call))
            num_open = len(calls)
            while num_open:
                match await queue.get():
                    case None:
                        num_open -= 1
                    case ServiceError() as error:
                        raise error
                    case messages:
                        yield messages

    async def _messages_of(self, call: Call) -> AsyncIterator[list[Message]]:
        """Yield the messages of one call; its last tokens wait for the usage that follows them."""
        num_open = call.body.get("n", 1)
        last: list[Message] = []
        async for chunk in self.chunks(call):
            messages: list[Message] = []
            if (scores := prompt_scores(chunk, self._request, self._prompt)) is not None:
                messages.append(scores)
            for token in tokens_of(call, chunk, self._request, self._where):
                messages.append(token)
                num_open -= token.finish is not None
            if chunk.cached_tokens is not None:
                self.cached_tokens = chunk.cached_tokens
            if num_open and messages:
                yield messages
            else:
                last += messages
        if last:
            yield last

    async def _opened(self, call: Call) -> aiohttp.ClientResponse:
        left_s = self._deadline - asyncio.get_running_loop().time()
        async with Endable(left_s, DeadlineExceeded(_TOO_LATE)) as block:
            self._opening.add(block)
            try:
                answer = await self._api.complete(call, self._request.request_id)
            finally:
                self._opening.discard(block)
        self._answers.append(answer)
        return answer

    async def chunks(self, call: Call) -> AsyncIterator[Chunk]:
        """Yield the chunks of one call. Raises ServiceError."""
        answer = await self._opened(call)
        if not call.streams:
            yield read_chunk(await self._read(answer.read), self._where)
            return
        events = EventReader()
        while data := await self._read(answer.content.readany):
            for event in events.feed(data):
                if event != DONE:
                    yield read_chunk(event, self._where)

    async def _read(self, read: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await read()
        except TimeoutError:
            raise DeadlineExceeded(_TOO_LATE) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._api.unavailable(error) from None


_TOO_LATE = "the deadline passed before the request was done"
