"""Copy of the resources that an API server of Kubernetes lists, kept by the events of a watch. Pure."""

from typing import Any, Generic, Literal, TypeVar

import msgspec

from router.stock.sources.resources import Metadata, Resource
from router.stock.sources.servers import SourceFailed

GONE = 410
"""Status of a watch from a version that the server has forgotten."""
R = TypeVar("R", bound=Resource)


class Expired(Exception):
    """Error of a watch whose version the server has forgotten: the resources must be listed again."""


class _List(msgspec.Struct, Generic[R]):
    metadata: Metadata
    items: list[R] | None = None


class _Event(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Status(msgspec.Struct):
    """Error that the server tells."""

    code: int = 0
    message: str = ""


class Lines:
    """Lines of a stream that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are whole now, without empty ones."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line for line in whole if line.strip()]


class Mirror(Generic[R]):
    """Resources of one kind by name, as of `version`."""

    def __init__(self, kind: type[R]) -> None:
        of_list: Any = _List  # to mypy a class that is a value is no type
        self._of_list: msgspec.json.Decoder[_List[R]] = msgspec.json.Decoder(of_list[kind])
        self._of_event = msgspec.json.Decoder(_Event)
        self._of_object = msgspec.json.Decoder(kind)
        self.held: dict[str, R] = {}
        self.version = ""
        """Version from which a watch goes on; empty where the resources must be listed."""

    def listed(self, body: bytes) -> None:
        """Take over a list. Raises SourceFailed."""
        try:
            found = self._of_list.decode(body)
        except msgspec.MsgspecError as error:
            raise SourceFailed(f"a list has an unknown form: {error}") from None
        if not found.metadata.resource_version:
            raise SourceFailed("a list has no resourceVersion")
        self.held = {each.metadata.name: each for each in found.items or ()}
        self.version = found.metadata.resource_version

    def happened(self, line: bytes) -> None:
        """Take over an event. Raises Expired or SourceFailed, after which the resources must be listed."""
        try:
            event = self._of_event.decode(line)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=Status)
                self.refused(status.code, status.message)
            if event.type == "BOOKMARK":
                self.version = msgspec.json.decode(event.object, type=Resource).metadata.resource_version
                return
            changed = self._of_object.decode(event.object)
        except msgspec.MsgspecError as error:
            self.version = ""
            raise SourceFailed(f"an event has an unknown form: {error}") from None
        if event.type == "DELETED":
            self.held.pop(changed.metadata.name, None)
        else:
            self.held[changed.metadata.name] = changed
        self.version = changed.metadata.resource_version

    def refused(self, code: int, message: str) -> None:
        """Forget the version, and raise Expired or SourceFailed."""
        self.version = ""
        if code == GONE:
            raise Expired
        raise SourceFailed(f"Kubernetes answers {code}: {message}")
