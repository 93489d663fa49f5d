"""A program of a user, with the types that both clients export; type checkers read it and nothing runs it."""

import asyncio
from pathlib import Path

from tandem.client import (
    ChatMessage,
    Client,
    ClientIdentity,
    Finish,
    GenerateOptions,
    Piece,
    Receipt,
    Sampling,
    SyncClient,
)
from tandem.errors import InvalidRequest, Overloaded, ServiceError


def show(piece: Piece) -> str:
    return piece.text


def where(finish: Finish) -> str:
    receipt: Receipt = finish.receipt
    return receipt.placement.decode_worker


async def first_words(client: Client, options: GenerateOptions, count: int) -> list[str]:
    words: list[str] = []
    async with client.stream("Once upon a time", **options) as pieces:
        async for piece in pieces:
            words.append(show(piece))
            if len(words) == count:
                break
    return words


async def talk() -> None:
    options: GenerateOptions = {"sampling": Sampling(max_tokens=8, seed=1), "tenant": "a", "timeout_s": 10.0}
    tls = ClientIdentity(ca=Path("ca.pem"))
    async with Client("a:1", "b:1", api_key="k", tls=tls) as client:
        print(await first_words(client, options, 3))
        tokens: list[int] = await client.tokenize(
            messages=[("user", "hi"), ChatMessage(role="assistant", content="ho")]
        )
        vectors: list[list[float]] = await client.embed(["a", tokens], dimensions=16)
        print(len(vectors), (await client.warm("hi", workers=2)).blocks)
        try:
            async for piece in client.generate("hi", tools=[{"type": "function"}], max_ttft_ms=100.0):
                if piece.HasField("finish"):
                    print(where(piece.finish))
        except Overloaded as error:
            wait_s: float | None = error.retry_after_s
            print(wait_s)
        except InvalidRequest as error:
            print(error.field)
        except ServiceError as error:
            print(error.message)


def wait() -> None:
    with SyncClient("a:1") as client, client.stream("hi", sampling=Sampling(n=2)) as pieces:
        for piece in pieces:
            print(piece.index, show(piece))
        print([model.name for model in client.list_models()])


asyncio.run(talk())
wait()
