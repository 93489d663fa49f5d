"""All batches that a process runs: it looks for open ones, claims them, and runs several at a time."""

import asyncio
import logging
import time
from collections import Counter

from batches.claims import Claims
from batches.run import Run, Surroundings
from batches.storage.file_store import BatchFolder, BatchStore
from cluster.errors import TandemError
from cluster.process.tasks import Tasks, happens

log = logging.getLogger(__name__)

SCAN_S = 1.0
"""Seconds between looks for batches of other processes."""
MAX_RUNS, MAX_RUNS_PER_TENANT = 64, 8
"""Batches that a process runs at a time; further ones wait."""
REST_S = 10.0
"""Seconds until a batch that could not go on is taken up again."""
CLEAN_S = 3600.0
"""Seconds between removals of files that expired, and of what died processes left."""


class BatchRunner:
    """Runner of one process."""

    def __init__(self, batches: BatchStore, claims: Claims, around: Surroundings) -> None:
        self._batches = batches
        self._claims = claims
        self._around = around
        self._scanning = Tasks("no batch is looked for any more")
        self._running = Tasks("a batch is run no more")
        self._runs: set[str] = set()
        self._claimed: dict[str, Run] = {}
        self._tenants: Counter[str] = Counter()
        """Runs by the name of their tenant's folder."""
        self._resting: dict[str, float] = {}
        """Times from which batches that failed may be taken up again."""
        self._woken = asyncio.Event()
        self._clean_at = 0.0

    def start(self) -> None:
        self._scanning.spawn(self._scan())

    def changed(self, batch_id: str) -> None:
        """Look at once at a batch that was made or cancelled."""
        if (run := self._claimed.get(batch_id)) is not None:
            run.look()
        self._woken.set()

    async def idle(self, timeout_s: float) -> None:
        """Wait until no run is left, for so long at most."""
        await self._running.join(timeout_s)

    async def close(self) -> None:
        """Stop all runs where they are; another process takes them up."""
        await self._scanning.close()
        await self._running.close()
        await self._claims.close()

    async def _scan(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self._look()
            except OSError as error:
                log.error("batches_folder cannot be read: %s", error)
            except Exception:  # a bug here must not end all batches
                log.exception("the search for batches failed")
            await happens(self._woken, SCAN_S)

    async def _look(self) -> None:
        """Begin runs of batches that nobody runs."""
        if self._around.drain.draining:
            return
        now = time.monotonic()
        if now >= self._clean_at:
            self._clean_at = now + CLEAN_S
            await asyncio.to_thread(self._around.files.clean)
            await asyncio.to_thread(self._batches.clean)
        for batch in await asyncio.to_thread(self._batches.open_of, None):
            if len(self._runs) >= MAX_RUNS:
                return
            is_full = self._tenants[batch.tenant_key] >= MAX_RUNS_PER_TENANT
            if batch.id in self._runs or is_full or self._resting.get(batch.id, now) > now:
                continue
            self._tenants[batch.tenant_key] += 1
            self._runs.add(batch.id)
            self._running.spawn(self._run(batch))

    async def _run(self, batch: BatchFolder) -> None:
        try:
            await self._run_if_free(batch)
        except (OSError, TandemError) as error:
            log.error("%s cannot go on, next attempt in %g s: %s", batch.id, REST_S, error)
            self._resting[batch.id] = time.monotonic() + REST_S
        except Exception:  # a bug here ends this run
            log.exception("%s failed, next attempt in %g s", batch.id, REST_S)
            self._resting[batch.id] = time.monotonic() + REST_S
        else:
            self._resting.pop(batch.id, None)
        finally:
            self._runs.discard(batch.id)
            self._tenants[batch.tenant_key] -= 1
            if not self._tenants[batch.tenant_key]:
                del self._tenants[batch.tenant_key]

    async def _run_if_free(self, batch: BatchFolder) -> None:
        claim = await self._claims.claim(batch)
        if claim is None:
            return
        run = self._claimed[batch.id] = Run(batch, claim, self._around)
        try:
            await run.to_end()
        finally:
            del self._claimed[batch.id]
            await claim.release()
