"""What every engine keeps to, whatever computes in it: loans, cancels, failures, choices, and the names of blocks.

A test module subclasses `EngineContract` and offers a `pair` of its engines, the lender with chunks of 64 tokens.
"""

import asyncio
import os
import random
from collections import Counter
from itertools import count

import pytest

from engine.messages.from_engine import Audited, CacheChanged, CacheInspected, Filled, Rejected, Token
from engine.messages.to_engine import (
    Audit,
    CacheDrop,
    Cancel,
    CorruptReads,
    CutOffPeer,
    DrainLoans,
    Generate,
    InspectCache,
    TakeSnapshot,
)
from kvcache.block_keys import block_keys, root_key
from kvcache.pool import Removed, Stored
from loans.account import KvAccount
from loans.lender_manager import TOLD_TO_STOP
from support.real_engines import Caller, RealEngine, cached_blocks, chosen, greedy, lent_by
from support.vllm_engines import BLOCK, flip_a_byte, ids

VOCAB = 2048
NUM_STORM_REQUESTS = int(os.environ.get("TANDEM_STORM_REQUESTS", "40"))
numbers = count()


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    generator = random.Random(num_tokens * 1000 + seed)
    return [generator.randrange(3, VOCAB) for _ in range(num_tokens)]


def account_of(tokens: list[Token]) -> KvAccount:
    return next(token.account for token in tokens if token.account is not None)


def audits_of(engine: RealEngine) -> list[Audited]:
    return [message for message in engine.said if isinstance(message, Audited)]


class Pair:
    """A lender and a borrower."""

    def __init__(self, lender: RealEngine, borrower: RealEngine) -> None:
        self.lender, self.borrower = lender, borrower

    async def borrowed(self, request: Generate) -> list[Token]:
        return await self.borrower.answer(request, self.lender)

    async def settled(self) -> None:
        """Both hold nothing, and their block pools' records agree."""
        for engine in (self.lender, self.borrower):
            found = await engine.audited()
            assert (found.reserved_blocks, found.sequences) == (0, 0)


def named(prompt: list[int], max_tokens: int = 12, **options: object) -> Generate:
    return greedy(f"r{next(numbers)}", prompt, max_tokens, **options)


