"""API keys: who asks, by what is known of a key's hash.

A key is 256 random bits, so that a plain SHA-256 keeps it: there is nothing to guess. It is looked up by its hash:
how long that takes says nothing of how much of a wrong one is right.
"""

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml

from cluster.errors import Forbidden, StartError, Unauthenticated
from router.security.config import ApiKey

log = logging.getLogger(__name__)

PREFIX = "tk-"
"""By which people, and scanners of repositories, know one."""
MAX_KEY_CHARS = 512
LOOK_S = 1.0
"""Between two looks at the file."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks, and what they may."""

    name: str = ""
    """Of the key."""
    tenant: str | None = None
    """None: whoever the request says."""
    models: frozenset[str] | None = None
    """None: all."""
    operator: bool = False
    """It may see what is everybody's."""

    def check_operator(self) -> None:
        """Raises Forbidden."""
        if not self.operator:
            raise Forbidden("this key is not an operator's")

    def tenant_for(self, asked: str) -> str:
        """Of a request that says so. Raises Forbidden where it is somebody else's."""
        if self.tenant is None:
            return asked
        if asked not in ("", self.tenant):
            raise Forbidden(f"this key is of another tenant than {asked!r}", "tenant")
        return self.tenant


ANYBODY = Principal(operator=True)
"""Where there are no keys."""


class ApiKeys:
    """Those of the settings, and of a file that is read again when it changes."""

    def __init__(
        self,
        configured: Iterable[ApiKey] = (),
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`wall_clock` is that by which keys expire. Raises StartError."""
        self._configured = tuple(configured)
        self._file = file
        self._clock, self._wall_clock = clock, wall_clock
        self._looked_at = clock()
        self._stamp = self._stamp_now()
        self._keys = _by_hash([*self._configured, *self._read()])

    @property
    def required(self) -> bool:
        """Also by a file that is empty: whoever names one wants keys."""
        return bool(self._configured) or self._file is not None

    def principal(self, authorization: str | None) -> Principal:
        """Of a header `Bearer KEY`. Raises Unauthenticated."""
        if not self.required:
            return ANYBODY
        self._look()
        if not authorization:
            raise Unauthenticated("an API key is needed, as `authorization: Bearer KEY`", "authorization")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(key) <= MAX_KEY_CHARS:
            raise Unauthenticated("must be `Bearer KEY`", "authorization")
        found = self._keys.get(hash_of(key.strip()))
        if found is None:
            raise Unauthenticated("is no key that is known here", "authorization")
        if found.expires is not None and found.expires.timestamp() <= self._wall_clock():
            raise Unauthenticated(f"the key {found.name!r} expired at {found.expires.isoformat()}", "authorization")
        return Principal(found.name, found.tenant, frozenset(found.models) if found.models else None, found.operator)

    def _look(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        if (stamp := self._stamp_now()) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _by_hash([*self._configured, *self._read()])
        except StartError as error:
            log.error("the API keys have changed and cannot be used, so the old ones are: %s", error)
        else:
            log.info("%d API keys are known", len(self._keys))

    def _stamp_now(self) -> tuple[int, int, int] | None:
        if self._file is None:
            return None
        try:
            at = os.stat(self._file)
        except OSError:
            return None  # who reads it says why
        return at.st_ino, at.st_mtime_ns, at.st_size

    def _read(self) -> list[ApiKey]:
        return [] if self._file is None else read_keys(self._file)


def read_keys(file: Path) -> list[ApiKey]:
    """Raises StartError, which names the entry and its field, and never says what is there."""
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
    """Nobody can draw the same."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """As ApiKey.sha256 has it."""
    return hashlib.sha256(key.encode()).hexdigest()


def entry_for(
    key: str, name: str, tenant: str, models: Sequence[str], days: float | None, operator: bool = False
) -> str:
    """Of a keys file: YAML. Raises StartError for a name that is none."""
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
    found: dict[str, ApiKey] = {}
    names: set[str] = set()
    for key in keys:
        if key.sha256 in found:
            raise StartError("api_keys", f"{found[key.sha256].name!r} and {key.name!r} are the same key")
        if key.name in names:
            raise StartError("api_keys", f"two are called {key.name!r}")
        found[key.sha256] = key
        names.add(key.name)
    return found
