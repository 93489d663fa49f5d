"""Malformed input by chance, at every door: no process ends, no call hangs, and every answer is typed.

TANDEM_FUZZ=n makes n inputs, `make fuzz` 100,000. Each is made of its number and TANDEM_SEED alone; a failure names it.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from cluster.network.mux import BEAT, END, FRAME, NOTE, OPEN
from cluster.network.rpc import MAX_METADATA_BYTES
from protos import decode_pb2, membership_pb2, mux_pb2
from protos import inference_pb2 as pb
from support.fuzz_http import Malformed, malformed
from support.fuzz_messages import fill, mutated, text
from support.observed_cluster import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3600)]

ROUTER = {"http_port": 0, "default_deadline_s": 4.0, "no_worker_grace_s": 1.0}
NUM_INPUTS = int(os.environ.get("TANDEM_FUZZ", "1500"))
SEED = os.environ.get("TANDEM_SEED", "1")
AT_A_TIME = 24
HANG_S = 90.0
DEADLINE_S = 1.0

Do = Callable[[Site, Random], Awaitable[str]]
"""Sends one input. What came of it, in a word or two."""
OWN_WORDS = "Internal error from Core"
"""Of the client library, whose message came to a stream that the server had ended: it hides the status."""
UNTYPED = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)


async def _in_numbers(site: Site, kind: str, num_inputs: int, do: Do, capsys: pytest.CaptureFixture[str]) -> None:
    """Many at a time. Fails with the number of the first input that hung or was answered wrongly."""
    capsys.readouterr()
    outcomes: Counter[str] = Counter()
    numbers = iter(range(num_inputs))
    began_at = time.monotonic()

    async def work() -> None:
        for number in numbers:
            name = f"{SEED}/{kind}/{number}"
            try:
                async with asyncio.timeout(HANG_S):
                    outcomes[await do(site, Random(name))] += 1
            except TimeoutError:
                raise AssertionError(f"{name}: no answer within {HANG_S:g} s") from None
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(work())
    spent_s = time.monotonic() - began_at
    logged = capsys.readouterr().err
    with capsys.disabled():
        print(f"\n{kind}: {outcomes.total()} inputs in {spent_s:.1f} s: {dict(outcomes.most_common())}")
    assert outcomes.total() == num_inputs
    # gRPC logs what members send that is no message; with TLS nobody else gets that far.
    by_members = logged.count("Unexpected [DecodeError] raised by servicer method [/tandem.internal.")
    assert logged.count("Traceback") == by_members, logged[-5000:]


# ------------------------------------------------------------------------------------------------ gRPC

PUBLIC: dict[str, type[Message]] = {
    "/tandem.v1.Inference/Generate": pb.GenerateRequest,
    "/tandem.v1.Inference/Explain": pb.GenerateRequest,
    "/tandem.v1.Inference/ListModels": pb.ListModelsRequest,
    "/tandem.v1.Inference/GenerateBatch": pb.GenerateBatchRequest,
    "/tandem.v1.Inference/Tokenize": pb.TokenizeRequest,
    "/tandem.v1.Inference/ClusterStatus": pb.ClusterStatusRequest,
    "/tandem.v1.Inference/Feedback": pb.FeedbackRequest,
    "/tandem.v1.Inference/Warm": pb.WarmRequest,
}
INTERNAL: dict[str, type[Message]] = {
    "/tandem.internal.v1.Membership/Join": membership_pb2.WorkerMessage,
    "/tandem.internal.v1.Membership/Members": membership_pb2.MembersRequest,
    "/tandem.internal.v1.Worker/Audit": membership_pb2.AuditRequest,
    "/tandem.internal.v1.Worker/Cache": membership_pb2.CacheRequest,
}
STREAMING = ("Join",)
METHODS = PUBLIC | INTERNAL
GOOD = pb.GenerateRequest(token_ids=range(1, 40), sampling=pb.Sampling(max_tokens=3, temperature=0))


def _message(method: str, chance: Random) -> bytes:
    message = METHODS[method]()
    if isinstance(message, pb.GenerateRequest) and chance.random() < 0.5:
        message.CopyFrom(GOOD)
        fill(message.sampling, chance, 0.1)
        fill(message, chance, 0.05)
    else:
        fill(message, chance, chance.choice((0.1, 0.3, 0.7)))
    return message.SerializeToString()


def _somewhere(site: Site, chance: Random) -> tuple[grpc.aio.Channel, str]:
    """A method, and a process that has it."""
    method = chance.choice([*PUBLIC, *PUBLIC, *INTERNAL])
    at_router = "Inference" in method or "Membership" in method
    worker = chance.choice((site.decode, site.prefill))
    return site.link(site.router.address if at_router else worker.address), method


async def _grpc(site: Site, chance: Random) -> str:
    link, method = _somewhere(site, chance)
    kind = chance.choice(("fields", "fields", "mutated", "bytes", "method", "metadata", "cut"))
    metadata: list[tuple[str, str | bytes]] = []
    raw = _message(method, chance)
    match kind:
        case "mutated":
            raw = mutated(raw, chance)
        case "bytes":
            raw = chance.randbytes(chance.choice((0, 1, 10, 300, 5000)))
        case "method":
            method = "/" + "".join(chance.choice("abz./_%") for _ in range(chance.randint(1, 20))) + "/x"
        case "metadata":
            pad = chance.choice((10, 1000, 2 * MAX_METADATA_BYTES))
            metadata = [("x-pad", "x" * pad), ("x-bin", chance.randbytes(20)), ("authorization", "Bearer \x7e")]
    streams = method.rpartition("/")[2] in STREAMING
    opened: Any = link.stream_stream(method) if streams else link.unary_stream(method)
    call = opened(_stream(raw, method, chance) if streams else raw, timeout=DEADLINE_S, metadata=metadata)
    return f"{kind} {await _outcome(call, kind == 'cut', method, chance)}"


async def _stream(first: bytes, method: str, chance: Random) -> AsyncIterator[bytes]:
    """That ends, or stays open until the deadline."""
    yield first
    for _ in range(chance.randint(0, 2)):
        yield _message(method, chance)
    if chance.random() < 0.3:
        await asyncio.sleep(DEADLINE_S)


async def _outcome(call: Any, cut: bool, method: str, chance: Random) -> str:
    try:
        if cut:
            await asyncio.sleep(chance.choice((0, 0.001, 0.02)))
            call.cancel()
        for _ in range(3):
            if await call.read() is grpc.aio.EOF:
                break
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Cut by us; or by the client library, where the server ended a stream that was being written to.
        assert cut or method not in PUBLIC, method
        return "CANCELLED" if cut else "ended meanwhile"
    except grpc.aio.AioRpcError:
        code, details = await call.code(), await call.details() or ""
        if details == OWN_WORDS and method not in PUBLIC:
            return "ended meanwhile"
        # The internal services' generated code leaves that to gRPC, which says UNKNOWN.
        parsing = code is grpc.StatusCode.UNKNOWN and "pars" in details
        assert code not in UNTYPED or (parsing and method not in PUBLIC), (method, code, details)
        if method in PUBLIC:
            assert "Stream removed" not in details, (method, code, details, "its trailers were too long")
            assert cut or code is not grpc.StatusCode.CANCELLED, (method, details, "nobody cancelled it")
        return str(code.name)
    finally:
        call.cancel()
    return "OK"


async def _garbage(site: Site, chance: Random) -> str:
    """On a gRPC port, what is no HTTP/2, or what only begins like it."""
    address = chance.choice((site.router.address, site.decode.address))
    preface = chance.choice((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"))
    frames = b"".join(_frame(chance) for _ in range(chance.randint(0, 6)))
    await _exchange(address, preface + frames + chance.randbytes(chance.randint(0, 60)), cut=True)
    return "closed"


def _frame(chance: Random) -> bytes:
    """Of HTTP/2: its length, kind, flags and stream may be anything."""
    body = chance.randbytes(chance.randint(0, 80))
    length = len(body) if chance.random() < 0.7 else chance.randrange(1 << 24)
    stream = chance.choice((0, 1, 2, 3, (1 << 31) - 1))
    return (
        length.to_bytes(3, "big")
        + bytes([chance.randrange(12), chance.randrange(256)])
        + stream.to_bytes(4, "big")
        + body
    )


async def _on_stream_port(site: Site, chance: Random) -> str:
    """Where routers connect: frames that may be mutated or of no kind, and requests with any fields."""
    frames = [
        _mux_frame(OPEN, membership_pb2.StreamOpening(key=chance.randbytes(chance.choice((0, 16)))).SerializeToString())
    ]
    for number in range(1, chance.randint(1, 6)):
        request = decode_pb2.DecodeRequest(prompt_token_ids=range(1, 40), sampling=GOOD.sampling)
        fill(request, chance, chance.choice((0.0, 0.05, 0.3)))
        if chance.random() < 0.7:
            request.worker_incarnation = site.decode.incarnation
        frame = mux_pb2.Frame(parts=[mux_pb2.Part(number=number, messages=[request.SerializeToString()])])
        fill(frame, chance, chance.choice((0.0, 0.0, 0.1)))
        payload = frame.SerializeToString()
        kind = chance.choice((FRAME, FRAME, FRAME, FRAME, BEAT, NOTE, END, chance.randrange(256)))
        frames.append(_mux_frame(kind, mutated(payload, chance) if chance.random() < 0.2 else payload))
    raw = b"".join(frames)
    await _exchange(site.decode.stream_address, mutated(raw, chance) if chance.random() < 0.2 else raw, cut=True)
    return "closed"


def _mux_frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + bytes([kind]) + payload


# ------------------------------------------------------------------------------------------------ HTTP


async def _http(site: Site, chance: Random) -> str:
    made: Malformed = malformed(chance)
    said = await _exchange(site.router.http_address, made.content, made.cut)
    if not said:
        assert made.cut, f"{made.kind}: {made.content[:300]!r}: closed without an answer"
        return f"{made.kind} closed"
    status = _status(said)
    assert status < 500 or status in (503, 504), f"{made.kind}: {made.content[:300]!r}: {said[:600]!r}"
    if status >= 400 and not made.content.startswith(b"HEAD"):
        error = json.loads(_body(said))["error"]
        assert set(error) == {"message", "type", "param", "code"}, said
        assert error["message"], said
        assert error["type"], said
    return f"{made.kind} {status}"


def _status(said: bytes) -> int:
    version, status, *_ = said.split(b" ", 2)
    assert version == b"HTTP/1.1", said[:100]
    return int(status)


def _body(said: bytes) -> bytes:
    """Of the first answer."""
    head, _, rest = said.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return rest[: int(value)]
    raise AssertionError(f"no length: {said[:300]!r}")


async def _exchange(address: str, content: bytes, cut: bool) -> bytes:
    """What came back: of a whole request its first answer, or its beginning where that was a good one."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said = b""
    try:
        writer.write(content)
        if cut:
            writer.write_eof()
        while chunk := await reader.read(65536):
            said += chunk
            if not cut and _is_whole(said):
                break
    except (ConnectionError, OSError):
        pass  # it was closed on us, after all it had to say
    finally:
        writer.transport.abort()
    return said


