"""Streams that go on at another router: their own is killed, stopped by an operator, or cut off."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import Incompatible, InvalidRequest, RevisionGone, ServiceError, Unavailable
from protos import inference_pb2 as pb
from support.fault_rounds import ROUNDS
from support.processes import until
from support.refusals import refusal_of
from support.rollouts import Revision, Rollout
from support.sim_cluster_model import SimClusterModel
from support.sim_directories import write_sim_model, write_tokenizer
from tandem.client import Client, GenerateRequest
from tandem.local.local_cluster import stop_process

VOCAB = 600
STREAMS = 20
WORKER: dict[str, Any] = {"engine": "sim", "sim_step_ms": 4.0, "kv_memory_mib": 16, "drain_s": 1.0}


@pytest.fixture
def story(tmp_path: Path) -> Path:
    model = write_sim_model(tmp_path / "story", VOCAB)
    write_tokenizer(model, VOCAB)
    return model


class Answer:
    """What a client has of a stream."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.finishes: dict[int, pb.Finish] = {}
        self.origins: list[pb.Origin] = []
        self.num_prompt_logprobs = 0

    def add(self, piece: pb.GenerateResponse) -> None:
        self.token_ids.setdefault(piece.index, []).extend(piece.token_ids)
        self.text[piece.index] = self.text.get(piece.index, "") + piece.text
        self.num_prompt_logprobs += len(piece.prompt_logprobs)
        if piece.HasField("origin"):
            self.origins.append(piece.origin)
        if piece.HasField("finish"):
            assert piece.index not in self.finishes
            self.finishes[piece.index] = piece.finish


