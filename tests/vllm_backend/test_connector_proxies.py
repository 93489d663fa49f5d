"""Stock vLLM servers with TandemConnector behind proxies: every way in, and peers that are gone or not trusted."""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from support.ports import LOCAL, free_port
from support.processes import until
from support.stock_servers import Answer, StockServer, ask
from support.vllm_engines import BLOCK, need_vllm

pytestmark = [need_vllm, pytest.mark.asyncio(loop_scope="module")]
LENGTHS = (33, 300, 1100)
KEY, OTHER_KEY = "key-of-the-pair", "key-of-a-stranger"
SECRETS = ("secret of the pair", "secret of a stranger")
BUSY = ("the lender was silent", "no block came")
"""What ends a loan on a machine that is too busy."""
NGINX = shutil.which("nginx")
ASK_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
"""What proxies made for NixlConnector send to a prefill server."""
CONFIGURATION = """
daemon off;
master_process off;
error_log stderr;
pid {folder}/pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream decode {{ {servers} }}
    server {{
        listen {address};
        location / {{ proxy_pass http://decode; proxy_read_timeout 1h; }}
    }}
}}
"""
_rng = random.Random(63)

Pair = tuple[StockServer, StockServer]


def some_prompt(length: int = 300) -> list[int]:
    """A prompt that no server has seen."""
    return [_rng.randrange(10, 2000) for _ in range(length)]


def guarded(folder: Path, secret: str = SECRETS[0]) -> dict[str, Any]:
    """Settings of a server with a secret, which knows the pair's API key."""
    folder.mkdir(exist_ok=True)
    files = {"secret_file": secret, "lender_api_key_file": KEY}
    for name, content in files.items():
        (folder / name).write_text(content)
    common = {"loan_host": LOCAL, "trusted_lenders": "localhost", "peer_silence_s": 240, "patience_s": 240}
    return {name: str(folder / name) for name in files} | common


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Two servers that borrow from each other, with an API key and a secret."""
    folder = tmp_path_factory.mktemp("pair")
    ports = [free_port(), free_port()]
    first, second = (
        StockServer(
            folder / str(number),
            number,
            ports[number],
            guarded(folder / str(number)) | {"lenders": f"{LOCAL}:{ports[1 - number]}"},
            *("--api-key", KEY),
        )
        for number in range(2)
    )
    starting = [asyncio.ensure_future(server.start()) for server in (first, second)]
    try:
        await asyncio.gather(*starting)
        for server, other in ((first, second), (second, first)):
            await linked(server)
            await linked(server, {"lender": other.url.replace(LOCAL, "localhost")})
        yield first, second
    finally:
        for start, server in zip(starting, (first, second), strict=True):
            await asyncio.wait([start])
            if start.exception() is None:
                await server.__aexit__(None, None, None)


async def linked(server: StockServer, transfer: dict[str, Any] | None = None) -> None:
    """Wait until a server borrows from its configured lender, or from the one that is named."""

    async def borrows() -> bool:
        return bool((await ask(server.url, some_prompt(33), KEY, kv_transfer_params=transfer)).receipt["borrowed"])

    await until(borrows, "a server borrows")


async def in_two_phases(prefill: StockServer, decode: StockServer, prompt: Sequence[int] | str) -> Answer:
    """Do what a proxy made for NixlConnector does."""
    first = await ask(prefill.url, prompt, KEY, max_tokens=1, kv_transfer_params=ASK_PREFILL)
    return await ask(decode.url, prompt, KEY, kv_transfer_params=first.transfer)


async def all_borrowed(ask_it: Callable[[list[int]], Awaitable[Answer]], length: int, lender: StockServer) -> Answer:
    """Ask for new prompts until no loan ends early since this machine is busy, and check that one's answer.

    Its lender answers the same from its cache.
    """
    answers: list[Answer] = []

    async def undisturbed() -> bool:
        prompt = some_prompt(length)
        answers.append(answer := await ask_it(prompt))
        assert answer.token_ids == (await ask(lender.url, prompt, KEY)).token_ids
        return not any(cause in answer.receipt["failure"] for cause in BUSY)

    await until(undisturbed, "a loan ends well")
    receipt = answers[-1].receipt
    assert receipt["failure"] == ""
    assert receipt["borrowed"] == receipt["blocks"] == (length - 1) // BLOCK
    return answers[-1]


async def check_all_computed(answer: Answer, prompt: Sequence[int], other: StockServer) -> str:
    """Check that nothing was borrowed, and that the tokens are those of another server; return the failure."""
    receipt = answer.receipt
    assert receipt["borrowed"] == receipt["mismatched"] == 0
    assert receipt["computed"] == receipt["blocks"]
    unrelated = {"lender": f"{LOCAL}:1"}
    assert answer.token_ids == (await ask(other.url, prompt, KEY, kv_transfer_params=unrelated)).token_ids
    failure: str = receipt["failure"]
    return failure


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_server_borrows_by_itself(pair: Pair, length: int) -> None:
    lender, borrower = pair
    answer = await all_borrowed(lambda prompt: ask(borrower.url, prompt, KEY), length, lender)
    assert answer.receipt["lender"] == lender.url


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_request_names_its_lender(pair: Pair, length: int) -> None:
    lender, borrower = pair
    named = lender.url.replace(LOCAL, "localhost")
    transfer = {"lender": named}
    answer = await all_borrowed(
        lambda prompt: ask(borrower.url, prompt, KEY, kv_transfer_params=transfer), length, lender
    )
    assert answer.receipt["lender"] == named


async def test_a_lender_that_is_not_trusted(pair: Pair) -> None:
    other, borrower = pair
    prompt = some_prompt()
    named = other.url.replace(LOCAL, "127.0.0.2")
    answer = await ask(borrower.url, prompt, KEY, kv_transfer_params={"lender": named})
    failure = await check_all_computed(answer, prompt, other)
    assert failure == f"kv_transfer_params.lender: {named} is in neither lenders nor trusted_lenders"


@pytest.mark.parametrize("length", LENGTHS)
async def test_two_phases(pair: Pair, length: int) -> None:
    """The parameters of the prefill answer, unread; the lender's own server is not asked again."""
    prefill, decode = pair
    answer = await all_borrowed(lambda prompt: in_two_phases(prefill, decode, prompt), length, prefill)
    assert answer.receipt["lender"] not in ("", prefill.url)


