"""The link between a router and its process of files and batches: a folder with two sockets and `link.json`."""

import asyncio
import hmac
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ValidationError

from cluster.config import Config
from cluster.errors import StartError
from cluster.settings import DiscoverySettings, LogSettings
from router.batches.config import BatchesConfig

BATCHES_SOCKET, ROUTER_SOCKET, LINK_FILE = "batches.sock", "router.sock", "link.json"
CALLER, LINE = "x-tandem-caller", "x-tandem-line"
"""Headers with an `OnBehalf`: of a person's call that the router passes on, and of a batch's line."""
HEALTH = "/health"
"""Path of the router's socket that tells whether the router is stopping."""
LOOK_S = 0.1
"""Seconds between looks for the link of a router that starts."""


class OnBehalf(BaseModel):
    """Person for whom one of the two processes calls the other one."""

    tenant: str
    key: str
    """Name of the person's API key; empty where none is needed."""
    operator: bool = False
    """Whether all tenants' files and batches are shown."""
    deadline_s: float = 0.0
    """Seconds for a line, unless its body sets others."""

    def header(self) -> str:
        """Return the value of a header, which is ASCII whatever a tenant is called."""
        return json.dumps(self.model_dump())


class Link(BatchesConfig, LogSettings, DiscoverySettings):
    """Content of `link.json`: what the router tells when it starts."""

    key: str
    """Secret with which the two processes call each other."""
    router_id: str
    drain_s: float
    endpoints: tuple[str, ...]
    """Paths that a line may name."""
    max_body_bytes: int
    max_values: int
    """Largest number of JSON values in a line's body."""

    @classmethod
    def of(cls, config: Config, router_id: str, endpoints: Sequence[str], max_body_bytes: int, max_values: int) -> Self:
        """Return the link of a router with this configuration, with a new key."""
        same = set(cls.model_fields) & set(type(config).model_fields) - {"router_id"}
        return cls(
            **config.model_dump(include=same),
            key=secrets.token_urlsafe(32),
            router_id=router_id,
            endpoints=tuple(endpoints),
            max_body_bytes=max_body_bytes,
            max_values=max_values,
        )

    def write(self, folder: Path) -> None:
        """Write the file whole: its reader may come at any time."""
        beside = folder / f"{LINK_FILE}.new"
        beside.unlink(missing_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self.model_dump_json())
        beside.replace(folder / LINK_FILE)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file.

        Raises FileNotFoundError, and StartError for one of another version.
        """
        try:
            return cls.model_validate_json((folder / LINK_FILE).read_bytes())
        except ValidationError as error:
            raise StartError("batches_link", f"{LINK_FILE} is of another version: {error}") from None

    @classmethod
    async def awaited(cls, folder: Path) -> Self:
        """Read the file once the router has written it."""
        while True:
            try:
                return cls.read(folder)
            except FileNotFoundError:
                await asyncio.sleep(LOOK_S)


class RouterLink:
    """Link as the process of files and batches has it: a router that starts again has another key."""

    def __init__(self, folder: Path, now: Link) -> None:
        self.folder = folder
        self.now = now

    def admits(self, authorization: str | None) -> bool:
        """Return whether a header has the router's key."""
        return is_key(authorization, self.now.key) or is_key(authorization, self.key_now())

    def key_now(self) -> str:
        """Read the file again, and return the key."""
        self.now = Link.read(self.folder)
        return self.now.key


def is_key(authorization: str | None, key: str) -> bool:
    """Return whether a header is `Bearer KEY`."""
    return hmac.compare_digest((authorization or "").encode(), f"Bearer {key}".encode())
