"""The engine process of a vLLM worker: `python -m cluster.launch engine.process.vllm_process FD`.

It runs in vLLM's own environment, where Tandem is installed without its dependencies. One loop on the main thread
handles messages, schedules and sends answers, as in `engine/process/engine_process.py`; a second thread, on which vLLM
was made, executes the batches.
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from queue import SimpleQueue
from typing import Any

from cluster.garbage_collection import spare_the_started
from cluster.logs import set_up
from engine.config import WorkerConfig
from engine.core.engine_core import EngineLimits
from engine.core_types import StepBudget
from engine.errors import EngineStartError
from engine.host.memory import belongs_in_file
from engine.messages import StartFailed
from engine.model.adapters import read_adapters
from engine.model.model_dir import ModelDir
from engine.model_runner import ModelInfo
from engine.process.assembly import IDLE_TURN_S
from engine.process.fast_path_socket import open_fast_path_socket
from engine.process.front_link import FrontLink, receive_spec
from engine.process.message_socket import MessageSocket
from engine.process.spec import EngineSpec
from engine.process.start_up import become_child, own_transport, prepare
from engine.process.vllm_arguments import check_version, engine_arguments
from engine.sampling.grammar import Grammars
from kvtransfer.errors import TransportUnavailable

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Started:
    """vLLM's engine after its model is loaded."""

    engine: Any
    memory: Any
    block_pool: Any
    info: ModelInfo
    lora: dict[bytes, Any]
    """vLLM's LoRARequest of each adapter, by the adapter's fingerprint."""


def main() -> None:
    """Serve the front at the other end of the socket whose descriptor is the argument."""
    become_child()
    link = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    spec = receive_spec(link)
    front = FrontLink(link)
    set_up(spec.role, f"{spec.worker_id}/engine", spec.config)
    try:
        prepare(spec.config)
        _prepare_vllm(spec.config)
        transport = own_transport(spec.config, spec.agent_name)
        computer = _ComputeThread(spec, front.wake)
        started = computer.started()
        fast_path = open_fast_path_socket()
        core = _open_core(spec, started, transport, front, fast_path)
    except (EngineStartError, TransportUnavailable) as error:
        front.send(StartFailed(f"transport: {error}" if isinstance(error, TransportUnavailable) else str(error)))
        front.finish()
        os._exit(0)  # threads of a half-started vLLM may hang
    if fast_path is not None:
        front.watch(fast_path.fileno())
    front.send(core.start())
    front.flush()
    spare_the_started()
    # The front is gone, by its own end or by ours: no process is left to serve.
    with contextlib.suppress(EOFError, ConnectionError):
        _loop(core, computer, front)
    computer.stop()
    core.close()


def _prepare_vllm(config: WorkerConfig) -> None:
    """Set what vLLM reads from the environment when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # its log lines are Tandem's
    os.environ["TQDM_DISABLE"] = "1"
    warnings.simplefilter("ignore")  # Python's warnings about vLLM's own code
    logging.getLogger("vllm").setLevel(logging.ERROR)
    if config.cores:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, config.cores))


class _ComputeThread:
    """Thread that makes vLLM's engine and executes its batches, one at a time."""

    def __init__(self, spec: EngineSpec, wake: Callable[[], None]) -> None:
        self._spec = spec
        self._wake = wake
        self._started: Future[_Started] = Future()
        self._batches: SimpleQueue[Any] = SimpleQueue()
        self._result: tuple[Any, Any] | None = None
        self.running = False
        self._thread = threading.Thread(target=self._run, name="vllm-compute", daemon=True)
        self._thread.start()

    def started(self) -> _Started:
        """Wait until the model is loaded.

        Raises EngineStartError.
        """
        return self._started.result()

    def start(self, batch: Any) -> None:
        assert not self.running
        self.running = True
        self._batches.put(batch)

    def take(self) -> tuple[Any, Any] | None:
        """Return the finished batch and its result, or None while it runs.

        Raises what vLLM raised.
        """
        if self._result is None:
            return None
        (batch, computed), self._result, self.running = self._result, None, False
        if isinstance(computed, BaseException):
            raise computed
        return batch, computed

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop after the running batch, if it ends in time."""
        self._batches.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            started = _start_vllm(self._spec)
        except EngineStartError as error:
            self._started.set_exception(error)
            return
        except Exception as error:
            log.exception("vLLM did not start")
            self._started.set_exception(EngineStartError("engine", f"vLLM did not start: {_last_cause(error)}"))
            return
        executor = started.engine.model_executor
        self._started.set_result(started)
        while (batch := self._batches.get()) is not None:
            try:
                computed = executor.execute_model(batch)
                self._result = batch, executor.sample_tokens(None) if computed is None else computed
            except BaseException as error:
                self._result = batch, error
            self._wake()


def _last_cause(error: BaseException) -> str:
    """Return the message of the innermost error, in one line."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return " ".join(f"{type(error).__name__}: {error}".split())


