"""HTTP calls to one stock server: its abilities, asked when it is met, and the figures of its `/metrics` page."""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from cluster.errors import StartError, Unavailable
from router.models.config import FleetConfig
from router.stock.completions import Call, error_of

CONNECT_S = 3.0
"""Seconds for a connection, while the request could run elsewhere."""
COMPLETIONS = "/v1/completions"
DATA, END = b"data: ", b"\n\n"
MAX_ERROR_CHARS = 500


@dataclass(slots=True)
class EventReader:
    """Reader of server-sent events, which arrive in pieces of any size."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are whole now."""
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(END)
        return [each[len(DATA) :] for each in whole if each.startswith(DATA)]


@dataclass(slots=True)
class ServerAccess:
    """HTTP session for all servers of a fleet, with their API key and authorities."""

    session: aiohttp.ClientSession
    headers: Mapping[str, str]
    tls: ssl.SSLContext | bool = True

    @classmethod
    def of(cls, config: FleetConfig) -> "ServerAccess":
        """Open the session, within a running loop. Raises StartError for files that cannot be read."""
        key = _read(config.api_key_file, "api_key_file").strip()
        tls: ssl.SSLContext | bool = True
        if config.ca_file is not None:
            try:
                tls = ssl.create_default_context(cadata=_read(config.ca_file, "ca_file"))
            except ssl.SSLError as error:
                raise StartError("fleet.ca_file", f"{config.ca_file} has no certificates: {error}") from None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return cls(session, {"Authorization": f"Bearer {key}"} if key else {}, tls)

    async def close(self) -> None:
        await self.session.close()


