"""Frontends of a cluster for the load generator: gRPC and HTTP.

Prompts for requests with known lengths and sharing: equal hash ids give equal text up to there.
"""

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from google.protobuf.json_format import ParseDict, ParseError
from numpy.typing import NDArray

from cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServiceError, StartError, Unavailable
from cluster.install import needing
from cluster.network.tls import ClientIdentity
from cluster.process.tasks import each_of
from protos import inference_pb2 as pb
from tandem.client import Client
from workloads.request import MAX_HASH_ID, TraceRequest, shown

_OF_IDS, _OF_PLACES, _OF_BOTH = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD
LEAST_TOKEN = 256
"""Smallest token id used; smaller ones are often special tokens or single bytes."""
_SYLLABLES = [first + second for first in "bdfghklmnprstvz" for second in "aeiou"]
_REMEMBERED = 8192
"""Number of cached texts of blocks."""


def token_ids(request: TraceRequest, vocab_size: int) -> list[int]:
    """Return as many token ids as the request says, each below `vocab_size`."""
    numbers = _numbers(request)
    least = min(LEAST_TOKEN, vocab_size // 2)
    ids: list[int] = (numbers % np.uint64(vocab_size - least) + np.uint64(least)).tolist()
    return ids


class PromptWords:
    """Text of about as many tokens as a request says."""

    def __init__(self, tokens_per_word: float) -> None:
        """Create it with the tokenizer's tokens per word, measured with `sample`."""
        self._tokens_per_word = tokens_per_word

    def text(self, request: TraceRequest) -> str:
        size, rest = request.hash_tokens, request.input_tokens
        parts = []
        for hash_id in (*request.hash_ids, MAX_HASH_ID + request.number % MAX_HASH_ID):
            tokens = min(size, rest) if hash_id < MAX_HASH_ID else rest
            count = round(tokens / self._tokens_per_word)
            parts.append(_text(hash_id, count) if tokens == size else " ".join(_words(hash_id, count)))
            rest -= tokens
        return " ".join(part for part in parts if part) or _words(0, 1)[0]


def sample(count: int) -> str:
    """Return so many words, to be counted by a tokenizer."""
    return " ".join(_words(0, count))


@functools.lru_cache(_REMEMBERED)
def _text(hash_id: int, count: int) -> str:
    return " ".join(_words(hash_id, count))


def _words(hash_id: int, count: int) -> list[str]:
    """Return words of two or three syllables."""
    values: Sequence[int] = _mixed(np.full(count, hash_id, np.uint64), np.arange(count, dtype=np.uint64)).tolist()
    words, base = [], len(_SYLLABLES)
    for value in values:
        word = _SYLLABLES[value % base] + _SYLLABLES[value // base % base]
        words.append(word + _SYLLABLES[value // base**2 % base] if value & 1 << 40 else word)
    return words


def _numbers(request: TraceRequest) -> NDArray[np.uint64]:
    """Return a number per token, [input_tokens]."""
    size = request.hash_tokens
    ids = np.full(request.input_tokens, MAX_HASH_ID + request.number % MAX_HASH_ID, np.uint64)
    shared = np.repeat(np.array(request.hash_ids, np.uint64), size)[: request.input_tokens]
    ids[: len(shared)] = shared
    return _mixed(ids, np.arange(request.input_tokens, dtype=np.uint64) % np.uint64(size))


def _mixed(ids: NDArray[np.uint64], places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = ((ids + np.uint64(1)) * np.uint64(_OF_IDS)) ^ ((places + np.uint64(1)) * np.uint64(_OF_PLACES))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(_OF_BOTH)
    mixed ^= mixed >> np.uint64(32)
    return mixed


MAX_LINE = 1 << 20
"""Largest event of an HTTP server, in bytes."""
PROBE_WORDS = 200
USAGE = {"include_usage": True, "continuous_usage_stats": True}
"""Options with which vLLM and Tandem state the number of tokens in each event."""
OnTokens = Callable[[int], object]
"""Callback with the number of tokens that have just arrived."""


class Frontend(ABC):
    """A frontend, opened as a context.

    `ask` may be called concurrently.
    """

    max_context_tokens: int
    """Context length of the model, the limit of a request."""
    num_workers: int
    """Workers of the model; 0 where unknown."""
    model: str

    async def __aenter__(self) -> Self:
        """Open the frontend.

        Raises ServiceError and StartError.
        """
        return self

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    @abstractmethod
    async def ask(self, request: TraceRequest, on_tokens: OnTokens) -> pb.Finish:
        """Run one request to its end; usage and receipt as far as the server gives them.

        Raises ServiceError.
        """


class GrpcFrontend(Frontend):
    """Tandem's own API, by token ids, or by text where `as_text`."""

    def __init__(
        self,
        addresses: Sequence[str],
        model: str,
        timeout_s: float,
        tenant: str = "",
        as_text: bool = False,
        api_key: str = "",
        tls: ClientIdentity | None = None,
    ) -> None:
        """Create it with the addresses of routers, which get requests in turn."""
        self._addresses = addresses
        self._api_key, self._tls = api_key, tls
        self.model = model
        self._timeout_s = timeout_s
        self._tenant = tenant
        self._as_text = as_text
        self._words = PromptWords(1.0)
        self._number = 0

    async def __aenter__(self) -> Self:
        self._clients = [Client(address, api_key=self._api_key, tls=self._tls) for address in self._addresses]
        served = await self._clients[0].list_models()
        matches = [model for model in served if not self.model or model.name == self.model]
        if len(matches) != 1:
            names = ", ".join(model.name for model in served)
            raise StartError("model", f"name one of {names}, which are served at {self._addresses[0]}")
        self.model, self._vocab_size = matches[0].name, matches[0].vocab_size
        self.max_context_tokens = matches[0].max_context_tokens
        self.num_workers = matches[0].prefill_workers + matches[0].decode_workers
        if self._as_text:
            finish = await self._stream({"text": sample(PROBE_WORDS)}, pb.Sampling(max_tokens=1), 0, lambda _: None)
            self._words = PromptWords(finish.usage.prompt_tokens / PROBE_WORDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await each_of(client.close() for client in self._clients)

    async def ask(self, request: TraceRequest, on_tokens: OnTokens) -> pb.Finish:
        prompt: dict[str, Any]
        if self._as_text:
            prompt = {"text": self._words.text(request)}
        else:
            prompt = {"token_ids": token_ids(request, self._vocab_size)}
        sampling = pb.Sampling(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
        return await self._stream(prompt, sampling, request.priority, on_tokens)

    async def _stream(
        self, prompt: dict[str, Any], sampling: pb.Sampling, priority: int, on_tokens: OnTokens
    ) -> pb.Finish:
        self._number += 1
        client = self._clients[self._number % len(self._clients)]
        finish = pb.Finish()
        responses = client.generate(
            **prompt,
            sampling=sampling,
            model=self.model,
            timeout_s=self._timeout_s,
            priority=priority,
            tenant=self._tenant,
        )
        async for response in responses:
            if response.token_ids:
                on_tokens(len(response.token_ids))
            if response.HasField("finish"):
                finish = response.finish
        return finish


class HttpFrontend(Frontend):
    """Any server of OpenAI's API: /v1/completions, streamed, with vLLM's `ignore_eos`."""

    def __init__(
        self,
        url: str,
        model: str,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        as_text: bool = True,
        receipts: bool = False,
        vocab_size: int = 0,
        max_context_tokens: int = 0,
        tls: ClientIdentity | None = None,
    ) -> None:
        """Create it.

        Raises StartError for a bad `url`.

        `receipts`: request them from Tandem. `vocab_size` is needed for prompts of token ids. `max_context_tokens` is
        needed where the server does not state the context.
        """
        self._url = _base_of(url)
        self.model = model
        self._timeout_s = timeout_s
        self._headers = headers or {}
        self._as_text = as_text
        self._receipts = receipts
        self._vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens
        self.num_workers = 0
        self._tls = tls
        self._words = PromptWords(1.0)

    async def __aenter__(self) -> Self:
        with needing("http"):
            import aiohttp
        self._http = aiohttp
        self._session = aiohttp.ClientSession(
            self._url,
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls.for_http() if self._tls else True),
            timeout=aiohttp.ClientTimeout(self._timeout_s),
            headers=self._headers,
            read_bufsize=MAX_LINE,
        )
        try:
            await self._look()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def _look(self) -> None:
        """Find out the model, its context and its tokens' length.

        Raises StartError and ServiceError.
        """
        try:
            async with self._session.get("/v1/models") as answer:
                if answer.status != 200:
                    raise error_of(answer.status, await answer.read(), answer.headers)
                served = (await answer.json())["data"]
            served = [(model["id"], int(model.get("max_model_len") or 0)) for model in served]
        except self._http.ClientConnectorError as error:
            raise Unavailable(f"{self._url}: no server answers there: {error.strerror}") from None
        except (self._http.ClientError, ValueError, KeyError, TypeError, AttributeError, TimeoutError) as error:
            raise Unavailable(f"{self._url}/v1/models: {error!r:.200}") from None
        matches = [model for model in served if not self.model or model[0] == self.model]
        if len(matches) != 1:
            raise StartError("model", f"name one of {', '.join(name for name, _ in served)}")
        self.model = matches[0][0]
        self.max_context_tokens = self.max_context_tokens or matches[0][1]
        if not self.max_context_tokens:
            raise StartError("context", f"{self._url} does not say how long {self.model}'s context is: set it")
        if self._as_text:
            finish = await self._stream({"prompt": sample(PROBE_WORDS), "max_tokens": 1}, lambda _: None)
            if not finish.usage.prompt_tokens:
                raise StartError("http", f"{self._url} does not say how many tokens a prompt has")
            self._words = PromptWords(finish.usage.prompt_tokens / PROBE_WORDS)
        elif not self._vocab_size:
            raise StartError("vocab_size", "must be set when prompts are sent as token ids")

    async def ask(self, request: TraceRequest, on_tokens: OnTokens) -> pb.Finish:
        prompt = self._words.text(request) if self._as_text else token_ids(request, self._vocab_size)
        body = {"prompt": prompt, "max_tokens": request.output_tokens, "ignore_eos": True}
        if request.priority:
            body["priority"] = request.priority
        return await self._stream(body, on_tokens)

    async def _stream(self, body: dict[str, Any], on_tokens: OnTokens) -> pb.Finish:
        body |= {"model": self.model, "temperature": 0.0, "stream": True, "stream_options": USAGE}
        if self._receipts:
            body["receipt"] = True
        finish = pb.Finish()
        try:
            async with self._session.post("/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise error_of(answer.status, await answer.read(), answer.headers)
                seen = 0
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        seen = read_event(json.loads(line[6:]), finish, seen, on_tokens)
        except self._http.ClientError as error:
            raise Unavailable(f"{self._url}: {error!r}") from None
        except TimeoutError:
            raise DeadlineExceeded(f"the request was not done within {self._timeout_s:g} s") from None
        if finish.usage.completion_tokens > seen:
            on_tokens(finish.usage.completion_tokens - seen)
        return finish


def _base_of(url: str) -> str:
    """Return the URL without the API's path.

    Raises StartError.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise StartError("http", f"{shown(url)} is not an address such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def read_event(event: dict[str, Any], finish: pb.Finish, seen: int, on_tokens: OnTokens) -> int:
    """Return the number of tokens after an event; `seen` is the number before.

    A server that counts them in every event is believed; otherwise an event with text is one token.
    """
    if (error := event.get("error")) is not None:
        status = error.get("code")
        raise error_of(status if isinstance(status, int) else 500, json.dumps(event).encode(), {})
    usage = event.get("usage")
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        finish.usage.prompt_tokens = usage.get("prompt_tokens", 0)
        finish.usage.completion_tokens = usage.get("completion_tokens", 0)
        finish.usage.cached_tokens = details.get("cached_tokens") or 0
    if (receipt := event.get("tandem")) is not None:
        try:
            ParseDict(receipt, finish.receipt, ignore_unknown_fields=True)
        except ParseError as error:
            raise Unavailable(f"the receipt cannot be read: {error}") from None
    if event.get("choices"):
        now = max(seen + bool(event["choices"][0].get("text")), finish.usage.completion_tokens)
        if now > seen:
            on_tokens(now - seen)
        return now
    return seen


def error_of(status: int, body: bytes, headers: Mapping[str, str]) -> ServiceError:
    """Return the typed error of a server's answer."""
    message, field = body[:500].decode(errors="replace"), ""
    try:
        details = json.loads(body)["error"]
        message, field = str(details["message"]), str(details.get("param") or "")
    except (ValueError, KeyError, TypeError):
        pass  # a proxy's page, or another server's format: its text is the message
    if status == 429:
        retry_after = headers.get("Retry-After", "")
        return Overloaded(message, field, retry_after_s=float(retry_after) if retry_after.isdecimal() else None)
    if 400 <= status < 500:
        return InvalidRequest(field or "request", f"{status}: {message}")
    return DeadlineExceeded(message) if status == 504 else Unavailable(f"{status}: {message}")