def _start_vllm(spec: EngineSpec) -> _Started:
    """Load the model in vLLM.

    Raises EngineStartError.
    """
    config = spec.config
    model_dir = ModelDir.open(config.model)
    arguments = engine_arguments(config)  # first: importing vLLM takes seconds
    adapters = read_adapters(config.adapters)
    try:
        import vllm
    except ImportError as error:
        raise EngineStartError("vllm_python", f"{sys.executable} cannot import vLLM: {error}") from None
    check_version(vllm.__version__)
    from vllm.platforms import current_platform

    if adapters and current_platform.is_cpu():
        if "max_loras" in config.vllm_options:
            raise EngineStartError("vllm_options", "max_loras is set by Tandem on CPUs")
        # vLLM's CPU kernels give tokens without an adapter index -1, the last slot: it stays empty, so all zeros.
        arguments["max_loras"] = arguments["max_cpu_loras"] = len(adapters) + 1
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from engine.backends.vllm.connector import TandemConnector, offered
    from engine.backends.vllm.kv_memory import VllmKvMemory
    from engine.backends.vllm.sampling import TandemSampling, sampling

    offered.in_file = belongs_in_file(spec.role)
    sampling.eos_token_ids = model_dir.eos_token_ids
    sampling.grammars = Grammars(model_dir)
    transfer = KVTransferConfig(
        kv_connector=TandemConnector.__name__,
        kv_connector_module_path=TandemConnector.__module__,
        kv_role="kv_both",
    )
    try:
        options = EngineArgs(kv_transfer_config=transfer, logits_processors=[TandemSampling], **arguments)
    except TypeError as error:
        raise EngineStartError("vllm_options", str(error)) from None
    vllm_config = options.create_engine_config()
    if not vllm_config.cache_config.enable_prefix_caching:
        reason = "vLLM turns its prefix cache off for this model here (so it does for MLA on CPUs), and loans need it"
        raise EngineStartError("model", reason)
    engine = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise EngineStartError("model", f"its KV cache has {len(groups)} groups ({kinds}); Tandem lends from one")
    block_tokens = groups[0].kv_cache_spec.block_size
    if block_tokens != config.block_tokens:
        raise EngineStartError("block_tokens", f"vLLM uses blocks of {block_tokens} tokens here")
    backends = sorted({type(layer.impl).__name__ for layer in _attention_layers(vllm_config)})
    about = f"{vllm.__version__},{'+'.join(backends)},{vllm_config.cache_config.cache_dtype}"
    requests = [LoRARequest(each.name, i, str(each.path)) for i, each in enumerate(adapters, 1)]
    for request in requests:
        engine.add_lora(request)
    num_blocks = int(vllm_config.cache_config.num_gpu_blocks)
    memory = VllmKvMemory(offered.caches, num_blocks, block_tokens, about, offered.pools)
    weights = model_dir.weights_fingerprint() + f"{vllm_config.model_config.quantization}".encode()
    info = ModelInfo(
        weights_fingerprint=blake2b(weights, digest_size=32).digest(),
        vocab_size=model_dir.vocab_size,
        max_context_tokens=int(vllm_config.model_config.max_model_len),
        eos_token_ids=model_dir.eos_token_ids,
        adapters=tuple((each.name, each.fingerprint) for each in adapters),
    )
    lora = {each.fingerprint: request for each, request in zip(adapters, requests, strict=True)}
    return _Started(engine, memory, offered.block_pool, info, lora)


def _attention_layers(vllm_config: Any) -> list[Any]:
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "impl")]


def _open_core(spec: EngineSpec, started: _Started, transport: Any, front: FrontLink, fast_path: Any) -> Any:
    from engine.backends.vllm.core import VllmCore

    config = spec.config
    limits = EngineLimits(
        StepBudget(config.max_batch_tokens, config.prefill_chunk(spec.role)),
        max_queued_loans=config.max_queued_loans,
        reserve_output_tokens=config.reserve_output_tokens,
        read_silence_s=config.peer_silence_s,
    )
    return VllmCore(
        started.engine,
        started.memory,
        started.block_pool,
        started.info,
        started.lora,
        transport,
        limits,
        front.send,
        front.wake,
        fast_path,
    )


def _loop(core: Any, computer: _ComputeThread, front: FrontLink) -> None:
    while True:
        for message in front.listen(0.0 if core.busy else IDLE_TURN_S):
            core.handle(message)
        core.handle_posted()
        if (computed := computer.take()) is not None:
            core.end_step(*computed)  # its messages wait until the next step has begun
        else:
            front.flush()  # a caller waits for an answer
        if not computer.running and (batch := core.begin_step()) is not None:
            computer.start(batch)
        core.report()
        front.flush()
