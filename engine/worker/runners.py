"""What an engine computes with, as its settings say. A rank that follows needs no more of an engine than this."""

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.roles import Role
from engine.errors import EngineStartError
from engine.memory import belongs_in_file
from engine.sim.runner import SimRunner, sim_runner
from engine.worker.config import WorkerConfig
from engine.worker.preparation import num_threads
from engine.worker.spec import RankSpec

if TYPE_CHECKING:
    from engine.torch.runner import TorchRunner


def open_sim_runner(config: WorkerConfig, pool_in_file: bool = False) -> SimRunner:
    return sim_runner(
        config.model,
        config.block_tokens,
        config.kv_bytes,
        config.sim_timing(),
        config.sim_block_kib,
        reads_all=config.sim_reads == "all",
        pool_in_file=pool_in_file,
    )


def open_torch_runner(
    config: WorkerConfig, role: Role, draft: Path | None = None, rank: RankSpec | None = None
) -> "TorchRunner":
    """Bound to its cores; on the thread that will use it. As one of several ranks, which waits for the others, with its
    share of `config`. Raises EngineStartError."""
    try:
        from engine.torch.ranks import Place
        from engine.torch.runner import TorchRunner, set_threads
    except ModuleNotFoundError as error:
        raise EngineStartError("engine", f"{error}; install tandem-serving[worker]") from None

    threads, own_cores = num_threads(config), config.cores or ()
    set_threads(threads)
    runner = TorchRunner(
        config.model,
        config.dtype,
        config.block_tokens,
        config.kv_bytes,
        config.backend,
        config.device,
        draft,
        config.variant(),
        Place(rank.rank, rank.ranks, rank.meeting) if rank is not None else None,
        belongs_in_file(role),
    )
    if threads == len(own_cores):
        runner.bind(own_cores, config.shared_cores)
    return runner