async def test_a_chat_in_two_phases(pair: Pair) -> None:
    prefill, decode = pair

    async def undisturbed() -> bool:
        chat = " ".join(map(str, some_prompt(200)))
        answer = await in_two_phases(prefill, decode, chat)
        receipt = answer.receipt
        assert answer.token_ids == (await ask(prefill.url, chat, KEY)).token_ids
        return bool(receipt["borrowed"] == receipt["blocks"] > 1)

    await until(undisturbed, "a chat borrows all")


async def test_a_salt_of_another_request(pair: Pair) -> None:
    prefill, decode = pair

    async def salted(prompt: list[int]) -> Answer:
        first = await ask(prefill.url, prompt, KEY, max_tokens=1, kv_transfer_params=ASK_PREFILL, cache_salt="one")
        transfer = {"kv_transfer_params": first.transfer}
        await check_all_computed(await ask(decode.url, prompt, KEY, cache_salt="two", **transfer), prompt, prefill)
        return await ask(decode.url, prompt, KEY, cache_salt="one", **transfer)

    await all_borrowed(salted, 300, prefill)


async def test_counters(pair: Pair) -> None:
    lender, borrower = pair
    unrelated = {"lender": f"{LOCAL}:1"}

    async def counters() -> list[dict[str, float]]:
        """What was counted so far: vLLM asks its connector with each step, so that the lender has to take one."""
        await ask(lender.url, some_prompt(), KEY, kv_transfer_params=unrelated)
        return [await server.counters() for server in pair]

    before = await counters()
    receipt = (await ask(borrower.url, some_prompt(), KEY)).receipt

    async def counted() -> bool:
        given, taken = [
            {name: value - old[name] for name, value in now.items()}
            for now, old in zip(await counters(), before, strict=True)
        ]
        return (
            taken["loans_taken_total"] == taken["loan_seconds_count"] == given["loans_given_total"] == 1
            and taken["blocks_borrowed_total"] == receipt["borrowed"] <= given["blocks_lent_total"]
            and bool(taken["bytes_borrowed_total"]) == bool(receipt["borrowed"])
            and taken["loans_failed_total"] == bool(receipt["failure"])
            and taken["blocks_mismatched_total"] == 0
        )

    await until(counted, "both servers have counted the loan")