def _read(path: Path | None, key: str) -> str:
    if path is None:
        return ""
    try:
        return path.read_text()
    except OSError as error:
        raise StartError(f"fleet.{key}", f"cannot read {path}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class ServerApi:
    """Calls to one server. Its name in errors is its host and port."""

    url: str
    access: ServerAccess
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", urlsplit(self.url).netloc)

    async def get(self, path: str, timeout_s: float) -> tuple[int, str]:
        """Return status and text. Raises Unavailable."""
        return await self._ask("GET", path, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> tuple[int, str]:
        """Return status and text. Raises Unavailable."""
        return await self._ask("POST", path, timeout_s, data=msgspec.json.encode(body))

    async def _ask(self, method: str, path: str, timeout_s: float, **body: Any) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        headers = {"Content-Type": "application/json", **self.access.headers}
        try:
            async with self.access.session.request(
                method, self.url + path, headers=headers, ssl=self.access.tls, timeout=timeout, **body
            ) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeError) as error:
            raise self.unavailable(error) from None

    async def complete(self, call: Call, request_id: str) -> aiohttp.ClientResponse:
        """Return the open answer to a completion. Raises ServiceError for a server that refuses it."""
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id, **self.access.headers}
        body = msgspec.json.encode(call.body)
        try:
            answer = await self.access.session.post(
                self.url + COMPLETIONS, data=body, headers=headers, ssl=self.access.tls
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.unavailable(error) from None
        if answer.status == 200:
            return answer
        try:
            message = (await answer.text(errors="replace"))[:MAX_ERROR_CHARS]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.unavailable(error) from None
        finally:
            answer.close()
        raise error_of(answer.status, _message_of(message), self.name)

    def unavailable(self, error: Exception) -> Unavailable:
        """Return the error of a call that failed below HTTP."""
        if isinstance(error, aiohttp.ClientConnectorError) and error.strerror:
            return Unavailable(f"server {self.name} takes no connection: {error.strerror}")
        return Unavailable(f"server {self.name}: {str(error) or type(error).__name__}")


def _message_of(text: str) -> str:
    """Return the message in an error's body, in OpenAI's form or as it is."""
    try:
        body = msgspec.json.decode(text)
        return str(body["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return text


CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
CONNECTOR = "vllm:tandem_loans_given_total"
"""Counter that only a server with TandemConnector has."""
PROGRESS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")
"""Counters that grow whenever the engine steps."""
RUNNING, WAITING, USE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
READ = "|".join((RUNNING, WAITING, USE, CONNECTOR, *PROGRESS))
SAMPLE = re.compile(rf"^({READ})(?:\{{[^}}]*\}})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """Size of a server's KV cache, over all its data-parallel ranks."""

    block_tokens: int
    num_blocks: int
    caches_prefixes: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a server at one moment, of all its clients."""

    running: int
    waiting: int
    cache_use: float
    """Share of the blocks that running requests hold."""
    progress: float
    """Number that grows with each step of the engine."""
    lends: bool
    """Whether the server has TandemConnector."""


def cache_facts(page: str) -> CacheFacts | None:
    """Return the size of the cache; None where the page does not tell."""
    found = [dict(LABEL.findall(labels)) for labels in CACHE_CONFIG.findall(page)]
    if not found:
        return None
    try:
        block_tokens = int(found[0]["block_size"])
        num_blocks = sum(int(each["num_gpu_blocks"]) for each in found)
    except (KeyError, ValueError):
        return None
    return CacheFacts(block_tokens, num_blocks, found[0].get("enable_prefix_caching") == "True")


def load_of(page: str) -> Load | None:
    """Return the load; None for a page without vLLM's figures."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, value in SAMPLE.findall(page):
        sums[name] = sums.get(name, 0.0) + float(value)
        counts[name] = counts.get(name, 0) + 1
    if RUNNING not in sums:
        return None
    return Load(
        running=round(sums[RUNNING]),
        waiting=round(sums.get(WAITING, 0.0)),
        cache_use=sums.get(USE, 0.0) / counts.get(USE, 1),
        progress=sum(sums.get(name, 0.0) for name in PROGRESS),
        lends=CONNECTOR in sums,
    )


ASK_S = 10.0
"""Seconds for each answer. The token that is asked for waits behind the requests of a busy server."""
GENERATE = "/inference/v1/generate"
PROBE_TOKEN = 1
"""Token of the probe's prompt; every vocabulary has it."""


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Abilities of a server, and the model that it serves."""

    model: str
    """Name under which it serves its model."""
    root: str
    """Directory or repository that it names as the model; its name where it tells none."""
    adapters: tuple[tuple[str, str], ...]
    """Names and roots of its LoRA adapters."""
    max_context_tokens: int
    """Largest number of tokens of prompt and output; 0: it does not tell."""
    version: str
    """Version of vLLM; empty for another server."""
    block_tokens: int
    """Tokens of a KV block; 0: it does not tell."""
    num_blocks: int
    takes_token_ids: bool
    """Whether a prompt may be token ids."""
    returns_token_ids: bool
    """Whether its answers have token ids. Without them it serves text, and no stream can go on elsewhere."""
    lends: bool
    """Whether it has TandemConnector."""
    generates_tokens: bool
    """Whether it serves `/inference/v1/generate`."""

    def summary(self) -> str:
        """Return a line for people."""
        what = f"vLLM {self.version}" if self.version else "OpenAI-compatible"
        able = [
            "token ids" if self.returns_token_ids else "text only",
            f"blocks of {self.block_tokens}" if self.block_tokens else "",
            "lends (TandemConnector)" if self.lends else "",
            GENERATE if self.generates_tokens else "",
        ]
        return f"{what}: {', '.join(each for each in able if each)}"


async def ask(api: ServerApi) -> ServerFacts:
    """Ask a server. Raises Unavailable while it cannot answer, and for answers that are none of OpenAI's API."""
    status, text = await api.get("/v1/models", ASK_S)
    if status != 200:
        raise Unavailable(f"server {api.name} answers /v1/models with {status}: {text[:200]}")
    try:
        models = msgspec.json.decode(text, type=_Models).data
    except msgspec.MsgspecError as error:
        raise Unavailable(f"server {api.name}: /v1/models is none of OpenAI's API: {error}") from None
    bases = [model for model in models if not model.parent]
    if not bases:
        raise Unavailable(f"server {api.name} names no model at /v1/models")
    base = bases[0]
    version = await _version(api)
    takes_token_ids, returns_token_ids = await _token_ids(api, base.id)
    _, page = await api.get("/metrics", ASK_S)
    cache, load = cache_facts(page), load_of(page)
    # An empty request is refused in a way that tells whether the path is served: 403 without --enable-scale-out.
    generate, _ = await api.post(GENERATE, {}, ASK_S)
    return ServerFacts(
        model=base.id,
        root=base.root or base.id,
        adapters=tuple((each.id, each.root or each.id) for each in models if each.parent),
        max_context_tokens=base.max_model_len or 0,
        version=version,
        block_tokens=cache.block_tokens if cache is not None else 0,
        num_blocks=cache.num_blocks if cache is not None else 0,
        takes_token_ids=takes_token_ids,
        returns_token_ids=returns_token_ids,
        lends=load is not None and load.lends,
        generates_tokens=generate in (400, 422),
    )


async def _version(api: ServerApi) -> str:
    status, text = await api.get("/version", ASK_S)
    if status != 200:
        return ""
    try:
        answer: Any = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return ""
    return str(answer.get("version", "")) if isinstance(answer, dict) else ""


async def _token_ids(api: ServerApi, model: str) -> tuple[bool, bool]:
    """Have one token generated from one token; return whether such a prompt is taken, and token ids come back."""
    body = {"model": model, "prompt": [PROBE_TOKEN], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    status, text = await api.post(COMPLETIONS, body, ASK_S)
    if status != 200:
        if status >= 500 or status in (401, 403, 404):
            raise Unavailable(f"server {api.name} answers {COMPLETIONS} with {status}: {text[:200]}")
        return False, False
    try:
        (choice,) = msgspec.json.decode(text)["choices"]
        return True, isinstance(choice.get("token_ids"), list)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError):
        return True, False
