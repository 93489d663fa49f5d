"""Objects in a bucket of S3 or a server that speaks its protocol, by NIXL's OBJ plugin.

The plugin reads, writes and looks up objects; it cannot list or remove them. So the bucket bounds itself: give it a
lifecycle rule that expires objects under the prefix.

Credentials, region and endpoint are those of AWS's own environment variables (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL).
"""

import os
import time
from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvcache.store.kv_store import ObjectMissing, Objects, ReadFailure, StoreError
from kvtransfer.ucx.nixl_lane import module

BACKEND = "OBJ"
PROBE = "tandem-store"
POLL_S = 0.001
TIMEOUT_S = 30.0
"""Longest time of one read or write, in seconds."""


class BucketObjects(Objects):
    """Objects under `prefix` of `bucket`."""

    reads_at_once = 64

    def __init__(self, bucket: str, prefix: str) -> None:
        """Open the bucket.

        Raises StoreError.
        """
        self._prefix = prefix.strip("/")
        endpoint = _parameters(bucket).get("endpoint_override", "")
        self.identity = f"s3:{endpoint}:{bucket}/{self._prefix}"
        self.keeps_objects = self.refusal_of(bucket)
        self._devices = count(1)
        self._lock = Lock()  # the agent's registrations are not safe on several threads
        api: Any = module("_api")
        try:
            self._agent = api.nixl_agent(f"store-{uuid4().hex[:12]}", api.nixl_agent_config(backends=[]))
            self._agent.create_backend(BACKEND, _parameters(bucket))
            self.write(PROBE, np.zeros(1, np.uint8))  # a bucket that cannot be written is noticed at start
        except Exception as error:  # NIXL's own types, which differ between its versions
            raise StoreError(f"bucket {bucket}: {error}") from error

    @staticmethod
    def refusal_of(bucket: str) -> str:
        """Return why objects of a bucket cannot be removed."""
        return f"bucket {bucket}: NIXL's OBJ plugin cannot remove objects; a lifecycle rule of the bucket expires them"

    def held(self, names: Sequence[str]) -> list[bool]:
        descriptors = [(0, 0, 0, self._path(name)) for name in names]
        try:
            replies = self._agent.query_memory(descriptors, BACKEND, mem_type="OBJ")
        except Exception as error:
            raise StoreError(f"looking up objects failed: {error}") from error
        return [each is not None for each in replies]

    def read(self, names: Sequence[str], into: Sequence[NDArray[np.uint8]]) -> list[ReadFailure | None]:
        try:
            self._transfer("READ", names, into)
        except StoreError:
            # The plugin does not say which object failed.
            return [self._read_one(name, row) for name, row in zip(names, into, strict=True)]
        return [None] * len(names)

    def write(self, name: str, stored: NDArray[np.uint8]) -> None:
        self._transfer("WRITE", [name], [stored])

    def remove(self, name: str) -> None:
        """Do nothing: the plugin cannot remove objects, and readers refuse a damaged one each time."""

    def used(self, name: str) -> None:
        """Do nothing: the bucket's lifecycle rule counts from the writing."""

    def close(self) -> None:
        del self._agent

    def _read_one(self, name: str, into: NDArray[np.uint8]) -> ReadFailure | None:
        try:
            if not self.held([name])[0]:
                return ObjectMissing(name)
            self._transfer("READ", [name], [into])
        except StoreError as error:
            return error
        return None

    def _transfer(self, operation: str, names: Sequence[str], rows: Sequence[NDArray[np.uint8]]) -> None:
        """Read or write objects.

        Raises StoreError when one of them fails, or after TIMEOUT_S.
        """
        agent = self._agent
        spans = [(row.ctypes.data, row.nbytes, 0) for row in rows]
        objects = [
            (0, row.nbytes, next(self._devices), self._path(name)) for name, row in zip(names, rows, strict=True)
        ]
        registered: list[Any] = []
        handle: Any = None
        try:
            with self._lock:
                memory = agent.get_reg_descs([(*span, "") for span in spans], "DRAM")
                registered.append(agent.register_memory(memory, backends=[BACKEND]))
                registered.append(agent.register_memory(agent.get_reg_descs(objects, "OBJ"), backends=[BACKEND]))
                local = agent.get_xfer_descs(spans, "DRAM")
                remote = agent.get_xfer_descs([each[:3] for each in objects], "OBJ")
                handle = agent.initialize_xfer(operation, local, remote, agent.name, backends=[BACKEND])
            give_up_at = time.monotonic() + TIMEOUT_S
            state = agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() >= give_up_at:
                    raise StoreError(f"no answer within {TIMEOUT_S:g} s")
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise StoreError(f"the transfer ended as {state}")
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{operation.lower()} of {len(names)} objects failed: {error}") from error
        finally:
            with self._lock:
                if handle is not None:
                    agent.release_xfer_handle(handle)
                for each in registered:
                    agent.deregister_memory(each, backends=[BACKEND])

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


def _parameters(bucket: str) -> dict[str, str]:
    """Return the plugin's parameters from AWS's environment variables; those not set are the plugin's defaults."""
    environ = os.environ
    parameters = {
        "bucket": bucket,
        "region": environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION", ""),
        "access_key": environ.get("AWS_ACCESS_KEY_ID", ""),
        "secret_key": environ.get("AWS_SECRET_ACCESS_KEY", ""),
        "session_token": environ.get("AWS_SESSION_TOKEN", ""),
    }
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", "")
    if endpoint:
        parameters |= {
            "endpoint_override": endpoint,
            "scheme": urlsplit(endpoint).scheme,
            "use_virtual_addressing": "false",
        }
    return {name: value for name, value in parameters.items() if value}
