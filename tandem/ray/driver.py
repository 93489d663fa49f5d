"""Driver of a cluster of Ray actors: `tandem up`, also submitted as a Ray job.

Ray places the actors; the driver keeps them running (`supervisor.py`) and takes orders (`control.py`). A stop goes from
the roles to Ray: each role closes its server and its engine process, then its actor ends, then a Ray cluster that was
started here.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")

import ray
import ray.exceptions

from cluster.errors import StartError
from cluster.network.tls import member_of
from cluster.process.life import Addresses
from cluster.process.tasks import Tasks, first_of
from planner.runtime import PlannerConfig
from tandem.members import await_members
from tandem.progress import ProgressSteps
from tandem.ray.control import NAMESPACE, ControlActor, Order, name_of
from tandem.ray.pool_executor import start_ray_planner
from tandem.ray.settings import RaySettings
from tandem.ray.supervisor import Supervisor, drivers_node
from tandem.topology import Topology

JOIN_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 100 << 20
"""Size of Ray's object store, near its minimum, since Tandem stores nothing there."""
RAY_ATTEMPTS, LATE = 3, "timed out during startup"
"""Attempts to start a Ray cluster, and Ray's words for a node that was not ready in time."""
NICENESS = "RAY_worker_niceness"
OF_ACTORS = {"env_vars": {NICENESS: os.environ[NICENESS]}}
"""Environment of actors on a cluster that was running. At Ray's default niceness of 15, another process that computes
would leave a server a thirtieth of a core."""
OF_OUR_OWN = {"gcs_rpc_server_reconnect_timeout_s": 8}
"""Ray settings of a cluster that ends with its driver. Where both are told to stop together, as by systemd, its parts
would otherwise wait a minute for the head to return."""


Work = Callable[[list[str]], Coroutine[Any, Any, object]]
"""Function called with the routers' gRPC addresses, once everything serves."""


