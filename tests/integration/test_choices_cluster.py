"""Choices and prompt log probabilities through real processes, and through the death of a decode worker.

The sim engine: its tokens, candidates and log probabilities are made of the KV it reads.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from protos import inference_pb2 as pb
from support.processes import busiest_decoder
from tandem.client import Client

VOCAB = 600
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 8.0, "max_prefill_tokens": 32, "kv_memory_mib": 4}


@pytest.fixture(scope="module")
def speaking_model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB, speaks=True)


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: pb.Finish | None = None


class Answer:
    """One request under way, by choice."""

    def __init__(self, client: Client, prompt: list[int], salt: str = "", **sampling: Any) -> None:
        self.choices: dict[int, Choice] = {}
        self.prompt_logprobs: list[float] = []
        self.last = pb.GenerateResponse()
        self._salt, self._sampling = salt, pb.Sampling(**{"max_tokens": 40, "ignore_eos": True} | sampling)
        self.task = asyncio.ensure_future(self._follow(client, prompt))

    async def _follow(self, client: Client, prompt: list[int]) -> None:
        call = client.generate(token_ids=prompt, sampling=self._sampling, cache_salt=self._salt, timeout_s=60)
        async for message in call:
            if message.prompt_logprobs:
                assert not any(choice.token_ids for choice in self.choices.values()), "before the first token"
                self.prompt_logprobs += [of.logprob for of in message.prompt_logprobs]
                continue
            choice = self.choices.setdefault(message.index, Choice())
            assert choice.finish is None
            choice.token_ids += message.token_ids
            choice.text += message.text
            if message.HasField("finish"):
                choice.finish = message.finish
            self.last = message

    async def ended(self) -> "Answer":
        await self.task
        for choice in self.choices.values():
            assert choice.finish.usage.completion_tokens == len(choice.token_ids)
            shared = choice.finish is self.last.finish or choice.finish == self.last.finish
            assert choice.finish.HasField("receipt") == (choice.finish.usage.prompt_tokens > 0) == shared
        return self

    async def reached(self, num_tokens: int) -> None:
        while sum(len(choice.token_ids) for choice in self.choices.values()) < num_tokens:
            assert not self.task.done()
            await asyncio.sleep(0.005)

    def heard(self) -> list[tuple[list[int], str, int]]:
        of = [self.choices[index] for index in sorted(self.choices)]
        return [(choice.token_ids, choice.text, choice.finish.reason if choice.finish else -1) for choice in of]


def prompt_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


async def test_choices_are_streamed_each_by_itself(speaking_model: Path, cluster_of: Any, audit: Any) -> None:
    async with cluster_of(speaking_model, **SIM) as cluster, Client(cluster.address) as client:
        one = await Answer(client, prompt_of(1, 100), temperature=0).ended()
        many = await Answer(client, prompt_of(1, 100), n=4, prompt_logprobs=0).ended()
        assert sorted(many.choices) == [0, 1, 2, 3]
        assert many.heard()[0] == one.heard()[0]
        assert len({tuple(choice.token_ids) for choice in many.choices.values()}) == 4
        assert len(many.prompt_logprobs) == 99
        assert many.last.finish.receipt.kv.reused_blocks == 0, "it computes its whole prompt"
        # A stop string ends one choice; the others go on.
        stop = many.choices[2].text[60:68]
        stopped = await Answer(client, prompt_of(1, 100), n=4, stop=[stop]).ended()
        assert stopped.choices[2].text == many.choices[2].text[: many.choices[2].text.index(stop)]
        assert stopped.choices[2].finish.stop_match == stop
        assert max(len(choice.token_ids) for choice in stopped.choices.values()) == 40
        left = Answer(client, prompt_of(2, 50), n=8, max_tokens=2000)
        await left.reached(20)
        left.task.cancel()
        await audit([worker.address for worker in cluster.workers])


async def test_they_survive_their_decode_worker(speaking_model: Path, cluster_of: Any, audit: Any) -> None:
    options = {"n": 3, "prompt_logprobs": 0, "max_tokens": 120}
    async with cluster_of(speaking_model, decode=2, **SIM) as cluster, Client(cluster.address) as client:
        expected = await Answer(client, prompt_of(3, 70), salt="undisturbed", **options).ended()
        early = expected.choices[0].token_ids[5]
        ends = {"stop_token_ids": [early]}
        expected = await Answer(client, prompt_of(3, 70), salt="undisturbed 2", **options, **ends).ended()
        answers = [Answer(client, prompt_of(3, 70), salt=str(number), **options, **ends) for number in range(4)]
        await asyncio.gather(*(answer.reached(60) for answer in answers))
        assert all(answer.choices[0].finish is not None for answer in answers), "one is finished by then"
        victim, num_lost = await busiest_decoder(cluster)
        victim.process.kill()
        for answer in answers:
            await answer.ended()
            assert answer.heard() == expected.heard()
            assert answer.prompt_logprobs == expected.prompt_logprobs
        attempts = [answer.last.finish.receipt.placement.attempt for answer in answers]
        assert attempts.count(2) == num_lost > 0
        await victim.process.wait()
        await audit([worker.address for worker in cluster.decode if worker is not victim])
