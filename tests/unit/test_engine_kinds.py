"""Engines by name: those of this package, and one of another package with settings and refusals of its own."""

import ast
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType, ModuleType

import numpy as np
import pytest

from cluster.config import to_overrides
from cluster.errors import InvalidRequest, StartError
from cluster.roles import Role
from engine.config import WorkerConfig
from engine.core_types import Chunk, SampleResult
from engine.engine_kind import BUILT_IN, GROUP, ONE_RANK, FunctionKind, Installation, RunnerKind, find_kind
from engine.errors import EngineStartError
from engine.host.cores import CoreAllocation
from engine.model_runner import ModelInfo, ModelRunner
from engine.process.spec import EngineSpec
from kvcache.layout import KvLayout
from kvtransfer import registry
from kvtransfer.transport import Pool
from protos.decode_pb2 import DecodeRequest
from protos.inference_pb2 import Sampling, StructuredOutput
from sizing.fit.memory import Device, Fit, PlannedWorker, check
from sizing.fit.verdict import nearest
from sizing.models.known_models import known_shape
from tandem.doctor.checks import check_packages
from tandem.doctor.machine import read_machine
from worker.requests.placed_request import check_request

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *(
        "batches",
        "cluster",
        "decode_worker",
        "engine",
        "kvcache",
        "kvtransfer",
        "loans",
        "planner",
        "prefill_worker",
        "preprocessor",
        "router",
    ),
    *("sizing", "tandem", "tandem_connector", "workloads"),
)
MAX_COMPARISONS = 3
"""Largest number of comparisons with an engine's name outside of the backends."""


class AbacusConfig(WorkerConfig):
    abacus_rows: int = 3


