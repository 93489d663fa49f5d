"""Settings of files and batches."""

from pathlib import Path

from pydantic import Field, PositiveInt

from cluster.config import Config


class BatchesConfig(Config):
    """Settings of files and batches of a router's HTTP API."""

    batches_folder: Path | None = None
    """Folder of uploaded files and of batches, which the router creates, on a file system with hard links. Routers that
    share it take over the batches of one that died; on a shared volume they need `redis_url` for that. Unset: no files
    and batches."""
    max_file_mib: int = Field(default=200, ge=1, le=65_536)
    """Largest uploaded file in MiB."""
    max_files_mib_per_tenant: PositiveInt = 4096
    """Space in MiB of a tenant's files and batches, outputs included; beyond it, uploads are refused."""
    batch_concurrency: PositiveInt = 64
    """Lines of batches that a router has in flight at a time; tenants take turns."""
    batches_link: Path | None = None
    """Folder of the sockets between this router and `python -m batches FOLDER`, where something else runs that process
    for it, such as a container of its pod. Only its user may enter it. Unset: the router runs the process itself."""
