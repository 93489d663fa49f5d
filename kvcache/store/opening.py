"""Opening of the stores that a worker's settings name."""

from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from cluster.errors import StartError
from kvcache.layout import Allocate, KvLayout, private_rows
from kvcache.store.block_store import BlockStore
from kvcache.store.bucket import BucketObjects
from kvcache.store.folder import FolderObjects
from kvcache.store.kv_store import KvStore
from kvcache.store.local import open_local_store
from kvcache.store.objects import ObjectFormat, Objects, StoreError
from kvcache.store.settings import StoreSettings

GIB = 1 << 30
MIN_SECRET_BYTES = 16


def open_stores(
    settings: StoreSettings, layout: KvLayout, model_fingerprint: bytes, allocate: Allocate = private_rows
) -> list[KvStore]:
    """Open the local and the shared store of a worker, as far as it has them.

    `allocate` returns memory for fetches. Raises StartError naming the setting.
    """
    local = open_local_store(settings, layout, model_fingerprint, allocate)
    shared = open_shared_store(settings, layout, model_fingerprint, allocate)
    return [store for store in (local, shared) if store is not None]


def open_shared_store(
    settings: StoreSettings, layout: KvLayout, model_fingerprint: bytes, allocate: Allocate = private_rows
) -> BlockStore | None:
    """Open the store, or return None without one.

    `allocate` returns memory for fetches. Raises StartError naming kv_store or kv_store_secret_file.
    """
    if not settings.kv_store:
        return None
    secret = secret_of(settings.kv_store_secret_file)
    object_format = ObjectFormat(layout.block_bytes, layout.kv_heads, model_fingerprint, secret)
    try:
        objects = _objects(settings, object_format)
    except (StoreError, ImportError) as error:
        raise StartError("kv_store", str(error)) from error
    return BlockStore(objects, object_format, settings.kv_store_writes == "computed", allocate=allocate)


def _objects(settings: StoreSettings, object_format: ObjectFormat) -> Objects:
    url = urlsplit(settings.kv_store)
    if url.scheme == "s3":
        return BucketObjects(url.netloc, url.path)
    max_bytes, max_age_s = settings.kv_store_gib * GIB, settings.kv_store_days * 86400
    return FolderObjects(Path(settings.kv_store), object_format.object_bytes, max_bytes, max_age_s)


def secret_of(path: Path | None) -> bytes:
    """Return the key of checksums made of a file's bytes; empty without a file."""
    if path is None:
        return b""
    try:
        content = path.read_bytes().strip()
    except OSError as error:
        raise StartError("kv_store_secret_file", f"{path}: {error.strerror}") from error
    if len(content) < MIN_SECRET_BYTES:
        raise StartError("kv_store_secret_file", f"{path} has fewer than {MIN_SECRET_BYTES} bytes")
    return blake2b(content, digest_size=64).digest()
