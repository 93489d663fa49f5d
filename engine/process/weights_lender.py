"""The lending side of a start from a peer: an engine's weight files, readable while somebody borrows them.

Nothing is mapped or registered without a borrower, and each borrower holds the files by a stream of its own: see
`engine/worker/worker_service.py`. The compute thread has no part in it.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from engine.errors import ModelRefused
from engine.messages.from_engine import WeightsOffered
from engine.messages.to_engine import LendWeights, ReturnWeights, ToEngine
from engine.model.model_dir import ModelDir
from engine.weights.mapped_files import MappedFiles
from engine.weights.offer import WeightFile
from kvtransfer.errors import TransferError
from kvtransfer.transport import Transport

log = logging.getLogger(__name__)


class WeightsLender:
    """Lender used by the thread that handles messages; files are opened on a thread of its own."""

    def __init__(
        self,
        model: Path,
        is_loaded: Callable[[bytes], bool],
        open_transport: Callable[[], Transport],
        wake: Callable[[], None],
    ) -> None:
        """Create the lender.

        `is_loaded` tells whether the engine computes with the weights of a fingerprint. `wake` is called, on another
        thread, when `answers` has more.
        """
        self._model = model
        self._is_loaded = is_loaded
        self._open_transport = open_transport
        self._wake = wake
        self._answers: SimpleQueue[WeightsOffered] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "weights")
        self._borrowers: set[int] = set()
        self._transport: Transport | None = None
        self._offered: WeightsOffered | None = None

    def passes(self, message: ToEngine) -> bool:
        """Return whether the core must handle the message; otherwise it was for the lender."""
        if isinstance(message, LendWeights):
            self._thread.submit(self._lend, message.borrower)
        elif isinstance(message, ReturnWeights):
            self._thread.submit(self._take_back, message.borrower)
        else:
            return True
        return False

    def answers(self) -> list[WeightsOffered]:
        """Return the answers since the last call."""
        answers = []
        while not self._answers.empty():  # only this method takes from it
            answers.append(self._answers.get_nowait())
        return answers

    def close(self) -> None:
        """End all loans."""
        self._thread.submit(self._close)
        self._thread.shutdown()

    # ------------------------------------------------------------------ on its thread

    def _lend(self, borrower: int) -> None:
        self._borrowers.add(borrower)
        try:
            offered = self._offered = self._offered or self._open()
            self._answers.put(WeightsOffered(borrower, offered.files, offered.fingerprint, offered.endpoint))
        except (OSError, ModelRefused, TransferError) as error:
            log.warning("the weights cannot be lent: %s", error)
            self._answers.put(WeightsOffered(borrower, refused=str(error)))
        self._wake()

    def _open(self) -> WeightsOffered:
        directory = ModelDir.open(self._model)
        paths = directory.weight_files()
        fingerprint = directory.weights_fingerprint()  # remembered, unless a file changed
        if not self._is_loaded(fingerprint):
            raise ModelRefused("the weight files have changed since they were loaded")
        mapped = MappedFiles(paths)
        self._transport = self._open_transport()
        endpoint = self._transport.register(mapped.pool)
        files = tuple(map(WeightFile.of, paths))
        return WeightsOffered(0, files, fingerprint, endpoint)

    def _take_back(self, borrower: int) -> None:
        self._borrowers.discard(borrower)
        if not self._borrowers:
            self._close()

    def _close(self) -> None:
        self._offered = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None
