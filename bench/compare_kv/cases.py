"""Cases of the public reports, each a coroutine that disturbs one request, and the judgement of its end."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.compare_kv.sides import (
    BEGUN_BYTES,
    BLOCK,
    HANG_S,
    LEASE_S,
    POOL_BLOCKS,
    Answer,
    Side,
    Truth,
    random_prompt,
)

FLOOD_TOKENS, FLOOD_PROMPTS = 28 * BLOCK, 5
"""Prompts that fill the pool one and a half times."""
FREE_WITHIN_S = 15.0
"""Seconds after a case until nothing may be held: more than the lease with its longest extension."""


@dataclass(slots=True)
class Trial:
    """One run of a case on one side."""

    side: Side
    rng: random.Random
    fault_at: float = 0.0
    """Moment of a fault in mid-transfer; 0 for faults before the request."""
    notes: dict[str, Any] = field(default_factory=dict)

    async def flood(self) -> None:
        """Have both compute so much else that no block keeps what it had."""
        for _ in range(FLOOD_PROMPTS):
            await self.side.compute(random_prompt(self.rng, FLOOD_TOKENS))

    async def interrupted(self, prompt: list[int], fault: Callable[[], Awaitable[object]]) -> Answer:
        """Run the second phase over a slow link, and cause the fault when the transfer has begun."""
        reference = await self.side.prefill(prompt)
        lender = self.side.lender
        lender.throttle(True)
        before = lender.sent_bytes()
        asked = asyncio.ensure_future(self.side.decode(prompt, reference))
        while lender.sent_bytes() - before < BEGUN_BYTES and not asked.done():  # noqa: ASYNC110 - a counter of the kernel
            await asyncio.sleep(0.002)
        if asked.done():
            self.notes["fault came too late"] = True
        else:
            self.fault_at = time.monotonic()
        await fault()
        return await asked


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of one trial."""

    status: str
    """HTTP status, `closed`, `none`, or `prepared` where a request before the measured one failed."""
    equal: bool
    """Whether the tokens are those of the same prompt on one server; only with status 200."""
    seconds: float
    """Seconds from the request, or from a later fault, to the answer's end."""
    serves: bool
    """Whether the next prompt, undisturbed, has an answer of equal tokens, ended servers having been started again."""
    held: Mapping[str, float | str]
    """Rest that each node still holds after FREE_WITHIN_S, or why it cannot tell; empty when all is free."""
    free_s: float
    """Seconds after the next request until nothing was held."""
    notes: Mapping[str, Any]

    @property
    def crashed(self) -> bool:
        return "crashed" in self.notes

    @property
    def detected(self) -> bool:
        receipt = self.notes.get("receipt", {})
        return bool(receipt.get("mismatched") or receipt.get("mismatched_blocks"))

    @property
    def wrong(self) -> bool:
        return self.status == "200" and not self.equal

    @property
    def hung(self) -> bool:
        return self.status == "none" or self.seconds > HANG_S

    @property
    def lost(self) -> bool:
        return self.status != "200"


Disturb = Callable[[Trial, list[int]], Awaitable[Answer]]
Mutate = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
"""Function of the right reference and of one to another prompt, that returns the reference to be sent."""


@dataclass(frozen=True, slots=True)
class Case:
    """Way for KV to go wrong."""

    title: str
    disturb: Disturb
    loses_borrower: bool = False
    """Whether the process that has the client's connection is killed, so that no answer can come."""


def mutated(mutate: Mutate) -> Disturb:
    async def disturb(trial: Trial, prompt: list[int]) -> Answer:
        other = await trial.side.prefill(random_prompt(trial.rng))
        return await trial.side.decode(prompt, mutate(await trial.side.prefill(prompt), other))

    return disturb


def of_nobody(name: str) -> str:
    """Return a name of the same form that nobody has."""
    return name.translate(str.maketrans("123456789", "234567891"))


def beyond(blocks: Any) -> Any:
    """Return block ids that no pool of this size has."""
    return [beyond(each) for each in blocks] if isinstance(blocks, Sequence) else blocks + 10 * POOL_BLOCKS


async def used_twice(trial: Trial, prompt: list[int]) -> Answer:
    other = random_prompt(trial.rng)
    reference = await trial.side.prefill(other)
    await trial.side.decode(other, dict(reference))
    return await trial.side.decode(prompt, reference)


async def stale(trial: Trial, prompt: list[int]) -> Answer:
    reference = await trial.side.prefill(prompt)
    await trial.side.decode(prompt, dict(reference))
    await trial.flood()
    return await trial.side.decode(prompt, reference)