async def whole(client: Client, request: GenerateRequest, answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    async for piece in client.send(request, 60.0):
        answer.add(piece)
    return answer


def request_of(prompt: list[int], length: int, **sampling: Any) -> GenerateRequest:
    options = pb.Sampling(**({"max_tokens": length, "ignore_eos": True, "temperature": 0.0} | sampling))
    return GenerateRequest(token_ids=prompt, sampling=options)


async def test_streams_of_a_killed_router_go_on_at_another(story: Path) -> None:
    """`TANDEM_REAL_FAULTS` sets the number of kills."""
    rng, model = random.Random(5), SimClusterModel(story)
    num_continued = 0
    async with Rollout(WORKER, {}) as site, Client(*site.addresses) as one, Client(*site.addresses[::-1]) as other:
        await site.start(Revision(story, {}), 2)
        for _ in range(ROUNDS):
            prompts = [rng.choices(range(VOCAB), k=rng.randint(20, 60)) for _ in range(STREAMS)]
            requests = [
                request_of(prompt, rng.randint(200, 700), n=rng.choice([1, 1, 2]), **rng.choice([{}, {"logprobs": 2}]))
                for prompt in prompts
            ]
            answers = [Answer() for _ in requests]
            streams = [
                asyncio.ensure_future(whole((one, other)[number % 2], request, answer))
                for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
            ]

            async def most_have_begun() -> bool:
                return sum(bool(answer.origins) for answer in answers) > STREAMS // 2  # noqa: B023

            await until(most_have_begun, "most streams have begun")
            await asyncio.sleep(rng.random() * 0.3)  # any further moment will do
            which = site.addresses.index(one.address)
            site.routers[which].process.kill()
            await site.routers[which].process.wait()
            site.routers[which] = await site.start_router(which, Revision(story, {}))
            await asyncio.gather(*streams)
            for request, answer in zip(requests, answers, strict=True):
                length, num_choices = request.sampling.max_tokens, request.sampling.n
                expected = model.answer(request.token_ids, length)
                assert answer.token_ids[0] == expected
                assert [len(answer.token_ids[index]) for index in range(num_choices)] == [length] * num_choices
                assert len(answer.finishes) == num_choices
                assert answer.finishes[0].usage.completion_tokens == length
                assert len(set(map(str, answer.origins))) == 1
                num_continued += len(answer.origins) > 1
    print(f"\n{ROUNDS} kills of a router under {STREAMS} streams each: {num_continued} continued, 0 lost, 0 different")
    assert num_continued


async def test_a_router_that_stops_hands_its_long_streams_to_its_clients(story: Path) -> None:
    model = SimClusterModel(story)
    async with Rollout(WORKER, {"drain_s": 0.1}) as site, Client(*site.addresses) as client:
        await site.start(Revision(story, {}), 1)
        prompt = list(range(40))
        stream, answer = client.send(request_of(prompt, 500), 60.0), Answer()
        answer.add(await anext(stream))
        assert await stop_process(site.routers[0].process, 30.0) is None
        async for piece in stream:
            answer.add(piece)
        assert answer.token_ids[0] == model.answer(prompt, 500)
        with pytest.raises(Unavailable):
            async with Client(site.addresses[0]) as alone:
                await whole(alone, request_of(prompt, 5))


async def test_any_client_can_continue_a_stream_and_is_told_why_it_cannot(story: Path) -> None:
    """By the field of the request that other languages have, too."""
    async with Rollout(WORKER, {}) as site, Client(site.addresses[0]) as client:
        await site.start(Revision(story, {}), 1)
        text = "word1 word2 word3 word4"
        asked = GenerateRequest(text=text, sampling=pb.Sampling(max_tokens=60, temperature=0, ignore_eos=True, n=2))
        full = await whole(client, asked)
        origin = full.origins[0]
        assert origin.model == "story"

        def resumed(num_tokens: int, **changes: Any) -> GenerateRequest:
            request = GenerateRequest()
            request.CopyFrom(asked)
            # Text lags behind tokens: the router completes it.
            tokens, said = full.token_ids[0][:num_tokens], full.text[0][: num_tokens // 2]
            choices = [pb.ResumedChoice(index=0, token_ids=tokens, text=said), pb.ResumedChoice(index=1, finished=True)]
            fields: dict[str, Any] = {"origin": origin, "choices": choices} | changes
            request.resume.CopyFrom(pb.Resume(**fields))
            return request

        rest = await whole(client, resumed(25))
        assert rest.token_ids == {0: full.token_ids[0][25:]}
        assert rest.text[0] == full.text[0][12:]
        assert rest.finishes[0].usage.completion_tokens == 60
        assert rest.origins == full.origins

        def choice(**fields: Any) -> dict[str, Any]:
            return {"choices": [pb.ResumedChoice(**fields)]}

        other = pb.Origin(model="story", revision="00" * 16, prompt=origin.prompt)
        longer = pb.Origin(model="story", revision=origin.revision, prompt=b"x" * 16)
        cases: list[tuple[dict[str, Any], type[ServiceError], str]] = [
            ({"origin": other}, RevisionGone, ""),
            ({"origin": longer}, Incompatible, "resume.origin.prompt"),
            ({"origin": pb.Origin(revision="zz")}, InvalidRequest, "resume.origin.revision"),
            (choice(index=2), InvalidRequest, "resume.choices.0.index"),
            ({"choices": [pb.ResumedChoice(), pb.ResumedChoice()]}, InvalidRequest, "resume.choices.1.index"),
            (choice(token_ids=[VOCAB]), InvalidRequest, "resume.choices.0.token_ids"),
            (choice(token_ids=[1] * 60), InvalidRequest, "resume.choices.0.token_ids"),
            ({"choices": [pb.ResumedChoice(index=i, finished=True) for i in (0, 1)]}, InvalidRequest, "resume.choices"),
            ({"prompt_logprobs": 1}, InvalidRequest, "resume.prompt_logprobs"),
        ]
        for changes, kind, field in cases:
            with refusal_of(field, kind):
                await whole(client, resumed(25, **changes))
        request = resumed(5)
        request.sampling.CopyFrom(pb.Sampling(temperature=1))
        with refusal_of("sampling.seed"):
            await whole(client, request)