async def serve(
    topology: Topology,
    say: ProgressSteps,
    settings: RaySettings | None = None,
    planner: PlannerConfig | None = None,
    work: Work | None = None,
    verbose: bool = False,
) -> None:
    """Start everything, print addresses, and return on SIGINT, SIGTERM or `tandem down`, or when `work` is done.

    With `planner` the pools size themselves. `verbose` prints the logs of Ray and of all roles, too. Raises TandemError
    with the cause of a failed start, and errors of `work`.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with _ray(say, verbose):
        # Ray installs handlers of its own when it starts; these must come after.
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop.set)
        supervisor = Supervisor(topology, settings or RaySettings(), say, autoscale=planner is not None)
        try:
            async with Tasks() as tasks:
                stopping = tasks.spawn(stop.wait())
                serving = tasks.spawn(_serve(supervisor, topology, say, stop, planner, work))
                await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
                say("stopping")
                if serving.done():
                    serving.result()
        finally:
            await supervisor.stop()
    say("stopped")


async def _serve(
    supervisor: Supervisor,
    topology: Topology,
    say: ProgressSteps,
    stop: asyncio.Event,
    planning: PlannerConfig | None,
    work: Work | None,
) -> None:
    """Serve until every role was told to stop by itself, or the work is done."""
    of_media: list[str] = []
    if topology.preprocessor is not None:
        say(
            "starting the preprocessor" + (f" and {len(topology.encoders)} encode workers" if topology.encoders else "")
        )
        of_media = await supervisor.start_media()
    say("starting the router")
    started = await supervisor.start_routers()
    addresses = [where.grpc for where in started]
    say(f"loading the model into {topology.num_workers} workers")
    of_workers = of_media + await supervisor.start_workers()
    for where, config in zip(started, topology.routers, strict=True):
        workers = len(topology.prefill), len(topology.decode)
        await await_members(where.joined_at, member_of(config), *workers, JOIN_TIMEOUT_S)
    _say_where(started, of_workers, topology, say)
    joined_at = [where.joined_at for where in started]
    planner = None if planning is None else await start_ray_planner(planning, supervisor, joined_at, topology.models)
    if planner is not None:
        at = planner.addresses.metrics
        say("pools size themselves" + (f"; why, at http://{at}/metrics" if at else ""))
    if work is None:
        say(f"try: tandem generate --address {','.join(addresses)} 'Once upon a time'")
    say.done()
    until = [supervisor.keep()] if work is None else [supervisor.keep(), work(addresses)]
    try:
        async with Tasks("orders are obeyed no more") as tasks:
            tasks.spawn(_obey(supervisor, topology.router.cluster_name, say, stop))
            await first_of(*until)
    finally:
        if planner is not None:
            await planner.stop()


def _say_where(started: Sequence[Addresses], of_workers: list[str], topology: Topology, say: ProgressSteps) -> None:
    """Print addresses; `of_workers` are those of their metrics."""
    say(f"serving at {', '.join(where.grpc for where in started)}; Ctrl-C stops")
    config = topology.router
    scheme = "https" if config.tls_cert or config.tls_public_cert else "http"
    if http := [f"{scheme}://{where.http}/v1" for where in started if where.http]:
        say(f"OpenAI-compatible API at {', '.join(dict.fromkeys(http))}")
    if config.batches_folder is not None:
        say(f"files and batches in {config.batches_folder}")
    scheme = "https" if config.tls_cert else "http"
    metrics = [f"{scheme}://{where.metrics}/metrics" for where in started if where.metrics]
    if metrics or of_workers:
        say(f"metrics at {', '.join([*metrics, *of_workers])}")


async def _obey(supervisor: Supervisor, cluster_name: str, say: ProgressSteps, stop: asyncio.Event) -> None:
    """Perform orders of `tandem scale`, `restart` and `down`, one at a time."""
    try:
        named = {"name": name_of(cluster_name), "namespace": NAMESPACE, "scheduling_strategy": drivers_node()}
        control: Any = ray.remote(ControlActor).options(num_cpus=0, max_concurrency=64, **named).remote()
        await control.__ray_ready__.remote()
    except ValueError:
        say(f"another cluster is called {cluster_name!r}: tandem scale and down do not reach this one (cluster_name)")
        return
    while True:
        order: Order = await control.next.remote()
        refused, lines = "", list[str]()
        if order.what == "down":
            await control.answer.remote(order.number, "", [])
            stop.set()
            return
        try:
            lines = await supervisor.perform(order)
        except Exception as error:  # the sender of the order gets the error, and the cluster continues
            refused = str(error)
        await control.answer.remote(order.number, refused, lines)


def start_ray(say: ProgressSteps, **options: Any) -> None:
    """Start a Ray cluster; on a busy machine again, since Ray gives its node 30 s.

    Raises StartError.
    """
    for attempt in range(1, RAY_ATTEMPTS + 1):
        try:
            ray.init(address="local", **options)
            return
        except Exception as error:  # Ray has no type for a node that is late
            ray.shutdown()
            if LATE not in str(error) or attempt == RAY_ATTEMPTS:
                raise StartError("ray", f"does not start: {error}") from error
            say.note("Ray's node was late; starting it again")


@contextlib.asynccontextmanager
async def _ray(say: ProgressSteps, verbose: bool) -> AsyncIterator[None]:
    """Join the running Ray cluster, or start one for the duration of the block."""
    quiet = {"log_to_driver": verbose, "logging_level": "error", "configure_logging": True, "namespace": NAMESPACE}
    try:
        ray.init(address="auto", runtime_env=OF_ACTORS, **quiet)
        say("joined the Ray cluster that was running")
    except ConnectionError:
        say("no Ray cluster is running: starting one on this machine")
        options = {"object_store_memory": OBJECT_STORE_BYTES, "_system_config": OF_OUR_OWN}
        start_ray(say, include_dashboard=False, **options, **quiet)
    try:
        yield
    finally:
        ray.shutdown()
