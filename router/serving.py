"""The way of one request through the router: check, tokenise, place, pass through, and place again on failure."""

import asyncio
import contextlib
import copy
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from cluster.errors import DeadlineExceeded, Draining, InvalidRequest, Overloaded, Unavailable, UnknownModel
from engine.keys import BlockKey, block_keys, root_key
from engine.model_dir import ModelDir
from engine.structured import read_structured
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb
from protos import lend_pb2, membership_pb2
from router.admission.request import Claim
from router.attempt import Emitted, Retriable, run_attempt
from router.candidates import Candidate
from router.config import RouterConfig
from router.decode_links import DecodeLinks
from router.demand import Demand, num_blocks_of
from router.dispatch import Dispatcher
from router.explain import explain
from router.fleet import Fleet, Placed, Worker
from router.grammar_checker import GrammarChecker
from router.placement import Decision
from router.prompts import PromptEncoder
from router.validation import check_names, check_prompt, check_time_limit, prompt_field, resolve_sampling

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ticket:
    """A checked request and its clock."""

    request: public_pb.GenerateRequest
    request_id: str
    prompt: list[int]
    sampling: public_pb.Sampling
    arrived_at: float
    tokenised_at: float
    deadline: float
    """Seconds of the monotonic clock, as are the others."""
    claim: Claim

    @property
    def most_tokens(self) -> int:
        """Of prompt and output."""
        choices = self.sampling.beam_width if self.sampling.HasField("beam_width") else self.sampling.n
        return len(self.prompt) + self.sampling.max_tokens * choices

    def remaining_s(self) -> float:
        """Raises DeadlineExceeded when nothing remains."""
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded("the deadline passed before the request was done")
        return remaining


