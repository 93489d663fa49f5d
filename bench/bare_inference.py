"""Server of Tandem's API that answers at once with two tokens.

It prints its address.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from protos import inference_pb2 as pb
from router.frontend.grpc_service import NAME

MODEL = pb.Model(name="bare", max_context_tokens=1 << 20, vocab_size=1000, decode_workers=1)
MESSAGES = [
    pb.GenerateResponse(token_ids=[1]).SerializeToString(),
    pb.GenerateResponse(
        token_ids=[2],
        finish=pb.Finish(usage=pb.Usage(prompt_tokens=1, completion_tokens=2), receipt=pb.Receipt(request_id="bare")),
    ).SerializeToString(),
]


async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for message in MESSAGES:
        yield message


async def list_models(request: bytes, context: Any) -> bytes:
    return pb.ListModelsResponse(models=[MODEL]).SerializeToString()


async def main() -> None:
    server = grpc.aio.server()
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
        "ListModels": grpc.unary_unary_rpc_method_handler(list_models),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(NAME, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
