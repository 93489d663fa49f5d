"""Files and batches of a process: stores, runner, and what the HTTP paths do with them."""

import time
from collections.abc import Callable
from functools import partial

from batches.claims import Claims
from batches.lines import FRAME_BYTES, Handle, InputLimits
from batches.run import Surroundings
from batches.runner import BatchRunner
from batches.storage.disk import Disk, TenantSpace, check_folder
from batches.storage.file_store import BatchStore, FileStore
from cluster.fair_turns import FairTurns
from cluster.process.life import Drain
from router.batches.link import Link
from router.frontend.http.body.fields import parse_object

UPLOADS, UPLOADS_PER_TENANT = 256, 32
"""Files that are uploaded at a time. Each takes a quarter of a MiB."""


class Batches:
    """Files and batches of one process."""

    def __init__(
        self, link: Link, handle: Handle, drain: Drain, claims: Claims, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the folder.

        Raises StartError where it cannot be used.
        """
        root, disk = link.batches_folder, Disk()
        assert root is not None, "otherwise there is no such process"
        check_folder(root, disk)
        self.clock = clock
        self.max_file_bytes = link.max_file_mib << 20
        self.space = TenantSpace(link.max_files_mib_per_tenant)
        self.uploads = FairTurns(UPLOADS, UPLOADS_PER_TENANT)
        """Turns of files that are being written; others are not read yet."""
        self.files = FileStore(root, disk, clock)
        self.batches = BatchStore(root, disk, clock)
        self.endpoints = link.endpoints
        around = Surroundings(
            files=self.files,
            disk=disk,
            handle=handle,
            endpoints=link.endpoints,
            parse=partial(parse_object, max_values=link.max_values),
            limits=InputLimits(link.max_body_bytes + FRAME_BYTES),
            drain=drain,
            turns=FairTurns(link.batch_concurrency, link.batch_concurrency),
            concurrency=link.batch_concurrency,
            clock=clock,
        )
        self.runner = BatchRunner(self.batches, claims, around)

    async def close(self) -> None:
        await self.runner.close()