class AbacusRunner(ModelRunner):
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.layout = KvLayout(layers=1, kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")
        self.info = ModelInfo(b"abacus", 100, 1000, frozenset())
        self.pool = Pool(np.zeros((8, self.layout.block_bytes), np.uint8))

    def execute(self, batch: Sequence[Chunk]) -> list[SampleResult]:
        return [SampleResult(self.rows) for chunk in batch if chunk.answers]


class AbacusKind(RunnerKind[AbacusConfig]):
    name = "abacus"
    settings = AbacusConfig
    installation = Installation(packages=("beads",))
    block_tokens = 4
    refused_settings = MappingProxyType({**ONE_RANK, "adapters": "an abacus has no adapters"})
    lacking = MappingProxyType({"structured output": "beads follow no grammar"})

    def open_runner(
        self, config: AbacusConfig, role: Role, core_allocation: CoreAllocation | None = None
    ) -> AbacusRunner:
        return AbacusRunner(config.abacus_rows)


def open_runner(config: WorkerConfig, role: Role) -> AbacusRunner:
    return AbacusRunner(7)


KIND = AbacusKind()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with three entry points, as importlib.metadata finds them."""
    module = ModuleType("abacus_engine")
    vars(module).update(KIND=KIND, open_runner=open_runner)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    named = {"abacus": "abacus_engine:KIND", "counted": "abacus_engine:open_runner", "broken": "no_such_module:KIND"}
    points = [EntryPoint(name, value, GROUP) for name, value in named.items()]

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        return [point for point in points if point.group == group and name in (None, point.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    find_kind.cache_clear()
    yield
    find_kind.cache_clear()


def planned(**values: object) -> Fit:
    device, shape = Device("memory", 1e12, is_gpu=False), known_shape("llama-3.1-8b")
    return check(PlannedWorker("decode", {"model": "m", "engine": "abacus"} | values, device, shape, gpus=0))


def settings(**values: object) -> WorkerConfig:
    return WorkerConfig.parse({"model": "m", "engine": "abacus"} | values)


@pytest.mark.usefixtures("installed")
def test_settings_of_an_engine_of_another_package_are_its_own() -> None:
    config = settings(abacus_rows=5)
    assert (type(config), config.abacus_rows, config.block_tokens, config.kind) == (AbacusConfig, 5, 4, KIND)
    assert settings(block_tokens=8).block_tokens == 8
    assert WorkerConfig.from_command_line("w", to_overrides(config)) == config, "as a launcher starts it"
    assert pickle.loads(pickle.dumps(EngineSpec(config, "decode", "a"))).config == config, "as a front sends it"
    with pytest.raises(StartError, match=r"^abacus_row: unknown key; did you mean abacus_rows\?"):
        settings(abacus_row=5)
    with pytest.raises(StartError, match=r"^abacus_rows: unknown key"):
        WorkerConfig.parse({"model": "m", "abacus_rows": 5})
    runner = config.kind.open_runner(config, "decode")
    assert runner.execute([]) == []
    assert runner.rows == 5


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"adapters": {"a": "b"}}, "adapters: an abacus has no adapters"),
        ({"tensor_parallel": 2}, "tensor_parallel: 2 needs engine: vllm, not abacus"),
        ({"pipeline_parallel": 2}, "pipeline_parallel: 2 needs engine: vllm, not abacus"),
        ({"nodes": 2}, "nodes: 2 needs engine: vllm, not abacus"),
    ],
)
def test_its_refusals_are_told_before_it_starts(values: dict[str, object], error: str) -> None:
    config = settings(**values)
    with pytest.raises(EngineStartError) as caught:
        config.kind.check(config, "decode")
    assert str(caught.value) == error
    assert error in planned(**values).refusals, "before anything starts"


@pytest.mark.usefixtures("installed")
def test_a_request_for_what_it_lacks_is_refused_with_its_reason() -> None:
    plain = DecodeRequest(prompt_token_ids=[1, 2], sampling=Sampling(max_tokens=2))
    check_request(plain, 100, "abacus")
    structured = Sampling(max_tokens=2, structured=StructuredOutput(regex="[a-z]+"))
    formed = DecodeRequest(prompt_token_ids=[1, 2], sampling=structured)
    check_request(formed, 100, "torch")
    with pytest.raises(InvalidRequest, match="beads follow no grammar") as caught:
        check_request(formed, 100, "abacus")
    assert caught.value.field == "sampling.structured"


@pytest.mark.usefixtures("installed")
def test_what_it_needs_is_checked_by_the_doctor() -> None:
    missing = [finding for finding in check_packages(read_machine(settings()), settings()) if finding.level == "broken"]
    assert [finding.found for finding in missing] == ["beads is not installed"]


@pytest.mark.usefixtures("installed")
def test_a_function_is_an_engine_with_one_rank() -> None:
    config = WorkerConfig.parse({"model": "m", "engine": "counted"})
    assert isinstance(config.kind, FunctionKind)
    assert config.kind.open_runner(config, "decode").rows == 7
    two = WorkerConfig.parse({"model": "m", "engine": "counted", "tensor_parallel": 2})
    with pytest.raises(EngineStartError, match=r"^tensor_parallel: 2 needs engine: vllm, not counted"):
        two.kind.check(two, "decode")


@pytest.mark.usefixtures("installed")
def test_an_engine_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineStartError, match=r"^engine: unknown engine 'quipu'; .* torch, vllm, sim, abacus"):
        settings(engine="quipu").kind  # noqa: B018 - a launcher need not have it
    with pytest.raises(EngineStartError, match=r"^engine: broken cannot be imported: No module named 'no_such_module'"):
        WorkerConfig.parse({"model": "m", "engine": "broken"})
    with pytest.raises(StartError, match=r"^engine: String should match pattern"):
        WorkerConfig.parse({"model": "m", "engine": "Not a name"})
    fit = planned(engine="quipu")
    assert fit.refusals[0].startswith("engine: unknown engine 'quipu'")
    assert nearest(fit.worker) is None


def test_kinds_are_imported_without_what_computes() -> None:
    program = (
        "import json, sys; from engine.config import WorkerConfig; from engine.engine_kind import BUILT_IN, kind_of\n"
        "for name in BUILT_IN: kind_of(name)\n"
        "print(json.dumps(sorted({'torch', 'vllm', 'transformers', 'grpc', 'nixl'} & sys.modules.keys())))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_names_of_engines_are_compared_in_their_own_folders() -> None:
    """A change that asks an engine's name belongs into its kind: `engine/engine_kind.py`."""
    backends = ROOT / "engine" / "backends"
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if backends not in path.parents]
    found = [f"{path}:{line}" for path in files for line in comparisons(path.read_text())]
    assert len(found) <= MAX_COMPARISONS, found


def test_comparisons_are_found_in_all_forms() -> None:
    text = """
a = engine == "vllm"
b = settings.get("engine") not in ("torch", "sim")
match engine:
    case "sim" | "vllm":
        c = {"torch": 1}[engine]
"""
    assert list(comparisons(text)) == [2, 3, 5, 5]


def comparisons(text: str) -> Iterator[int]:
    """Yield the lines that compare with an engine's name, or match one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare | ast.MatchValue):
            constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            if constants & set(BUILT_IN):
                yield node.lineno
