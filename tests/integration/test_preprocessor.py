"""A preprocessor over gRPC: processing, leases of blobs, tenants, and children that die or hang."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from cluster.errors import InvalidRequest, Overloaded, Unavailable, UnknownBlob, UnknownModel
from cluster.network.rpc import channel
from cluster.network.tls import Credentials, File, MemberIdentity
from cluster.process.tree import descendants
from conftest import ModelFactory
from protos import preprocess_pb2 as pb
from support.certificates import Authority, Issued
from support.media_files import picture
from support.preprocessors import Caller, preprocessor, request_of
from support.processes import until
from support.refusals import refusal_of

VOCAB = 400
PLACE = VOCAB - 1
"""Placeholder of a picture, for a sim model without a tokenizer."""
PROMPT = [1, 2, PLACE, 3]


@pytest.fixture
def sim(sim_model: ModelFactory) -> Path:
    return sim_model(VOCAB)


async def test_a_prompt_is_expanded_and_its_blobs_can_be_fetched(sim: Path) -> None:
    first, second = picture(1), picture(2)
    async with preprocessor(model=sim) as (caller, role):
        described = await caller.describe(sim.name)
        assert described["image"].placeholder == "<image>"
        async with caller.leased(request_of([7, PLACE, 8, PLACE], first, second)) as reply:
            items = reply.items
            assert [items[0].offset, items[1].offset] == [1, 2 + items[0].length]
            assert reply.prompt_token_ids == [7, *[PLACE] * items[0].length, 8, *[PLACE] * items[1].length]
            assert {item.address for item in items} == {role.address}
            assert list((await caller.fetch(items)).values()) == [first, second]
        again = await caller.process(request_of(PROMPT, first, model=sim.name))
        assert again.items[0].identifier == items[0].identifier
        salted = await caller.process(request_of(PROMPT, first, cache_salt="a"))
        assert salted.items[0].identifier != items[0].identifier
        assert len(salted.items[0].identifier) == 16


async def test_refusals_name_the_file(sim: Path) -> None:
    good = picture()
    async with preprocessor(model=sim, max_items=2, max_item_mib=1) as (caller, _):
        for request, field in (
            (request_of(PROMPT), "media"),
            (request_of(PROMPT, good, good, good), "media"),
            (request_of(PROMPT, good, b"\x89PNG" + b"0" * (1 << 20)), "media[1]"),
            (request_of([PLACE, PLACE], good, b"<svg/>"), "media[1]"),
            (request_of([PLACE, PLACE], good, ""), "media[1]"),
            (request_of([1], good), "media[0]"),
            (request_of([PLACE, PLACE], good), "media[0]"),
            (request_of(PROMPT, "data:image/png;base64,!!"), "media[0]"),
            (request_of(PROMPT, "https://example.org/a.png"), "media[0]"),
            (request_of(PROMPT, "ftp://example.org/a.png"), "media[0]"),
        ):
            with refusal_of(field):
                await caller.process(request)
        wrong_kind = request_of(PROMPT, good)
        wrong_kind.media[0].kind = "smell"
        with pytest.raises(InvalidRequest, match=r"media\[0\].kind"):
            await caller.process(wrong_kind)
        with pytest.raises(UnknownModel):
            await caller.process(request_of(PROMPT, good, model="other"))
        with pytest.raises(UnknownModel):
            await caller.describe("other")
        with pytest.raises(UnknownBlob):
            await caller.fetch([pb.ProcessReply().items.add(identifier=b"0" * 16)])
        assert (await caller.process(request_of(PROMPT, good))).items


async def test_blobs_stay_while_a_stream_is_open_and_then_until_there_is_no_room(sim: Path) -> None:
    large = [b"BM" + bytes([number]) * (600 << 10) for number in range(4)]
    async with preprocessor(model=sim, blob_memory_mib=1) as (caller, _):
        async with caller.leased(request_of(PROMPT, large[0])) as first:
            others = [await caller.process(request_of(PROMPT, large[1]))]
            assert list((await caller.fetch(first.items)).values()) == [large[0]]
            async with caller.leased(request_of(PROMPT, large[2], tenant="b")):
                others.append(await caller.process(request_of(PROMPT, large[3], tenant="c")))
                with pytest.raises(Overloaded):  # running requests use all memory, and this tenant has its part
                    await caller.process(request_of(PROMPT, large[1]))
                assert list((await caller.fetch(first.items)).values()) == [large[0]]
            for gone in others:
                with pytest.raises(UnknownBlob):
                    await caller.fetch(gone.items)

        async def has_room() -> bool:
            try:
                await caller.process(request_of(PROMPT, large[1]))
            except Overloaded:
                return False
            return True

        await until(has_room, "streams that ended give back their memory")


async def test_a_killed_child_costs_no_request_and_is_started_again(sim: Path) -> None:
    async with preprocessor(model=sim, processes=2) as (caller, role):
        before = set(descendants(role.pid))
        assert len(before) == 2
        running = [asyncio.ensure_future(caller.process(request_of(PROMPT, picture(seed)))) for seed in range(20)]
        await running[0]
        os.kill(min(before), signal.SIGKILL)
        assert all(reply.items for reply in await asyncio.gather(*running))

        async def started_again() -> bool:
            now = set(descendants(role.pid))
            return len(now) == 2 and now != before

        await until(started_again, "another child is started")
        assert (await caller.process(request_of(PROMPT, picture()))).items


async def test_a_child_that_hangs_is_ended_and_names_its_file(sim: Path) -> None:
    async with preprocessor(model=sim, processes=1, item_limit_s=0.5) as (caller, role):
        (child,) = descendants(role.pid)
        os.kill(child, signal.SIGSTOP)
        with refusal_of("media[0]", match="longer than"):
            await caller.process(request_of(PROMPT, picture()))
        assert (await caller.process(request_of(PROMPT, picture()))).items
        assert descendants(role.pid) != [child]


async def test_a_tenant_whose_files_hang_leaves_a_child_to_others(sim: Path) -> None:
    async with preprocessor(model=sim, processes=2, item_limit_s=60) as (caller, role):
        stopped, _ = descendants(role.pid)
        os.kill(stopped, signal.SIGSTOP)
        hanging = [
            asyncio.ensure_future(caller.process(request_of(PROMPT, picture(seed), tenant="slow"))) for seed in range(9)
        ]
        await asyncio.wait(hanging, timeout=1.0)
        replies = [await caller.process(request_of(PROMPT, picture(seed), tenant="quick")) for seed in range(3)]
        assert all(reply.items for reply in replies)
        os.kill(stopped, signal.SIGCONT)
        assert all(reply.items for reply in await asyncio.gather(*hanging))


async def test_requests_of_callers_that_left_hold_nothing(sim: Path) -> None:
    async with preprocessor(model=sim, processes=1) as (caller, role):
        (child,) = descendants(role.pid)
        os.kill(child, signal.SIGSTOP)
        leaving = [asyncio.ensure_future(caller.process(request_of(PROMPT, picture(seed)))) for seed in range(9)]
        await asyncio.wait(leaving, timeout=0.5)
        for each in leaving:
            each.cancel()
        os.kill(child, signal.SIGCONT)
        assert (await caller.process(request_of(PROMPT, picture()))).items
        assert descendants(role.pid) == [child]


async def test_only_members_may_call(sim: Path, tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    member, stranger = ours.issue("member"), others.issue("stranger")
    tls = {"tls_cert": member.cert, "tls_key": member.key, "tls_ca": ours.path}
    async with preprocessor(model=sim, processes=1, **tls) as (without, role):
        with pytest.raises(Unavailable):
            await without.describe()

        def identity(issued: Issued) -> MemberIdentity:
            files = File("tls_cert", issued.cert), File("tls_key", issued.key)
            return MemberIdentity(Credentials(*files, [File("tls_ca", ours.path)]), "localhost")

        async with channel(role.address, identity(stranger)) as link:
            with pytest.raises(Unavailable):
                await Caller(link).describe()
        async with channel(role.address, identity(member)) as link:
            assert (await Caller(link).process(request_of(PROMPT, picture()))).items


def test_a_child_gets_no_more_memory_than_it_may_have() -> None:
    script = "from preprocessor.child import _limit_memory; _limit_memory(64); bytearray(32 << 20); print('some')\n"
    script += "try: bytearray(96 << 20)\nexcept MemoryError: print('no more')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["some", "no more"]


async def test_a_draining_preprocessor_ends_streams_and_takes_no_new_ones(sim: Path) -> None:
    async with preprocessor(model=sim) as (caller, role):
        call = caller.stub.Process(request_of(PROMPT, picture()), timeout=60)
        assert isinstance(await call.read(), pb.ProcessReply)
        role.process.send_signal(signal.SIGTERM)
        assert await call.read() is grpc.aio.EOF
        assert await role.process.wait() == 0
    async with channel(role.address) as link:
        with pytest.raises(grpc.aio.AioRpcError):
            await Caller(link).stub.Describe(pb.DescribeRequest(), timeout=60)