class EngineContract:
    """Tests of two engines in processes of their own; the borrower asks the lender over their own sockets."""

    @pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 200, 500])
    async def test_borrowed_blocks_give_the_tokens_of_the_lender_alone(self, pair: Pair, num_tokens: int) -> None:
        prompt = prompt_of(num_tokens)
        got = await pair.borrowed(named(prompt))
        account = account_of(got)
        blocks = (num_tokens - 1) // BLOCK
        assert (account.moved_blocks, account.computed_tokens) == (blocks, num_tokens - blocks * BLOCK)
        assert ids(got) == ids(await pair.lender.answer(named(prompt)))
        again = await pair.borrowed(named(prompt))
        assert ids(again) == ids(got)
        assert account_of(again).reused_blocks == blocks
        await pair.settled()

    async def test_blocks_are_announced_chunk_by_chunk(self, pair: Pair) -> None:
        request = named(prompt_of(400, 1))
        account = account_of(await pair.borrowed(request))
        times = account.times
        assert times["last_blocks_ready"] > times["first_blocks_ready"]
        assert account.lender_computed_blocks == account.moved_blocks == 12

    async def test_many_at_once_share_what_they_share(self, pair: Pair) -> None:
        shared = prompt_of(128, 2)
        requests = [named(shared + prompt_of(40 + i, 3)) for i in range(8)]
        alone = [ids(await pair.lender.answer(named(list(request.prompt)))) for request in requests]
        got = await asyncio.gather(*(pair.borrowed(request) for request in requests))
        assert [ids(tokens) for tokens in got] == alone
        await pair.settled()

    async def test_a_flipped_byte_is_found_named_and_computed_again(self, pair: Pair) -> None:
        prompt = prompt_of(300, 4)
        expected = ids(await pair.lender.answer(named(prompt)))
        spoiled = (await cached_blocks(pair.lender, prompt))[4]
        flip_a_byte(pair.lender, spoiled)
        got = await pair.borrowed(named(prompt))
        flip_a_byte(pair.lender, spoiled)
        account = account_of(got)
        assert ids(got) == expected
        assert account.mismatched_blocks >= 1
        assert "corrupted" in account.loan_failure
        assert account.moved_blocks == 4
        await pair.settled()

    async def test_a_drill_corrupts_as_many_arriving_blocks_as_it_was_told(self, pair: Pair) -> None:
        prompt = prompt_of(300, 14)
        expected = ids(await pair.lender.answer(named(prompt)))
        pair.borrower.send(CorruptReads(1))
        struck = await pair.borrowed(named(prompt))
        account = account_of(struck)
        assert ids(struck) == expected
        assert (account.moved_blocks, account.mismatched_blocks) == (0, 1)
        assert account.loan_failure == "block 0 arrived corrupted"
        whole = prompt_of(300, 15)  # the drill has no blocks left to strike
        expected = ids(await pair.lender.answer(named(whole)))
        got = await pair.borrowed(named(whole))
        account = account_of(got)
        assert ids(got) == expected
        assert (account.moved_blocks, account.mismatched_blocks) == (9, 0)
        await pair.settled()

    async def test_a_lender_that_refuses_costs_nothing_but_time(self, pair: Pair) -> None:
        prompt = prompt_of(200, 6)
        pair.lender.send(DrainLoans(True))
        got = await pair.borrowed(named(prompt))
        pair.lender.send(DrainLoans(False))
        assert account_of(got).loan_failure == TOLD_TO_STOP
        assert ids(got) == ids(await pair.lender.answer(named(prompt)))
        await pair.settled()

    @pytest.mark.parametrize("after_ms", [0, 2, 5, 10, 20, 40, 80, 160])
    async def test_a_cancel_at_any_moment_leaves_nothing_behind(self, pair: Pair, after_ms: int) -> None:
        requests = [named(prompt_of(300 + i, 7 + after_ms), 40) for i in range(3)]
        for request in requests:
            pair.borrower.send(lent_by(pair.lender, request))
        await asyncio.sleep(after_ms / 1e3)
        for request in requests:
            pair.borrower.send(Cancel(request.request_id))
        await pair.settled()

    async def test_a_borrower_that_vanishes_leaves_nothing_at_the_lender(self, pair: Pair) -> None:
        for after_ms in (0, 5, 30):
            request = named(prompt_of(350, 20 + after_ms))
            pair.borrower.send(lent_by(pair.lender, request))
            await asyncio.sleep(after_ms / 1e3)
            pair.lender.send(CutOffPeer(pair.borrower.name, 0.0))
            await pair.borrower.until(lambda request=request: pair.borrower.over(request))  # type: ignore[misc]
            await pair.settled()

    async def test_a_storm_leaves_no_wrong_token_and_no_block(self, pair: Pair) -> None:
        """Requests that borrow in both directions, cancels, loans that end early, and audits, at random."""
        dice, engines = random.Random(61), (pair.lender, pair.borrower)
        shared = prompt_of(150, 61)
        prompts = [shared[: dice.randrange(20, 150)] + prompt_of(dice.randrange(1, 120), 62 + i) for i in range(6)]
        alone = [ids(await pair.lender.answer(named(prompt, 16, ignore_eos=True))) for prompt in prompts]
        running: list[tuple[RealEngine, Generate, list[int]]] = []
        begun, cancelled, ended_early, num_audits = 0, set[str](), 0, Counter[RealEngine]()
        while begun < NUM_STORM_REQUESTS or running:
            running = [each for each in running if not each[0].over(each[1]) and each[1].request_id not in cancelled]
            if begun < NUM_STORM_REQUESTS and len(running) < 8:
                begun += 1
                number, (engine, other) = dice.randrange(len(prompts)), dice.sample(engines, 2)
                salt = dice.choice(["", "", f"salt {begun}"])
                request = named(prompts[number], dice.randrange(1, 17), ignore_eos=True)._replace(cache_salt=salt)
                engine.send(lent_by(other, request) if dice.random() < 0.7 else request)
                running.append((engine, request, alone[number]))
            if dice.random() < 0.3:
                engine = dice.choice(engines)
                engine.send(Audit(1))
                num_audits[engine] += 1
            if running and dice.random() < 0.2:
                engine, request, _ = dice.choice(running)
                cancelled.add(request.request_id)
                engine.send(Cancel(request.request_id))
            elif running and dice.random() < 0.2:
                ended_early += 1
                engine, other = dice.sample(engines, 2)
                engine.send(CutOffPeer(other.name, 0.0))
            for engine, request, expected in running:
                got = ids(engine.tokens.get(request.request_id, ()))
                assert got == expected[: len(got)]
            assert not any(isinstance(m, Rejected) and m.permanent for engine in engines for m in engine.said)
            retried = {m.request_id for engine in engines for m in engine.said if isinstance(m, Rejected)}
            cancelled |= retried  # no room just then: a router would place them again
            await asyncio.sleep(dice.choice([0, 0.001, 0.005, 0.02, 0.05]))
        assert cancelled
        assert ended_early
        for engine in engines:
            await engine.until(lambda engine=engine: len(audits_of(engine)) == num_audits[engine])  # type: ignore[misc]
            assert not [audit.fault for audit in audits_of(engine) if audit.fault]
            engine.said.clear()
        await pair.settled()

    async def test_several_choices_are_as_if_each_were_asked_alone(self, pair: Pair) -> None:
        prompt = prompt_of(100, 31)
        request = named(prompt, 10, n=3, temperature=1.0, seed=4)
        got = chosen(await pair.borrowed(request))
        assert sorted(got) == [0, 1, 2]
        assert got == chosen(await pair.lender.answer(named(prompt, 10, n=3, temperature=1.0, seed=4)))
        assert len({tuple(tokens) for tokens in got.values()}) > 1
        await pair.settled()

    @pytest.mark.parametrize("num_tokens", [32, 63, 200])
    async def test_a_request_without_output_leaves_all_full_blocks(self, pair: Pair, num_tokens: int) -> None:
        """Computed, then borrowed with the last block, then found."""
        prompt, blocks = prompt_of(num_tokens, 51), num_tokens // BLOCK

        async def filled(engine: RealEngine, lender: RealEngine | None = None) -> KvAccount:
            request = named(prompt, 0)
            engine.send(request if lender is None else lent_by(lender, request))
            await engine.until(lambda: any(m.request_id == request.request_id for m in ends(engine)))
            assert request.request_id not in engine.tokens
            return next(m.account for m in ends(engine) if m.request_id == request.request_id)

        def ends(engine: RealEngine) -> list[Filled]:
            return [message for message in engine.said if isinstance(message, Filled)]

        account = await filled(pair.lender)
        assert (account.computed_blocks, account.computed_tokens) == (blocks, blocks * BLOCK)
        account = await filled(pair.borrower, pair.lender)
        assert (account.moved_blocks, account.computed_blocks, account.computed_tokens) == (blocks, 0, 0)
        account = await filled(pair.borrower)
        assert (account.reused_blocks, account.computed_blocks) == (blocks, 0)
        got = await pair.borrower.answer(named([*prompt, 5]))
        assert account_of(got).reused_blocks == blocks
        assert ids(got) == ids(await pair.lender.answer(named([*prompt, 5])))
        await pair.settled()

    async def test_dropped_blocks_are_told_and_computed_again_and_others_stay(self, pair: Pair) -> None:
        prompt, other = prompt_of(160, 41), prompt_of(160, 42)
        engine = pair.lender
        expected = ids(await engine.answer(named(prompt)))
        await engine.answer(named(other))
        engine.said.clear()

        async def dropped(drop: CacheDrop) -> CacheInspected:
            engine.send(InspectCache(number := next(numbers), drop=drop))
            await engine.until(lambda: bool(found(number)))
            return found(number)[0]

        def found(number: int) -> list[CacheInspected]:
            return [m for m in engine.said if isinstance(m, CacheInspected) and m.query_id == number]

        inspected = await dropped(CacheDrop(prompt))
        keys = block_keys(root_key(engine.ready.model_fingerprint, ""), prompt, BLOCK)
        assert (inspected.dropped_in_pool, inspected.in_use, inspected.is_whole) == (len(keys), 0, True)
        again = await engine.answer(named(prompt))
        assert ids(again) == expected
        assert account_of(again).reused_blocks == 0
        assert account_of(await engine.answer(named(other))).reused_blocks == (len(other) - 1) // BLOCK
        events = [event for m in engine.said if isinstance(m, CacheChanged) for event in m.events]
        gone = [key for event in events if isinstance(event, Removed) for key in event.keys]
        assert set(gone) == set(keys)
        assert len(gone) == len(keys)

        caller = Caller(engine)
        assert len(await caller.blocks(prompt)) == len(keys)
        inspected = await dropped(CacheDrop(None))
        assert inspected.in_use == len(keys), "blocks of a loan stay"
        assert inspected.dropped_in_pool >= (len(other) - 1) // BLOCK
        caller.close()
        assert account_of(await engine.answer(named(prompt))).reused_blocks == (len(prompt) - 1) // BLOCK
        assert account_of(await engine.answer(named(other))).reused_blocks == 0
        refused = await dropped(CacheDrop(other, store=True))
        assert "no kv_store" in refused.refused
        assert refused.dropped_in_pool == 0
        await pair.settled()

    async def test_the_index_of_cached_blocks_uses_tandems_keys(self, pair: Pair) -> None:
        prompt = prompt_of(160, 33)
        await pair.lender.answer(named(prompt, 40))
        root = root_key(pair.lender.ready.model_fingerprint, "")
        keys = block_keys(root, prompt, BLOCK)
        pair.lender.said.clear()
        pair.lender.send(TakeSnapshot())
        await pair.lender.until(lambda: any(isinstance(m, CacheChanged) and m.snapshot for m in pair.lender.said))
        snapshots = [m for m in pair.lender.said if isinstance(m, CacheChanged) and m.snapshot]
        stored = {key: event.parent for event in snapshots[0].events if isinstance(event, Stored) for key in event.keys}
        assert [stored[key] for key in keys] == [root, *keys[:-1]]
