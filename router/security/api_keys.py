"""API keys: the caller's identity by the hash of its key.

A key is 256 random bits, so a plain SHA-256 protects it. The lookup by hash takes a time that reveals nothing about how
much of a wrong key is right.

Authentication of gRPC calls before any handler, so that a new method is closed until it is opened here.

Handlers decide what a caller may do. HTTP has `router/frontend/http/server.py`.
"""

import hashlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import yaml

from cluster.errors import Forbidden, ServiceError, StartError, Unauthenticated
from cluster.network.error_status import end_call
from cluster.network.rpc import OPEN_SERVICES
from router.security.config import ApiKey

log = logging.getLogger(__name__)


PREFIX = "tk-"
"""Prefix by which people and secret scanners recognise a key."""
MAX_KEY_CHARS = 512
LOOK_S = 1.0
"""Seconds between two looks at the file."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Identity and permissions of a caller."""

    name: str = ""
    """Name of the key."""
    tenant: str | None = None
    """Tenant of the key; None: the tenant that the request names."""
    models: frozenset[str] | None = None
    """Models that may be used; None: all."""
    operator: bool = False
    """Whether the caller may see other tenants' requests and the cluster."""

    def check_operator(self) -> None:
        """Raise Forbidden unless the caller is an operator."""
        if not self.operator:
            raise Forbidden("this key is not an operator's")

    def tenant_for(self, requested: str) -> str:
        """Return the tenant of a request that names `requested`.

        Raises Forbidden where that is another tenant.
        """
        if self.tenant is None:
            return requested
        if requested not in ("", self.tenant):
            raise Forbidden(f"this key does not belong to tenant {requested!r}", "tenant")
        return self.tenant


ANYBODY = Principal(operator=True)
"""Principal of every caller where there are no keys."""


class ApiKeys:
    """Keys of a file, which is read again when it changes; without a file nobody needs one."""

    def __init__(
        self,
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the keys.

        Raises StartError. `wall_clock` is the clock of expiry.
        """
        self._file = file
        self._clock, self._wall_clock = clock, wall_clock
        self._looked_at = clock()
        self._stamp = self._stamp_now()
        self._keys = _by_hash([] if file is None else read_keys(file))

    @property
    def required(self) -> bool:
        """Whether a key is required, also by an empty file: naming a file asks for keys."""
        return self._file is not None

    def principal(self, authorization: str | None) -> Principal:
        """Return the principal of a header `Bearer KEY`.

        Raises Unauthenticated.
        """
        if not self.required:
            return ANYBODY
        self._look()
        if not authorization:
            raise Unauthenticated("an API key is needed, as `authorization: Bearer KEY`", "authorization")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(key) <= MAX_KEY_CHARS:
            raise Unauthenticated("must be `Bearer KEY`", "authorization")
        api_key = self._keys.get(hash_of(key.strip()))
        if api_key is None:
            raise Unauthenticated("is not a known API key", "authorization")
        return self._principal_of(api_key)

    def named(self, name: str) -> Principal:
        """Return the principal of the key of this name as it is now, for work that goes on without its caller.

        Raises Unauthenticated where the key is gone or has expired.
        """
        if not self.required:
            return ANYBODY
        self._look()
        api_key = next((key for key in self._keys.values() if key.name == name), None)
        if api_key is None:
            raise Unauthenticated(f"the key {name!r} was removed", "authorization")
        return self._principal_of(api_key)

    def _principal_of(self, api_key: ApiKey) -> Principal:
        if api_key.expires is not None and api_key.expires.timestamp() <= self._wall_clock():
            raise Unauthenticated(f"the key {api_key.name!r} expired at {api_key.expires.isoformat()}", "authorization")
        return Principal(
            api_key.name, api_key.tenant, frozenset(api_key.models) if api_key.models else None, api_key.operator
        )

    def _look(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        if (stamp := self._stamp_now()) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _by_hash(read_keys(self._file))
        except StartError as error:
            log.error("the changed API keys cannot be used, the old ones stay in use: %s", error)
        else:
            log.info("%d API keys are known", len(self._keys))

    def _stamp_now(self) -> tuple[int, int, int] | None:
        if self._file is None:
            return None
        try:
            at = os.stat(self._file)
        except OSError:
            return None  # the reader reports the reason
        return at.st_ino, at.st_mtime_ns, at.st_size


def read_keys(file: Path) -> list[ApiKey]:
    """Read a keys file.

    Raises StartError naming entry and field, without their contents.
    """
    try:
        entries = yaml.safe_load(file.read_text())
    except OSError as error:
        raise StartError("api_keys_file", f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise StartError("api_keys_file", f"{file} is not YAML") from None
    if entries is None:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise StartError("api_keys_file", f"{file} must hold a list of mappings")
    keys = []
    for number, entry in enumerate(entries):
        try:
            keys.append(ApiKey.parse(entry))
        except StartError as error:
            raise StartError(f"api_keys_file.{number}.{error.field}", error.reason) from None
    return keys


def new_key() -> str:
    """Return a new random key."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """Return a key's hash in the format of ApiKey.sha256."""
    return hashlib.sha256(key.encode()).hexdigest()


def entry_for(
    key: str, name: str, tenant: str, models: Sequence[str], days: float | None, operator: bool = False
) -> str:
    """Return a YAML entry for a keys file.

    Raises StartError for an invalid name.
    """
    entry: dict[str, object] = {"name": name, "sha256": hash_of(key), "tenant": tenant}
    if operator:
        entry["operator"] = True
    if models:
        entry["models"] = list(models)
    if days is not None:
        expires = datetime.now(UTC) + timedelta(days=days)
        entry["expires"] = expires.isoformat(timespec="seconds")
    ApiKey.parse(entry)
    return "- " + yaml.safe_dump(entry, sort_keys=False, default_flow_style=True, width=100_000)


def _by_hash(keys: Iterable[ApiKey]) -> dict[str, ApiKey]:
    by_hash: dict[str, ApiKey] = {}
    names: set[str] = set()
    for key in keys:
        if key.sha256 in by_hash:
            raise StartError("api_keys_file", f"{by_hash[key.sha256].name!r} and {key.name!r} are the same key")
        if key.name in names:
            raise StartError("api_keys_file", f"two keys have the name {key.name!r}")
        by_hash[key.sha256] = key
        names.add(key.name)
    return by_hash


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that refuses calls without a key before their messages are read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Return the handler of a call, or one that refuses it."""
        if not handler_call_details.method.startswith(OPEN_SERVICES):
            try:
                self._keys.principal(bearer_of(handler_call_details.invocation_metadata))
            except ServiceError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def bearer_of(metadata: Any) -> str | None:
    """Return the first `authorization` in a call's metadata."""
    for name, value in metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else None
    return None


def _refusing(error: ServiceError) -> Any:
    async def refuse(_: Any, context: Any) -> AsyncIterator[bytes]:
        end_call(context, error)
        for nothing in tuple[bytes, ...]():
            yield nothing

    return grpc.stream_stream_rpc_method_handler(refuse)  # the messages are not read
