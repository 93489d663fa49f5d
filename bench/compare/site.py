"""`python bench/compare/site.py`: a router, a prefill and a decode worker of the sim engine, of the tree on PYTHONPATH.

Prints one line of JSON, the router's address and the process ids by role, and serves until its input ends. It imports
nothing of this folder, so that it also starts an older tree.
"""

import asyncio
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.models import sim_model
from cluster.process_tree import children
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

STEP_MS = 20.0


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = sim_model(Path(folder) / "sim", context=4096)
        # Decode workers seem slow at prompts, so that every prompt is lent.
        router = {"model": model, "port": 0, "decode_prefill_tokens_per_s": 100.0, "learn_rates": False}
        worker = {"model": model, "engine": "sim", "kv_memory_mib": 64, "sim_reads": "last"}
        topology = plan_topology(1, 1, router, worker, sorted(os.sched_getaffinity(0)))
        paced = tuple(config.model_copy(update={"sim_step_ms": STEP_MS}) for config in topology.decode)
        async with LocalCluster(replace(topology, decode=paced)) as cluster:
            pids = {"router": [cluster.router.pid], "fronts": [], "engines": []}
            for worker_process in cluster.workers:
                pids["fronts"].append(worker_process.pid)
                pids["engines"] += children(worker_process.pid)
            print(json.dumps({"address": cluster.address, "pids": pids}), flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