async def lease_over(trial: Trial, prompt: list[int]) -> Answer:
    reference = await trial.side.prefill(prompt)
    await asyncio.sleep(LEASE_S + 2)
    await trial.flood()
    return await trial.side.decode(prompt, reference)


async def killed_before(trial: Trial, prompt: list[int]) -> Answer:
    reference = await trial.side.prefill(prompt)
    await trial.side.lender.kill()
    return await trial.side.decode(prompt, reference)


async def killed_midway(trial: Trial, prompt: list[int]) -> Answer:
    return await trial.interrupted(prompt, trial.side.lender.kill)


async def stopped(trial: Trial, prompt: list[int]) -> Answer:
    """Stop the lender until the answer is there, or the client gives up."""
    reference = await trial.side.prefill(prompt)
    trial.side.lender.signal(signal.SIGSTOP)
    try:
        return await trial.side.decode(prompt, reference)
    finally:
        trial.side.lender.signal(signal.SIGCONT)


async def restarted(trial: Trial, prompt: list[int]) -> Answer:
    reference = await trial.side.prefill(prompt)
    await trial.side.lender.kill()
    await trial.side.restart(trial.side.lender)
    return await trial.side.decode(prompt, reference)


async def flipped_there(trial: Trial, prompt: list[int]) -> Answer:
    """Flip a bit of what the lender has computed and the borrower does not have yet."""
    side = trial.side
    await side.lender.damage("mark")
    reference = await side.prefill(prompt)
    if side.one_phase:
        await side.decode(prompt, reference)
        await side.restart(side.borrower)
    trial.notes["struck"] = await side.lender.damage(f"flip {trial.rng.random()}")
    return await side.decode(prompt, reference)


async def flipped_on_arrival(trial: Trial, prompt: list[int]) -> Answer:
    reference = await trial.side.prefill(prompt)
    await trial.side.borrower.damage(f"arm {trial.rng.random()}")
    answer = await trial.side.decode(prompt, reference)
    trial.notes["struck"] = await trial.side.borrower.damage("tell")
    return answer


async def borrower_killed(trial: Trial, prompt: list[int]) -> Answer:
    return await trial.interrupted(prompt, trial.side.borrower.kill)


async def cut(trial: Trial, prompt: list[int]) -> Answer:
    """Drop all packets between the two, in mid-transfer, until the answer is there or the client gives up."""
    nodes = (trial.side.lender, trial.side.borrower)

    async def drop() -> None:
        for node, other in zip(nodes, reversed(nodes), strict=True):
            node.namespace.drop_from([other.namespace.ip])

    try:
        return await trial.interrupted(prompt, drop)
    finally:
        for node in nodes:
            node.namespace.drop_from([])


async def undisturbed(trial: Trial, prompt: list[int]) -> Answer:
    return await trial.side.decode(prompt, await trial.side.prefill(prompt))


CASES: Mapping[str, Case] = {
    "none": Case("nothing goes wrong", undisturbed),
    "unknown-engine": Case(
        "reference to an engine that is gone",
        mutated(lambda right, _: right | {"remote_engine_id": of_nobody(right["remote_engine_id"])}),
    ),
    "unknown-request": Case(
        "reference to a request that is unknown",
        mutated(lambda right, _: right | {"remote_request_id": of_nobody(right["remote_request_id"])}),
    ),
    "out-of-range": Case(
        "block ids out of range",
        mutated(lambda right, _: right | {"remote_block_ids": beyond(right.get("remote_block_ids") or [[0]])}),
    ),
    "other-blocks": Case(
        "another prompt's blocks",
        mutated(lambda right, other: right | {"remote_block_ids": other.get("remote_block_ids")}),
    ),
    "used-twice": Case("reference used twice, with another prompt", used_twice),
    "stale": Case("reference used twice, after the lender reused its blocks", stale),
    "lease-over": Case(f"lease of {LEASE_S} s over, then blocks reused", lease_over),
    "killed-before": Case("lender killed before the transfer", killed_before),
    "killed-midway": Case("lender killed in mid-transfer", killed_midway),
    "stopped": Case("lender stopped, and continued afterwards", stopped),
    "restarted": Case("lender restarted at the same address between the phases", restarted),
    "flipped-there": Case("one bit flipped in the lender's memory", flipped_there),
    "flipped-on-arrival": Case("one bit flipped on arrival", flipped_on_arrival),
    "borrower-killed": Case("borrower killed in mid-transfer", borrower_killed, loses_borrower=True),
    "cut": Case("network cut in mid-transfer, and healed afterwards", cut),
}


