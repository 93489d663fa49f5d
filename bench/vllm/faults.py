"""Five faults, again and again, on both systems by the same script: the ends of streams, and when blocks were free."""

import asyncio
import os
import random
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.support.report import Bar
from bench.vllm.compared import VLLM
from bench.vllm.faulty import Side, Tandem, Vllm, settled

ROUNDS = int(os.environ.get("TANDEM_VLLM_FAULTS", "20"))
KILLS_OF_VLLM = 3
"""Rounds with a restart of a vLLM server, each a minute."""
PROMPT, OUTPUT, VOCAB = 640, 48, 2048
DEADLINE_S, FREE_S = 30.0, 40.0
STOPPED_S = 12.0
"""Seconds for which a peer stands still."""


@dataclass
class Outcome:
    """Results of one fault on one side."""

    rounds: int = 0
    lost: int = 0
    wrong: int = 0
    late: int = 0
    free_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        known = [seconds for seconds in self.free_s if seconds != float("inf")]
        return {
            "rounds": self.rounds,
            "lost": self.lost,
            "wrong": self.wrong,
            "late": self.late,
            "free_s_median": statistics.median(known) if known else None,
            "free_s_max": max(self.free_s, default=None),
        }


class Rounds:
    """Rounds of one side. Prompts are new each time; each one's undisturbed text is taken before or afterwards."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._rng = random.Random(9)
        self._count = 0

    def prompt(self) -> list[int]:
        return self._rng.choices(range(3, VOCAB), k=PROMPT)

    async def read(self, prompt: Sequence[int], salt: str, at_token: tuple[int, asyncio.Event] | None = None) -> str:
        """Return the whole text; set the event when so many tokens have come."""
        pieces: list[str] = []
        async for text in self._side.stream(prompt, OUTPUT, salt):
            pieces.append(text)
            if at_token is not None and len(pieces) == at_token[0]:
                at_token[1].set()
        return "".join(pieces)

    async def expected(self, prompt: Sequence[int]) -> str:
        self._count += 1
        return await self.read(prompt, f"undisturbed {self._count}")

    async def judged(self, reading: "asyncio.Task[str]", expected: str, outcome: Outcome) -> None:
        """Count how the stream ended."""
        outcome.rounds += 1
        try:
            async with asyncio.timeout(DEADLINE_S):
                text = await reading
        except TimeoutError:
            outcome.late += 1
        except Exception:
            outcome.lost += 1
        else:
            outcome.wrong += text != expected

    async def kill(self, role: str, rounds: int) -> Outcome:
        """Kill a worker: the prefill worker in mid-prompt, the decode worker in mid-stream."""
        outcome = Outcome()
        for _ in range(rounds):
            prompt = self.prompt()
            expected = await self.expected(prompt)
            reached = asyncio.Event()
            reading = asyncio.ensure_future(self.read(prompt, f"{role} {self._count}", (5, reached)))
            if role == "decode":
                await asyncio.wait([reading, asyncio.ensure_future(reached.wait())], return_when="FIRST_COMPLETED")
            else:
                await asyncio.sleep(self._rng.uniform(0.02, 0.25))
            self._side.signal(role, signal.SIGKILL)
            await self.judged(reading, expected, outcome)
            outcome.free_s.append(await settled(self._side, FREE_S))
            await self._side.start_again(role)
        return outcome

    async def flip(self, rounds: int) -> Outcome:
        """Flip a byte between computing and reading."""
        outcome = Outcome()
        for _ in range(rounds):
            prompt = self.prompt()
            expected = await self.expected(prompt)
            await self.judged(asyncio.ensure_future(self._side.flipped(prompt, OUTPUT)), expected, outcome)
            outcome.free_s.append(await settled(self._side, FREE_S))
        return outcome

    async def cancel(self, rounds: int) -> Outcome:
        """Leave as a client, at any moment of prompt or stream."""
        outcome = Outcome()
        for _ in range(rounds):
            self._count += 1
            reading = asyncio.ensure_future(self.read(self.prompt(), f"cancel {self._count}"))
            await asyncio.sleep(self._rng.uniform(0.0, 0.6))
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            outcome.rounds += 1
            outcome.free_s.append(await settled(self._side, FREE_S))
        return outcome

    async def stop(self, rounds: int) -> Outcome:
        """Let the prefill worker stand still in mid-prompt."""
        outcome = Outcome()
        for _ in range(rounds):
            prompt = self.prompt()
            expected = await self.expected(prompt)
            reading = asyncio.ensure_future(self.read(prompt, f"stop {self._count}"))
            await asyncio.sleep(self._rng.uniform(0.02, 0.2))
            self._side.signal("prefill", signal.SIGSTOP)
            stopped_at = asyncio.get_running_loop().time()
            free = asyncio.ensure_future(settled(self._side, FREE_S))
            try:
                await asyncio.wait([reading], timeout=STOPPED_S)
            finally:
                left_s = STOPPED_S - (asyncio.get_running_loop().time() - stopped_at)
                await asyncio.sleep(max(0.0, left_s))
                self._side.signal("prefill", signal.SIGCONT)
            await self.judged(reading, expected, outcome)
            outcome.free_s.append(await free)
            await settled(self._side, FREE_S)
        return outcome


async def measure_faults(cores: Sequence[int], scratch: Path, console: Console) -> dict[str, Any]:
    """Run all faults on Tandem, then on vLLM's pair."""
    figures: dict[str, Any] = {}
    for name in ("tandem", "vllm"):
        kills = ROUNDS if name == "tandem" else min(ROUNDS, KILLS_OF_VLLM)
        side = Tandem(cores) if name == "tandem" else Vllm(VLLM, cores, scratch / "faults")
        figures[name] = {}
        async with side:
            rounds = Rounds(side)
            await rounds.expected(rounds.prompt())
            parts = {
                "a flipped byte": rounds.flip(ROUNDS),
                "a client that leaves": rounds.cancel(ROUNDS),
                "kill -9 of decode in mid-stream": rounds.kill("decode", kills),
                "kill -9 of prefill in mid-prompt": rounds.kill("prefill", kills),
                "prefill stands still": rounds.stop(kills),
            }
            for part, work in parts.items():
                outcome = await work
                figures[name][part] = outcome.summary()
                console.print(f"{name}, {part}:", figures[name][part])
    return figures


def fault_bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars of Tandem's faults; the other system's are figures."""
    found = figures["tandem"]
    bars = [
        Bar(f"five faults: streams that were {what}", sum(each[what] for each in found.values()), 0)
        for what in ("lost", "wrong", "late")
    ]
    silent = found["prefill stands still"]["free_s_max"]
    dead = max(each["free_s_max"] for name, each in found.items() if name != "prefill stands still")
    bars.append(Bar("all blocks free after a death, a cancel or a flip, s at most", dead, 1.0))
    return [*bars, Bar("all blocks free beside a silent peer, s at most", silent, 10.0)]
