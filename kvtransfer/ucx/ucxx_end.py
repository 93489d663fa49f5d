"""One end of a `ucxx` link: a UCX worker of its own, and its messages.

Each link has a worker, because destroying the worker surely ends its messages in flight. Both ends use UCX's error
handling: closing an endpoint by force then fails its messages, whatever the peer does. This rules out shared memory for
tagged messages, which would be several times faster on one host; but without error handling a lender killed in mid-read
crashed its borrower inside UCX.
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
"""Progress calls per turn of a worker; each moves up to 512 KiB."""
READ_BY_RECEIVER = {"RNDV_SCHEME": "get_zcopy"}
"""UCX options by which the receiver fetches large messages where possible, so that no other process writes its memory.
"""


class Ucx:
    """The library, with one context for this process."""

    def __init__(self) -> None:
        """Load the library.

        Raises TransportUnavailable.
        """
        environment = dict(os.environ)
        os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")  # ucxx sets this too, but too late for libucx
        try:
            # ucxx loads libucx only together with a GPU library that is not needed here.
            self._libraries: list[Any] = import_module("libucx").load_library()
            import_module("ucxx")
            self.api: Any = import_module("ucxx._lib.libucxx")
            self.array: Any = import_module("ucxx._lib.arr").Array
        except (ImportError, OSError) as error:
            raise TransportUnavailable(f"ucxx does not load: {error}") from error
        finally:
            _restore(environment)  # importing ucxx sets UCX options for every library and child of this process
        options = {key: value for key, value in READ_BY_RECEIVER.items() if f"UCX_{key}" not in os.environ}
        features = (self.api.Feature.TAG, self.api.Feature.WAKEUP)
        try:
            self.context: Any = self.api.UCXContext(options, features)
        except Exception as error:  # ucxx creates its exception types at run time
            raise TransportUnavailable(f"ucxx does not start: {error}") from error

    def destroy_worker(self, worker: Any) -> None:
        """Destroy a worker through UCX itself; ucxx would keep it while one of its requests is not completed."""
        # leaked on purpose (a few kilobytes), so that ucxx never destroys it a second time
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))
        os.close(worker.epoll_file_descriptor)
        (library,) = [library for library in self._libraries if "libucp.so" in library._name]
        library.ucp_worker_destroy(ctypes.c_void_p(worker.handle))

    def tag(self, value: int) -> Any:
        return self.api.UCXXTag(value)


class Memory:
    """A pool in ucxx's terms."""

    def __init__(self, ucx: Ucx, pool: AnyPool) -> None:
        """Wrap the pool.

        Raises TransportUnavailable for GPU memory where UCX has no CUDA.
        """
        self._ucx = ucx
        self._pool = pool
        if isinstance(pool, DevicePool) and not ucx.context.cuda_support:
            raise TransportUnavailable("ucxx has no CUDA here, and the pool is on a GPU")

    def piece(self, offset: int, length: int) -> Any:
        """Return ucxx's array of `length` bytes at `offset`."""
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
    """UCX worker of one link.

    Used by one thread. After `destroy` nothing it received into is written any more.
    """

    def __init__(self, ucx: Ucx) -> None:
        """Create the worker.

        Raises TransferError where UCX fails, as do all methods.
        """
        self._ucx = ucx
        with _typed("start"):
            self._worker: Any = ucx.api.UCXWorker(ucx.context)
            self._worker.init_blocking_progress_mode()
        self._endpoint: Any = None
        self._pending: deque[tuple[int, Any]] = deque()  # by tag; ucxx cancels a request that no object refers to
        self.armed = False
        """Whether nothing needs progress until `fileno` is readable."""

    def fileno(self) -> int:
        return int(self._worker.epoll_file_descriptor)

    @property
    def address(self) -> bytes:
        return bytes(self._worker.address)

    def connect(self, address: bytes) -> None:
        """Connect for sending to the worker at `address`, which must be genuine."""
        with _typed("connect"):
            genuine = self._ucx.api.UCXAddress.create_from_buffer(address)
            self._endpoint = self._worker.create_endpoint_from_worker_address(genuine, True)
        self.armed = False

    def send(self, piece: Any, tag: int) -> None:
        """Send a piece.

        Its memory must stay unchanged until nothing is pending.
        """
        with _typed("send"):
            self._pending.append((tag, self._endpoint.tag_send(piece, self._ucx.tag(tag))))
        self.armed = False

    def receive(self, piece: Any, tag: int) -> None:
        """Receive into a piece, whose memory is UCX's until nothing is pending."""
        with _typed("receive"):
            self._pending.append((tag, self._worker.tag_recv(piece, self._ucx.tag(tag))))
        self.armed = False

    def progress(self) -> None:
        """Progress until there is nothing to do, or other links should have their turn."""
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
        """Return the tag of the oldest message not known to be done."""
        return self._pending[0][0] if self._pending else None

    def destroy(self) -> None:
        """Destroy the worker: unfinished messages never complete, whatever the peer does.

        Takes milliseconds.
        """
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
    except Exception as error:  # ucxx creates its exception types at run time
        raise TransferError(f"UCX fails to {what}: {error}") from error


def _restore(environment: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("UCX_") and name not in environment]:
        del os.environ[name]
