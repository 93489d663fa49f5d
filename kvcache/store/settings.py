"""Settings of the stores below a worker's pool."""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from cluster.config import Config


class StoreSettings(Config):
    """Part of a worker's settings."""

    kv_host_memory_mib: NonNegativeInt = 0
    """Host memory for evicted blocks, in MiB, as files in /dev/shm, which must be that large. Blocks are restored from
    there where that is faster than computing."""
    kv_host_memory_shared: bool = False
    """Whether workers of this host share one such memory, as large as the largest of them sets it: blocks that one
    evicted are restored by another of the same model."""
    kv_disk_dir: Path | None = None
    """Directory for evicted blocks, beside host memory. Its contents outlive the worker. Workers of one host may share
    it: those of one model share its blocks. A block that was not used for a week is removed."""
    kv_disk_mib: PositiveInt = 4096
    """Largest size of one model's blocks in `kv_disk_dir`, in MiB. The blocks used longest ago are removed."""
    kv_store: str = ""
    """Store for KV blocks that all workers share and that outlives them: a folder that all of them mount, or
    s3://bucket/prefix. Blocks are fetched from there where that is faster than computing them, and verified. S3 takes
    its endpoint, region and credentials from AWS's environment variables, and needs a lifecycle rule that expires
    objects. Only workers of equal weights and layout share blocks, with any `tensor_parallel` and `pipeline_parallel`.
    Default: no store."""
    kv_store_gib: PositiveInt = 64
    """Largest size of one model's blocks in a folder, in GiB. The blocks used longest ago are removed. With several
    writers it may be exceeded for some seconds."""
    kv_store_days: PositiveFloat = 7.0
    """Days after which a block of a folder is removed if it was not used."""
    kv_store_writes: Literal["evicted", "computed"] = "evicted"
    """Blocks that are written to the store. evicted: those that leave a worker's pool. computed: all, at once, so that
    other workers find them and none is lost with a worker, for more writing."""
    kv_store_secret_file: Path | None = None
    """File with a secret, at least 16 bytes, that signs blocks in the store. Without it whoever can write there can
    plant wrong KV. All workers need the same secret; hashing costs about a millisecond per MiB. Default: unsigned."""

    @field_validator("kv_store")
    @classmethod
    def _is_folder_or_bucket(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if separator and (scheme != "s3" or not rest.partition("/")[0]):
            raise ValueError(f"{value!r} is neither a folder nor s3://bucket/prefix")
        return value