class Serving:
    """All requests of one router."""

    def __init__(
        self,
        config: RouterConfig,
        model_dir: ModelDir,
        encoder: PromptEncoder,
        grammars: GrammarChecker,
        fleet: Fleet,
        dispatcher: Dispatcher,
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._encoder = encoder
        self._grammars = grammars
        self._fleet = fleet
        self._dispatcher = dispatcher
        self.links = DecodeLinks(fleet)

    async def generate(self, request: public_pb.GenerateRequest, deadline_s: float | None) -> AsyncGenerator[bytes]:
        """Serialised GenerateResponses: one unbroken stream over however many attempts. Raises ServiceError."""
        ticket = await self._check(request, deadline_s)
        charge = await self._dispatcher.enter(request.tenant, ticket.most_tokens)
        emitted = Emitted(ticket.sampling.n)
        try:
            async with contextlib.aclosing(self._attempts(ticket, emitted)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._dispatcher.leave(charge, lambda: len(ticket.prompt) + emitted.num_tokens)

    async def _attempts(self, ticket: Ticket, emitted: Emitted) -> AsyncGenerator[bytes]:
        attempt, failures = 1, 0
        while True:
            placed, decision, placed_at = await self._place(ticket, emitted)
            try:
                internal = self._decode_request(ticket, emitted, placed, decision, attempt, placed_at)
                messages = run_attempt(self.links.to(placed.decode), internal, ticket.remaining_s())
                async with contextlib.aclosing(messages):
                    async for message in messages:
                        if not placed.started:
                            self._fleet.started(placed)
                            started_at = time.monotonic()
                        emitted.add(message)
                        yield message
                if placed.started:
                    self._learn(ticket, placed, message, started_at - placed_at)
                return
            except Retriable as failure:
                if emitted.finished:
                    return
                log.info("%s: attempt %d failed: %s", ticket.request_id, attempt, failure)
                if isinstance(failure.cause, Draining):
                    self._fleet.drains(placed.decode)  # nothing failed: it hands the request over, once
                    attempt += 1
                    continue
                if isinstance(failure.cause, Overloaded):
                    self._dispatcher.refused(placed)  # raises when it was too often
                    continue
                attempt, failures = attempt + 1, failures + 1
                if failures == self._config.max_attempts:
                    raise failure.cause from None
            finally:
                self._dispatcher.ended(placed)
            await self._settle(placed.decode)

    async def explain(
        self, request: public_pb.GenerateRequest, deadline_s: float | None
    ) -> tuple[Demand, list[Candidate]]:
        """What a request needs, and all ways to start it now, the cheapest first. Raises ServiceError."""
        ticket = await self._check(request, deadline_s)
        demand, keys = await self._needs(ticket, Emitted(ticket.sampling.n))
        # A large fleet's candidates take tenths of a second: not on the loop, and of a snapshot that stays as it is.
        situation = copy.deepcopy((self._fleet.snapshot, self._fleet.hits(keys), self._fleet.rates))
        return demand, await asyncio.to_thread(explain, demand, *situation)

    def _learn(self, ticket: Ticket, placed: Placed, last_message: bytes, first_message_s: float) -> None:
        finish = public_pb.GenerateResponse.FromString(last_message).finish
        if finish.HasField("receipt"):
            # The first message of these is not the first token.
            other = ticket.sampling.HasField("prompt_logprobs") or ticket.sampling.HasField("beam_width")
            self._fleet.finished(placed, finish, None if other else first_message_s)

    async def _check(self, request: public_pb.GenerateRequest, deadline_s: float | None) -> Ticket:
        arrived_at = time.monotonic()
        if request.model and request.model != self._model_dir.name:
            raise UnknownModel(f"{request.model!r} is not served here; {self._model_dir.name!r} is", "model")
        check_names(request)
        check_time_limit(request)
        prompt = await self._encoder.encode(request)
        check_prompt(prompt, prompt_field(request), self._model_dir)
        sampling = resolve_sampling(request.sampling, len(prompt), self._model_dir)
        if (structured := read_structured(sampling)) is not None:
            await self._grammars.check(structured)
        deadline = arrived_at + (self._config.default_deadline_s if deadline_s is None else deadline_s)
        first_token_s = request.max_ttft_ms / 1e3 if request.HasField("max_ttft_ms") else math.inf
        return Ticket(
            request=request,
            request_id=request.request_id or secrets.token_hex(8),
            prompt=prompt,
            sampling=sampling,
            arrived_at=arrived_at,
            tokenised_at=time.monotonic(),
            deadline=deadline,
            claim=Claim(request.tenant, request.priority, arrived_at, deadline, arrived_at + first_token_s),
        )

    async def _place(self, ticket: Ticket, emitted: Emitted) -> tuple[Placed, Decision, float]:
        """Wait for a pair. What can never start is refused at once; with nobody there it waits a little."""
        demand, keys = await self._needs(ticket, emitted)
        ticket.claim.streaming = not emitted.empty
        placed, decision = await self._dispatcher.place(ticket.claim, demand, keys)
        return placed, decision, time.monotonic()

    async def _needs(self, ticket: Ticket, emitted: Emitted) -> tuple[Demand, list[BlockKey]]:
        """With the keys of the blocks that may come from elsewhere."""
        await self._await_decode_workers(ticket)
        hello = self._some_decode_worker().hello
        chains = _chains(ticket, emitted)
        demand = self._demand(ticket, chains, emitted, hello.block_tokens, hello.block_bytes)
        root = root_key(hello.model_fingerprint, ticket.request.cache_salt)
        usable = chains[0][: demand.num_usable_blocks * demand.block_tokens]
        return demand, block_keys(root, usable, demand.block_tokens)

    def _demand(
        self, ticket: Ticket, chains: list[list[int]], emitted: Emitted, block_tokens: int, block_bytes: int
    ) -> Demand:
        num_prompt, sampling = len(ticket.prompt), ticket.sampling
        end = num_prompt + sampling.max_tokens
        shared = num_prompt - 1 if len(chains) > 1 else 0
        total = num_blocks_of([end] * len(chains), shared, block_tokens)
        largest = max(worker.hello.num_blocks for worker in self._decode_workers())
        if total > largest:
            times = f" {len(chains)} times" if len(chains) > 1 else ""
            raise InvalidRequest(
                "sampling.max_tokens",
                f"prompt of {num_prompt} tokens + max_tokens of {sampling.max_tokens}{times} need {total} KV blocks; "
                f"the largest pool has {largest}",
            )
        to_score = sampling.HasField("prompt_logprobs") and emitted.num_prompt_logprobs < num_prompt - 1
        num_usable = 0 if to_score else (len(chains[0]) - 1) // block_tokens
        lengths = tuple(map(len, chains))
        return Demand(len(chains[0]), num_usable, total, block_tokens, block_bytes, lengths, end, shared)

    async def _await_decode_workers(self, ticket: Ticket) -> None:
        give_up_at = time.monotonic() + min(self._config.no_worker_grace_s, ticket.remaining_s())
        while not self._decode_workers():
            if time.monotonic() > give_up_at:
                raise Unavailable("no decode worker has joined")
            await asyncio.sleep(0.02)

    async def _settle(self, worker: Worker) -> None:
        """After a failure: a dead worker's membership ends within moments; do not choose it again before that."""
        for _ in range(10):
            if self._fleet.worker(worker.worker_id) is not worker:
                return
            await asyncio.sleep(0.02)

    def _decode_workers(self) -> list[Worker]:
        """Those whose engine has reported: one that hangs may join again and again, and say no more than Hello."""
        workers = self._fleet.workers
        return [worker for worker in workers if worker.decodes and worker.load is not None and not worker.draining]

    def _some_decode_worker(self) -> Worker:
        return self._decode_workers()[0]

    def _decode_request(
        self,
        ticket: Ticket,
        emitted: Emitted,
        placed: Placed,
        decision: Decision,
        attempt: int,
        placed_at: float,
    ) -> pb.DecodeRequest:
        lender = placed.lender.hello if placed.lender else None
        source = placed.source.hello if placed.source else None
        internal = pb.DecodeRequest(
            request_id=ticket.request_id,
            worker_incarnation=placed.decode.hello.incarnation,
            prompt_token_ids=ticket.prompt,
            emitted_token_ids=emitted.choices[0].token_ids,
            emitted_chars=emitted.choices[0].num_chars,
            emitted_choices=[
                pb.EmittedChoice(index=index, token_ids=choice.token_ids, chars=choice.num_chars)
                for index, choice in enumerate(emitted.choices)
                if index and choice.token_ids
            ],
            finished_choices=[index for index, choice in enumerate(emitted.choices) if choice.finished],
            emitted_prompt_logprobs=emitted.num_prompt_logprobs,
            sampling=ticket.sampling,
            cache_salt=ticket.request.cache_salt,
            priority=ticket.request.priority,
            placement=public_pb.Placement(
                decode_worker=decision.decode_id,
                lender=decision.lender_id or "",
                source=decision.source_id or "",
                reason=decision.reason,
                candidates=decision.num_candidates,
                predicted_ttft_ms=decision.predicted_ttft_s * 1e3,
                attempt=attempt,
            ),
            router_stages=self._stages(ticket, placed_at),
            elapsed_ms=(time.monotonic() - ticket.arrived_at) * 1e3,
            router_id=self._fleet.mark,
            placement_sequence=placed.sequence,
        )
        if lender is not None:
            internal.lender.CopyFrom(
                pb.Lender(worker=_holder(lender), may_compute=decision.lender_computes, source=_holder(source))
            )
        return internal

    def _stages(self, ticket: Ticket, placed_at: float) -> list[public_pb.Stage]:
        tokenise_ms = (ticket.tokenised_at - ticket.arrived_at) * 1e3
        where = self._fleet.router_id
        return [
            public_pb.Stage(name="tokenise", where=where, start_ms=0.0, duration_ms=tokenise_ms),
            public_pb.Stage(
                name="router queue",
                where=where,
                start_ms=tokenise_ms,
                duration_ms=(placed_at - ticket.tokenised_at) * 1e3,
            ),
        ]


def _holder(hello: membership_pb2.Hello | None) -> lend_pb2.Holder | None:
    if hello is None:
        return None
    return lend_pb2.Holder(worker_id=hello.worker_id, address=hello.address, incarnation=hello.incarnation)


def _chains(ticket: Ticket, emitted: Emitted) -> list[list[int]]:
    """The tokens of each choice that is not finished; of beam search, which begins anew, those of each beam."""
    if ticket.sampling.HasField("beam_width"):
        return [ticket.prompt] * ticket.sampling.beam_width
    return [[*ticket.prompt, *choice.token_ids] for choice in emitted.choices if not choice.finished]
