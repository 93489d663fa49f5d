"""Space on disk that a tenant's files may take, while several are being written. Pure."""

from collections import Counter

from cluster.errors import InvalidRequest


class TenantSpace:
    """Bound on the bytes of each tenant's files and batches."""

    def __init__(self, max_mib: int) -> None:
        self._max_mib = max_mib
        self._settled: dict[str, int] = {}
        """Bytes on disk besides files that this process is writing, by tenant with such files."""
        self._incoming: Counter[str] = Counter()
        """Bytes of files that this process is writing."""
        self._num_writing: Counter[str] = Counter()

    def begin(self, tenant: str, on_disk: int) -> None:
        """Begin a file; `on_disk` are all bytes of the tenant now."""
        self._num_writing[tenant] += 1
        self._settled[tenant] = max(0, on_disk - self._incoming[tenant])

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of a file.

        Raises InvalidRequest for bytes beyond the limit, which are not counted.
        """
        if self._settled[tenant] + self._incoming[tenant] + num_bytes > self._max_mib << 20:
            limit = f"{self._max_mib} MiB of files and batches (max_files_mib_per_tenant): delete some files"
            raise InvalidRequest("file", f"tenant {tenant!r} may have {limit}")
        self._incoming[tenant] += num_bytes

    def end(self, tenant: str, num_bytes: int, is_kept: bool) -> None:
        """End a file of so many counted bytes."""
        self._incoming[tenant] -= num_bytes
        self._settled[tenant] += num_bytes if is_kept else 0
        self._num_writing[tenant] -= 1
        if not self._num_writing[tenant]:
            del self._num_writing[tenant], self._incoming[tenant], self._settled[tenant]