def _is_whole(said: bytes) -> bool:
    if b"\r\n\r\n" not in said:
        return False
    if _status(said) < 400:
        return True
    try:
        json.loads(_body(said))
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------


async def test_grpc_calls(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    await _in_numbers(site, "gRPC calls", NUM_INPUTS * 2 // 5, _grpc, capsys)


async def test_bytes_on_a_grpc_port(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    await _in_numbers(site, "bytes on a gRPC port", NUM_INPUTS // 10, _garbage, capsys)


async def test_bytes_on_a_stream_port(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    await _in_numbers(site, "bytes on a stream port", NUM_INPUTS // 10, _on_stream_port, capsys)


async def test_http_requests(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    await _in_numbers(site, "HTTP requests", NUM_INPUTS // 2, _http, capsys)


async def test_texts_are_no_names(site: Site) -> None:
    """Random texts where names are expected are taken as they are, or refused: never repeated in a header."""
    chance = Random(SEED)
    link = site.link(site.router.address)
    for _ in range(50):
        request = pb.GenerateRequest(token_ids=[1, 2], model=text(chance), tenant=text(chance), request_id=text(chance))
        call = link.unary_stream("/tandem.v1.Inference/Generate")(request.SerializeToString(), timeout=5)
        await _outcome(call, False, "/tandem.v1.Inference/Generate", chance)
