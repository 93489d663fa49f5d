"""Starts of a second worker: from a live one of the same model, from a cold disk, and from the page cache.

The model has Qwen2 0.5 B's shape. The new worker has its own copy of the directory, which the page cache forgets before
each start, and whose fingerprint this machine does not remember, as on a new host. A live worker serves the other copy.
Where control groups of this machine allow it, the disk also gets the bandwidth of a cloud volume.
"""

import asyncio
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.models import qwen2_half_b
from bench.report import OUT, Bar
from bench.tiers.folder import forget, read_all
from engine.config import WorkerConfig
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, start_role, stop_process
from tandem.topology import plan_topology

ROUNDS = 3
VOLUME_BYTES_PER_S = 125_000_000
"""Bandwidth of a cloud volume: AWS gives this to a gp3 volume for which no more is paid."""
GROUPS = Path("/sys/fs/cgroup/blkio")
"""Control groups of version 1 that limit bandwidth."""
SOURCES: dict[str, dict[str, Any]] = {
    "peer": {"weights_from": "peer"},
    "disk": {"weights_from": "disk"},
    "volume": {"weights_from": "disk"},
    "page cache": {},
}
"""Settings by the place where a start's weights are."""
ENTERING = 'echo $$ > "$0" && exec "$@"'


@contextmanager
def slow_disk(folder: Path) -> Iterator[Path]:
    """Make a control group whose processes read the folder's disk with a volume's bandwidth; yield its list of tasks.

    Raises OSError where that is not possible.
    """
    device = os.stat(folder).st_dev
    group = GROUPS / f"tandem-bench-{os.getpid()}"
    group.mkdir()
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {VOLUME_BYTES_PER_S}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        yield group / "tasks"
    finally:
        group.rmdir()


async def start(cluster: LocalCluster, client: Client, config: WorkerConfig, tasks: Path | None) -> tuple[float, str]:
    """Start a worker, within a control group where one is given; return its seconds and the source of its weights."""
    config = config.model_copy(update={"routers": (cluster.router.joined_at,), "drain_s": 0.0})

    def entered(command: list[str]) -> list[str]:
        return command if tasks is None else ["sh", "-c", ENTERING, str(tasks), *command]

    role = await start_role("decode_worker", config.worker_id, config, entered)
    try:
        while True:
            (model,) = (await client.cluster_status()).models
            for worker in model.workers:
                if worker.worker_id == config.worker_id:
                    return worker.start_seconds, worker.weights_source
            await asyncio.sleep(0.05)
    finally:
        await stop_process(role.process)


def copied(model: Path, folder: str) -> Path:
    return Path(shutil.copytree(model, Path(folder) / model.name)).absolute()


def slow_disk_or_reason(folder: Path) -> tuple[AbstractContextManager[Path | None], str]:
    """Return a slow disk, and no reason; or none, and why."""
    if not os.access(GROUPS, os.W_OK):
        return nullcontext(), f"{GROUPS} is not there, or not ours to change"
    return slow_disk(folder), ""


async def measure(progress: Progress) -> dict[str, Any]:
    model = qwen2_half_b(OUT / "qwen2-0.5b").absolute()
    slow, reason = slow_disk_or_reason(OUT)
    figures: dict[str, Any] = {"volume_not_measured": reason} if reason else {}
    seconds: dict[str, list[float]] = {name: [] for name in SOURCES if name != "volume" or not reason}
    disk_bytes_per_s: list[float] = []
    task = progress.add_task("starts of a worker", total=ROUNDS * len(seconds))
    settings = {"kv_memory_mib": 256}
    cores = sorted(os.sched_getaffinity(0))
    topology = plan_topology(0, 1, {"model": model, "port": 0}, settings | {"model": model}, cores)
    with slow as tasks, tempfile.TemporaryDirectory(dir=OUT) as folder:
        own = copied(model, folder)
        files = list(own.glob("*.safetensors"))
        async with LocalCluster(topology) as cluster, Client(cluster.address) as client:
            for number in range(ROUNDS):
                forget(files)
                disk_bytes_per_s.append(read_all(files))
                for name in seconds:
                    for file in files:
                        os.utime(file)  # a file of another time has no fingerprint that is remembered
                    if name != "page cache":
                        forget(files)
                    wanted = {"model": own, "worker_id": f"{name.replace(' ', '-')}-{number}"}
                    config = WorkerConfig.parse(settings | wanted | SOURCES[name])
                    took, source = await start(cluster, client, config, tasks if name == "volume" else None)
                    assert source == ("peer decode-0" if name == "peer" else name.replace("volume", "disk")), source
                    seconds[name].append(took)
                    progress.advance(task)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    figures |= {f"{name}_s": value for name, value in medians.items()}
    figures["disk_mb_per_s"] = statistics.median(disk_bytes_per_s) / 1e6
    figures["peer / disk"] = medians["peer"] / medians["disk"]
    if not reason:
        figures["peer / volume"] = medians["peer"] / medians["volume"]
    return figures


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    disk = f"this disk, {figures['disk_mb_per_s']:.0f} MB/s"
    bars = [Bar(f"start of a second worker, 0.5 B shape: from a peer / from {disk}, cold", figures["peer / disk"], 0.5)]
    if "peer / volume" in figures:
        volume = f"a volume of {VOLUME_BYTES_PER_S // 10**6} MB/s"
        bars.append(Bar(f"the same / from {volume}, cold", figures["peer / volume"], 0.5))
    return bars
