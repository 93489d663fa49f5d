"""Running of a cluster on Ray, for several commands."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.install import needing
from tandem.cli.common import console, run
from tandem.progress import ProgressSteps

if TYPE_CHECKING:
    from tandem.cluster_file import Cluster
    from tandem.ray.driver import Work


def run_cluster(file: Path, work: "Work") -> None:
    """Run the cluster of a file, on ports that the system chooses, until `work` is done."""
    from tandem.cluster_file import read_cluster

    cluster = read_cluster(file, None, 1, 1)
    named = {"cluster_name": f"batch-{os.getpid()}"} | cluster.settings.router  # beside a cluster that `tandem up` runs
    serve_cluster(cluster, {"port": 0, "http_port": None, "cluster_name": named["cluster_name"]}, {}, work=work)


def serve_cluster(
    cluster: "Cluster",
    router: dict[str, Any],
    worker: dict[str, Any],
    routers: int = 1,
    autoscale: bool = False,
    work: "Work | None" = None,
    verbose: bool = False,
) -> None:
    """Serve until Ctrl-C, `tandem down`, or the end of `work`; `router` and `worker` override the file's settings."""
    from engine.host.cpu_affinity import available_cores
    from kvtransfer.hardware.sysfs import read_host

    for each in cluster.models:
        console.print(f"tandem: {each.known_as}, {each.prefill} prefill + {each.decode} decode")
    cluster.check()  # before Ray is started in vain
    worker = cluster.default_engine(worker, len(read_host().gpus)) | worker
    # An engine that is told its cores keeps them for good, but workers come and go here.
    topology = cluster.plan(
        router, worker, available_cores(), routers, finds_cores=lambda config: config.finds_own_cores
    )
    with ProgressSteps(console, "tandem: ") as steps:
        steps("looking for a Ray cluster")
        with needing("ray"):
            from tandem.ray.driver import serve  # importing Ray takes a second: print something first
            from tandem.ray.pool_executor import planner_config
            from tandem.ray.settings import RaySettings
        planner = planner_config(cluster.settings.planner, topology.router) if autoscale else None
        settings = RaySettings.parse(cluster.settings.ray)
        settings.check(autoscale)
        run(serve(topology, steps, settings, planner, work, verbose))