@asynccontextmanager
async def nginx(folder: Path, *servers: StockServer) -> AsyncIterator[str]:
    """The URL of a plain nginx in front of servers."""
    address = f"{LOCAL}:{free_port()}"
    upstream = " ".join(f"server {server.url.removeprefix('http://')};" for server in servers)
    configuration = folder / "nginx.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, servers=upstream, address=address))
    assert NGINX is not None
    process = await asyncio.create_subprocess_exec(NGINX, "-e", "stderr", "-c", str(configuration))
    try:

        async def answers() -> bool:
            assert process.returncode is None
            try:
                async with aiohttp.ClientSession() as session, session.get(f"http://{address}/health") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await until(answers, "nginx answers")
        yield f"http://{address}"
    finally:
        process.kill()
        await process.wait()


@pytest.mark.skipif(NGINX is None, reason="no nginx: apt-get install nginx")
async def test_nginx(pair: Pair, tmp_path: Path) -> None:
    """Requests know nothing of KV; each server lends what the other computes."""
    async with nginx(tmp_path, *pair) as url:
        answers = [await all_borrowed(lambda prompt: ask(url, prompt, KEY), 300, pair[0]) for _ in range(4)]
    assert {answer.receipt["lender"] for answer in answers} == {server.url for server in pair}


async def test_a_stranger(pair: Pair, tmp_path: Path) -> None:
    """Without the secret, or without the API key, a server computes what it cannot borrow, and says why."""
    lender, _ = pair
    settings = guarded(tmp_path / "stranger", SECRETS[1]) | {"lenders": lender.url}
    async with StockServer(tmp_path, 1, free_port(), settings, "--api-key", OTHER_KEY) as stranger:
        prompt = some_prompt()
        answer = await ask(stranger.url, prompt, OTHER_KEY)
        assert "secret_file" in await check_all_computed(answer, prompt, lender)
        named = stranger.url.replace(LOCAL, "localhost")
        prompt = some_prompt()
        answer = await ask(lender.url, prompt, KEY, kv_transfer_params={"lender": named})
        assert "status 401" in await check_all_computed(answer, prompt, pair[1])


async def test_a_lender_is_killed_and_comes_back(pair: Pair) -> None:
    """Requests are answered meanwhile, and references to the process that is gone harm none of its successor."""
    lender, borrower = pair
    prompts = [some_prompt() for _ in range(3)]
    first = [await ask(lender.url, each, KEY, max_tokens=1, kv_transfer_params=ASK_PREFILL) for each in prompts]
    await lender.kill()
    alone = await ask(borrower.url, prompts[0], KEY)
    stale = await ask(borrower.url, prompts[1], KEY, kv_transfer_params=first[1].transfer)
    await lender.start()
    older = await ask(borrower.url, prompts[2], KEY, kv_transfer_params=first[2].transfer)
    for answer, prompt in zip((alone, stale, older), prompts, strict=True):
        assert await check_all_computed(answer, prompt, lender)
    await linked(borrower)
    await all_borrowed(lambda prompt: ask(borrower.url, prompt, KEY), 300, lender)
    await all_borrowed(lambda prompt: in_two_phases(lender, borrower, prompt), 300, lender)
