"""Files and batches of a router: stores, runner, and what the HTTP paths do with them."""

import time
from collections.abc import Callable
from pathlib import Path

from cluster.errors import StartError
from cluster.fair_turns import FairTurns
from cluster.process.life import Drain
from router.batches.claims.claims import Claims, LockClaims
from router.batches.config import BatchesConfig
from router.batches.lines.input_check import InputLimits
from router.batches.lines.line import Handle, Parse
from router.batches.pace import StartPace
from router.batches.run import Surroundings
from router.batches.runner import BatchRunner
from router.batches.storage.batch_store import BatchStore
from router.batches.storage.disk import Disk
from router.batches.storage.file_store import FileStore
from router.batches.storage.space import TenantSpace
from router.batches.threads import Threads

UPLOADS, UPLOADS_PER_TENANT = 256, 32
"""Files that are uploaded at a time. Each takes a quarter of a MiB."""


class Batches:
    """Files and batches of one router."""

    def __init__(
        self,
        config: BatchesConfig,
        root: Path,
        handlers: dict[str, Handle],
        parse: Parse,
        max_line_bytes: int,
        drain: Drain,
        make_claims: Callable[[Threads], Claims] = LockClaims,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the folder.

        Raises StartError where it cannot be used.
        """
        disk = Disk()
        check_folder(root, disk)
        self.clock = clock
        self.max_file_bytes = config.max_file_mib << 20
        self.space = TenantSpace(config.max_files_mib_per_tenant)
        self.uploads = FairTurns(UPLOADS, UPLOADS_PER_TENANT)
        """Turns of files that are being written; others are not read yet."""
        self.threads = Threads()
        self.files = FileStore(root, disk, clock)
        self.batches = BatchStore(root, disk, config.max_open_batches_per_tenant, clock)
        self.endpoints = tuple(handlers)
        around = Surroundings(
            files=self.files,
            disk=disk,
            threads=self.threads,
            handlers=handlers,
            parse=parse,
            limits=InputLimits(max_line_bytes),
            drain=drain,
            turns=FairTurns(config.batch_concurrency, config.batch_concurrency),
            pace=StartPace(),
            concurrency=config.batch_concurrency,
            clock=clock,
        )
        self.runner = BatchRunner(self.batches, make_claims(self.threads), around)

    async def close(self) -> None:
        await self.runner.close()
        self.threads.close()


def check_folder(root: Path, disk: Disk) -> None:
    """Create the folder and try all calls that are needed there.

    Raises StartError where one of them fails.
    """
    try:
        disk.make_folder(root)
        probe = root / "probe"
        disk.remove(probe)
        disk.write_once(probe, b"")
        disk.remove(probe)
    except OSError as error:
        raise StartError("batches_folder", f"cannot be used: {root}: {error.strerror}") from None
