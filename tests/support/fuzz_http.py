"""HTTP requests as nobody should send them, as bytes for a socket. The same generator gives the same."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from support.fuzz_messages import text

PATHS = ("/v1/completions", "/v1/chat/completions")
OTHER_PATHS = (
    "/",
    "/v1",
    "/v1/models",
    "/v1/models/x",
    "/health",
    "/docs",
    "/v1//completions",
    "/%00",
    "/" + "a" * 3000,
    "*",
)
METHODS = (
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "OPTIONS",
    "HEAD",
    "PATCH",
    "TRACE",
    "CONNECT",
    "get",
    "G E T",
    "PRI",
    "\x00",
    "É",
)
FIELDS = re.findall(
    r"\w+",
    """
model prompt messages max_tokens max_completion_tokens temperature top_p top_k n stop stream stream_options
seed logprobs top_logprobs echo logit_bias presence_penalty frequency_penalty repetition_penalty min_p
min_tokens ignore_eos user response_format guided_json guided_regex tools tool_choice parallel_tool_calls
priority cache_salt session_id prompt_cache_key request_id timeout_ms max_ttft_ms task min_quality receipt best_of
suffix stop_token_ids chat_template_kwargs prompt_logprobs return_token_ids beam_width length_penalty
structured_outputs add_generation_prompt continue_final_message functions modalities audio store metadata
""",
)
GOOD_TEXT = {"model": "simulated", "prompt": "word1 word2", "max_tokens": 3, "timeout_ms": 1500}
GOOD_CHAT = {"messages": [{"role": "user", "content": "word1"}], "max_tokens": 3, "timeout_ms": 1500}


@dataclass(frozen=True)
class Malformed:
    """What to send, and whether an answer must come."""

    kind: str
    content: bytes
    cut: bool = False
    """It ends before its end, and the connection with it: then there is nobody to answer."""


def malformed(chance: Random) -> Malformed:
    """One, of any kind."""
    kind = chance.choices(list(_KINDS), [weight for weight, _ in _KINDS.values()])[0]
    made = _KINDS[kind][1](chance)
    return made if isinstance(made, Malformed) else Malformed(kind, made)


def request(path: str, body: bytes, *headers: str, method: str = "POST", version: str = "HTTP/1.1") -> bytes:
    """Well formed, as far as its parts are."""
    head = [f"{method} {path} {version}", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode("latin-1", "replace") + body


def _garbage(chance: Random) -> Malformed:
    content = chance.randbytes(chance.randint(1, 600))
    if chance.random() < 0.3:
        content = (
            chance.choice((b"GET ", b"POST /v1/completions HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
            + content
        )
    return Malformed("garbage", content, cut=True)


def _request_line(chance: Random) -> bytes:
    method = chance.choice(METHODS)
    path = chance.choice((*PATHS, *OTHER_PATHS, "", " ", "http://other/v1/models", "/\r\n", "/é"))
    version = chance.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/9.9", "HTTQ/1.1", "", "HTTP/1.1 x"))
    return request(path, b"", "connection: close", method=method, version=version)


def _headers(chance: Random) -> bytes:
    header = chance.choice(
        (
            "x: " + "y" * chance.choice((70_000, 200_000)),
            "x" * 70_000 + ": y",
            "\r\n".join(f"x{number}: y" for number in range(9000)),
            "no colon at all",
            ": no name",
            "x : y",
            "content-encoding: " + chance.choice(("gzip", "deflate", "br", "gzip, gzip", "\x7f")),
            "x: \x00",
            " folded: y",
            "x-tenant: " + chance.choice(("a" * 300, "\x7f", "é")),
            "x-request-id: " + "r" * chance.choice((256, 257, 5000)),
            "content-type: " + text(chance).replace("\r", "").replace("\n", ""),
            "authorization: " + chance.choice(("Bearer", "Bearer x", "Basic eDp5", "\x01")),
            "expect: 100-continue",
            "upgrade: websocket\r\nconnection: upgrade",
            "upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABk",
            "accept-encoding: \xff",
            "host: y",
        )
    )
    return request(chance.choice(PATHS), json.dumps(GOOD_TEXT).encode(), header)


def _length(chance: Random) -> Malformed:
    body = json.dumps(GOOD_TEXT).encode()
    lengths = (
        str(len(body) + chance.randint(1, 500)),
        str(chance.randint(0, len(body) - 1)),
        "-1",
        "+5",
        "0x10",
        "1e3",
        "",
        "abc",
    )
    length = chance.choice((*lengths, "99999999999999999999", str(1 << 40), "5\r\ncontent-length: 6"))
    head = f"POST {chance.choice(PATHS)} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
    return Malformed("length", head.encode() + body, cut=True)


def _chunks(chance: Random) -> Malformed:
    body = json.dumps(GOOD_TEXT).encode()
    size = f"{len(body):x}".encode()
    chunks = (
        size + b"\r\n" + body + b"\r\n0\r\n\r\n",
        b"zz\r\n" + body + b"\r\n0\r\n\r\n",
        b"-1\r\n" + body + b"\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\n" + body,
        size + b"\r\n" + body + b"0\r\n\r\n",
        size + b";" + b"x" * 5000 + b"\r\n" + body + b"\r\n0\r\n\r\n",
        size + b"\r\n" + body + b"\r\n0\r\nx: y\r\n\r\n",
        b"\r\n".join(b"1\r\n" + bytes([byte]) for byte in body) + b"\r\n0\r\n\r\n",
        size + b"\r\n" + body[:10],
    )
    more = chance.choice(("", "content-length: 5\r\n", "transfer-encoding: gzip\r\n"))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{more}transfer-encoding: chunked\r\n\r\n"
    return Malformed("chunks", head.encode() + chance.choice(chunks), cut=True)


def _bomb(chance: Random) -> bytes:
    depth = chance.choice((50, 1000, 20_000, 60_000))
    bombs: tuple[Callable[[], str], ...] = (
        lambda: "[" * depth + "]" * depth,
        lambda: '{"a":' * depth + "1" + "}" * depth,
        lambda: '{"prompt":' + "[" * depth + "]" * depth + "}",
        lambda: '{"max_tokens": ' + "9" * depth + "}",
        lambda: '{"temperature": 1e' + "9" * 400 + ', "prompt": "a"}',
        lambda: '{"temperature": NaN, "prompt": "a"}',
        lambda: '{"max_tokens": -Infinity, "prompt": "a"}',
        lambda: "{" + ",".join(f'"k{number}": 1' for number in range(depth)) + "}",
        lambda: '{"prompt": "a", "prompt": "b", "max_tokens": 1}',
        lambda: '{"prompt": "\\ud800", "max_tokens": 1}',
        lambda: '{"prompt": "' + "\\u0000" * 1000 + '", "max_tokens": 1}',
        lambda: json.dumps({"prompt": "a", "stop": ["x"] * depth, "max_tokens": 1}),
        lambda: json.dumps({"prompt": [[1] * 10] * min(depth, 3000), "max_tokens": 1}),
        lambda: json.dumps({"prompt": "a " * depth, "max_tokens": 1, "timeout_ms": 500}),
        lambda: json.dumps({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": _nested(60)}}),
        lambda: '{"prompt": "a"',
        lambda: "",
        lambda: "null",
        lambda: "\ufeff{}",
    )
    body = chance.choice(bombs)().encode()
    if chance.random() < 0.1:
        body = b"\xff\xfe" + body
    return request(chance.choice(PATHS), body)


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"name": "n", "schema": schema}


def _fields(chance: Random) -> bytes:
    chat = chance.random() < 0.4
    body: dict[str, Any] = dict(GOOD_CHAT if chat else GOOD_TEXT)
    for _ in range(chance.randint(1, 4)):
        body[chance.choice(FIELDS)] = value(chance)
    return request(PATHS[chat], json.dumps(body).encode())


def value(chance: Random, depth: int = 0) -> Any:
    """Any JSON."""
    kind = chance.randrange(8 if depth < 4 else 6)
    match kind:
        case 0:
            return chance.choice((None, True, False))
        case 1 | 2:
            return chance.choice((0, 1, -1, 3, 20, 65, 1 << 31, -(1 << 31), 1 << 63, 10**30))
        case 3:
            return chance.choice((0.0, 0.5, -1.5, 1e308, 1e-308, 3.0))
        case 4 | 5:
            return text(chance)
        case 6:
            return [value(chance, depth + 1) for _ in range(chance.randint(0, 4))]
    keys = (
        "type",
        "function",
        "name",
        "role",
        "content",
        "schema",
        "json_schema",
        "parameters",
        "include_usage",
        "regex",
        "1",
    )
    return {chance.choice(keys): value(chance, depth + 1) for _ in range(chance.randint(0, 4))}


def _elsewhere(chance: Random) -> bytes:
    body = json.dumps(value(chance)).encode()
    return request(chance.choice(OTHER_PATHS), body, "connection: close", method=chance.choice(METHODS[:7]))


def _broken_off(chance: Random) -> Malformed:
    whole = request(PATHS[0], json.dumps(GOOD_TEXT | {"stream": chance.random() < 0.5}).encode())
    return Malformed("broken off", whole[: chance.randrange(len(whole) + 1)], cut=True)


def _pipelined(chance: Random) -> bytes:
    return b"".join(_fields(chance) for _ in range(chance.randint(2, 5)))


_KINDS: dict[str, tuple[int, Callable[[Random], bytes | Malformed]]] = {
    "garbage": (10, _garbage),
    "request line": (10, _request_line),
    "headers": (10, _headers),
    "length": (8, _length),
    "chunks": (8, _chunks),
    "bomb": (8, _bomb),
    "fields": (40, _fields),
    "elsewhere": (8, _elsewhere),
    "broken off": (8, _broken_off),
    "pipelined": (3, _pipelined),
}
