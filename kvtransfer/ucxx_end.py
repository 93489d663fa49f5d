"""One end of a `ucxx` link: a UCX worker of its own, and what is sent or received by it.

A worker for each link, because destroying it surely ends what is under way on it. Both ends use UCX's error handling:
closing an endpoint by force then fails its messages, whatever the peer does. That rules out shared memory for tagged
messages. Without it they are several times faster on one host, but a lender that was killed in mid-read took its
borrower along, in a segmentation fault within UCX (docs/benchmarks.md).
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kvtransfer.errors import TransferError, TransportUnavailable
from kvtransfer.transport import AnyPool, DevicePool, Pool

PROGRESS_ROUNDS = 64
"""So often a worker is progressed before others get their turn; a round moves up to 512 KiB."""
READ_BY_RECEIVER = {"RNDV_SCHEME": "get_zcopy"}
"""The receiver's worker fetches large messages where it can, so that nobody else writes into its memory."""


class Ucx:
    """The library, with one context for this process."""

    def __init__(self) -> None:
        """Raises TransportUnavailable."""
        environment = dict(os.environ)
        os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")  # as ucxx wants it, but that comes too late for libucx
        try:
            # ucxx loads libucx only together with a library for GPUs that nothing here needs.
            self._libraries: list[Any] = import_module("libucx").load_library()
            import_module("ucxx")
            self.api: Any = import_module("ucxx._lib.libucxx")
            self.array: Any = import_module("ucxx._lib.arr").Array
        except (ImportError, OSError) as error:
            raise TransportUnavailable(f"ucxx does not load: {error}") from error
        finally:
            _restore(environment)  # importing ucxx sets options of UCX for every library and child of this process
        options = {key: value for key, value in READ_BY_RECEIVER.items() if f"UCX_{key}" not in os.environ}
        features = (self.api.Feature.TAG, self.api.Feature.WAKEUP)
        try:
            self.context: Any = self.api.UCXContext(options, features)
        except Exception as error:  # ucxx makes its exception types at run time
            raise TransportUnavailable(f"ucxx does not start: {error}") from error

    def destroy_worker(self, worker: Any) -> None:
        """UCX's own, under the hands of ucxx, which would keep it as long as one of its requests is not completed."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))  # never destroyed a second time; it is a few kilobytes
        os.close(worker.epoll_file_descriptor)
        (library,) = [library for library in self._libraries if "libucp.so" in library._name]
        library.ucp_worker_destroy(ctypes.c_void_p(worker.handle))

    def tag(self, value: int) -> Any:
        return self.api.UCXXTag(value)


class Memory:
    """A pool, as ucxx takes it."""

    def __init__(self, ucx: Ucx, pool: AnyPool) -> None:
        """Raises TransportUnavailable for a GPU's memory where UCX has no CUDA."""
        self._ucx = ucx
        self._pool = pool
        if isinstance(pool, DevicePool) and not ucx.context.cuda_support:
            raise TransportUnavailable("ucxx has no CUDA here, and the pool is on a GPU")

    def piece(self, offset: int, length: int) -> Any:
        """ucxx's array of `length` bytes at `offset`."""
        if isinstance(self._pool, Pool):
            return self._ucx.array(self._pool.memory.reshape(-1)[offset : offset + length])
        return self._ucx.array(_OnGpu(self._pool.address + offset, length))


class _OnGpu:
    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class UcxEnd:
    """Used by one thread. After `destroy` nothing that was received into is written any more."""

    def __init__(self, ucx: Ucx) -> None:
        """Raises TransferError, as all that follows does, where UCX fails."""
        self._ucx = ucx
        with _typed("start"):
            self._worker: Any = ucx.api.UCXWorker(ucx.context)
            self._worker.init_blocking_progress_mode()
        self._endpoint: Any = None
        self._pending: deque[tuple[int, Any]] = deque()  # by tag; ucxx cancels a request that nobody holds
        self.armed = False
        """Nothing to progress until `fileno` is readable."""

    def fileno(self) -> int:
        return int(self._worker.epoll_file_descriptor)

    @property
    def address(self) -> bytes:
        return bytes(self._worker.address)

    def connect(self, address: bytes) -> None:
        """So that it can send to the worker of that address, which must be genuine."""
        with _typed("connect"):
            genuine = self._ucx.api.UCXAddress.create_from_buffer(address)
            self._endpoint = self._worker.create_endpoint_from_worker_address(genuine, True)
        self.armed = False

    def send(self, piece: Any, tag: int) -> None:
        """The memory must stay as it is until nothing is pending."""
        with _typed("send"):
            self._pending.append((tag, self._endpoint.tag_send(piece, self._ucx.tag(tag))))
        self.armed = False

    def receive(self, piece: Any, tag: int) -> None:
        """The memory is UCX's until nothing is pending."""
        with _typed("receive"):
            self._pending.append((tag, self._worker.tag_recv(piece, self._ucx.tag(tag))))
        self.armed = False

    def progress(self) -> None:
        """Until there is nothing to do, or others should have their turn."""
        with _typed("progress"):
            for _ in range(PROGRESS_ROUNDS):
                if not self._worker.progress_once() and self._worker.arm():
                    self.armed = True
                    break
            while self._pending and self._pending[0][1].completed:
                self._pending[0][1].check_error()
                self._pending.popleft()

    @property
    def oldest_pending(self) -> int | None:
        """The tag of the oldest message that is not known to be done."""
        return self._pending[0][0] if self._pending else None

    def destroy(self) -> None:
        """What is not done never will be, whatever the peer does; that takes milliseconds."""
        if self._endpoint is not None:
            self._endpoint.close_blocking()  # by force, so it does not wait for the peer
        self._worker.cancel_inflight_requests()
        for _ in range(PROGRESS_ROUNDS):
            self._worker.progress_once()
        halfway = any(not request.completed for _, request in self._pending)
        self._pending.clear()
        if halfway:  # messages that UCX has begun to receive cannot be cancelled
            self._ucx.destroy_worker(self._worker)
        self._endpoint = None
        self._worker = None


@contextmanager
def _typed(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ucxx makes its exception types at run time
        raise TransferError(f"UCX fails to {what}: {error}") from error


def _restore(environment: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("UCX_") and name not in environment]:
        del os.environ[name]