async def run_case(case: Case, side: Side, seed: str, truth: Truth) -> Outcome:
    """Run a case once, and bring the side back to a state in which it serves."""
    trial = Trial(side, random.Random(seed))
    prompt, expected = await truth(trial.rng)
    after, expected_after = await truth(trial.rng)
    try:
        answer = await case.disturb(trial, prompt)
    except RuntimeError as error:  # a request of its preparation failed
        answer = Answer("prepared", (), str(error))
    side.lender.throttle(False)
    if crashed := await side.restart_ended():
        trial.notes["crashed"] = crashed
    undisturbed_answer = await _after(side, after)
    serves = undisturbed_answer.status == "200" and undisturbed_answer.tokens == expected_after
    if not serves:
        trial.notes["afterwards"] = f"{undisturbed_answer.status}: {undisturbed_answer.error[:200]}"
    if answer.status != "200":
        trial.notes["said"] = answer.error[:200]
    if receipt := side.receipt_of(answer):
        trial.notes["receipt"] = receipt
    waited_from = time.monotonic()
    held = await _held(side)
    free_s = time.monotonic() - waited_from
    if not serves or held:
        await side.restart(side.lender, side.borrower)
    seconds = answer.ended_at - max(answer.sent_at, trial.fault_at)
    return Outcome(answer.status, answer.tokens == expected, seconds, serves, held, free_s, trial.notes)


async def _after(side: Side, prompt: list[int]) -> Answer:
    try:
        return await side.decode(prompt, await side.prefill(prompt))
    except RuntimeError as error:
        return Answer("prefill", (), str(error))


async def _held(side: Side) -> dict[str, float | str]:
    """Return what nodes hold, when nothing is held any more or FREE_WITHIN_S is over."""
    held: dict[str, float | str] = {}
    over_at = time.monotonic() + FREE_WITHIN_S
    while True:
        held.clear()
        for role, node in (("lender", side.lender), ("borrower", side.borrower)):
            try:
                if amount := await node.held():
                    held[role] = amount
            except Exception as error:  # whatever it is, it is told
                held[role] = str(error)[:200]
        if not held or time.monotonic() > over_at:
            return held
        await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Row:
    """All trials of a case on one side."""

    trials: int
    statuses: Mapping[str, int]
    wrong: int
    lost: int
    hung: int
    slowest_s: float
    broken: int
    """Trials after which an undisturbed request failed."""
    crashed: int
    """Trials in which a server ended that nobody had killed."""
    held: int
    """Trials after which something was still held."""
    free_s: float
    """Longest time until nothing was held."""
    detected: int
    """Trials whose receipt tells of a block with a wrong fingerprint."""

    def text(self) -> str:
        """Return the row's cell of the table."""
        said = [" ".join(f"{status} x {count}" for status, count in self.statuses.items())]
        said += [f"wrong {self.wrong}"] if self.wrong else []
        said += [f"detected {self.detected}"] if self.detected else []
        said += [f"hung {self.hung}"] if self.hung else []
        said += [f"broken {self.broken}"] if self.broken else []
        said += [f"crashed {self.crashed}"] if self.crashed else []
        said += [f"held {self.held}"] if self.held else []
        return ", ".join([*said, f"{self.slowest_s:.1f} s, free {self.free_s:.1f} s"])


def row_of(case: Case, outcomes: Sequence[Outcome]) -> Row:
    """Sum up a case; with its borrower killed, the client's own request is neither lost nor hung."""
    counted = [] if case.loses_borrower else outcomes
    statuses = dict.fromkeys(sorted(outcome.status for outcome in outcomes), 0)
    for outcome in outcomes:
        statuses[outcome.status] += 1
    return Row(
        trials=len(outcomes),
        statuses=statuses,
        wrong=sum(outcome.wrong for outcome in outcomes),
        lost=sum(outcome.lost for outcome in counted),
        hung=sum(outcome.hung for outcome in counted),
        slowest_s=max((outcome.seconds for outcome in outcomes), default=0.0),
        broken=sum(not outcome.serves for outcome in outcomes),
        crashed=sum(outcome.crashed for outcome in outcomes),
        held=sum(bool(outcome.held) for outcome in outcomes),
        free_s=max((outcome.free_s for outcome in outcomes), default=0.0),
        detected=sum(outcome.detected for outcome in outcomes),
    )


def figures_of(case: Case, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return a case's figures, for the JSON."""
    row = row_of(case, outcomes)
    return asdict(row) | {"title": case.title, "outcomes": [asdict(outcome) for outcome in outcomes]}
