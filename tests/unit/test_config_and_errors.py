"""Configuration at the edge, and errors across the wire."""

import pickle
from pathlib import Path

import grpc
import pytest
from google.rpc import status_pb2

from cluster.config import parse_overrides, read_file, to_overrides
from cluster.errors import InvalidRequest, Overloaded, StartError, Unavailable
from cluster.network.error_status import MAX_RETRY_AFTER_S, from_proto, from_rpc_error, to_proto, to_status
from cluster.roles import Role
from engine.config import GONE, WorkerConfig
from engine.core_types import GpuDevice, StepBudget
from engine.errors import ModelRefused
from engine.model.model_dir import ModelDir
from engine.settings import max_step_tokens, step_budget
from router.admission.refusals import Reason, over_limit
from router.config import RouterConfig
from support.refusals import refusal_of


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model": "m", "block_token": 16}, "block_token"),
        ({}, "model"),
        ({"model": "m", "port": 70000}, "port"),
        ({"model": "m", "block_tokens": "many"}, "block_tokens"),
        ({"model": "m", "transport": "carrier pigeon"}, "transport"),
        ({"model": "m", "kv_memory_mib": 0}, "kv_memory_mib"),
        ({"model": "m", "kv_memory_mib": "most"}, "kv_memory_mib"),
        ({"model": "m", "speculation_tokens": 0}, "speculation_tokens"),
        ({"model": "m", "tensor_parallel": 0}, "tensor_parallel"),
        ({"model": "m", "tensor_parallel": 65}, "tensor_parallel"),
    ],
)
def test_a_bad_setting_is_named(values: dict[str, object], field: str) -> None:
    with refusal_of(field, StartError):
        WorkerConfig.parse(values)


H100 = GpuDevice("NVIDIA H100 80GB HBM3", 85_029_158_912)
A100 = GpuDevice("NVIDIA A100-SXM4-80GB", 85_029_158_912)
B200 = GpuDevice("NVIDIA B200", 192 << 30)


@pytest.mark.parametrize(
    ("gpu", "prefill", "decode"),
    [
        (None, (2048, 512), (2048, 128)),
        (GpuDevice("NVIDIA L4", 24 << 30), (8192, 8192), (8192, 2048)),
        (A100, (8192, 8192), (8192, 2048)),
        (H100, (8192, 8192), (8192, 8192)),
        (B200, (16384, 16384), (16384, 16384)),
    ],
)
def test_the_step_budget_goes_by_device_and_role(
    gpu: GpuDevice | None, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    config = WorkerConfig.parse({"model": "m"})
    assert step_budget(config, "prefill", gpu) == StepBudget(*prefill)
    assert step_budget(config, "decode", gpu) == StepBudget(*decode)
    assert max_step_tokens(config, gpu) == prefill[0]


@pytest.mark.parametrize("gpu", [None, H100])
def test_a_step_budget_that_is_set_holds_on_any_device(gpu: GpuDevice | None) -> None:
    chosen = WorkerConfig.parse({"model": "m", "max_batch_tokens": 1024, "max_prefill_tokens": 256})
    small = WorkerConfig.parse({"model": "m", "max_batch_tokens": 100})
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        assert step_budget(chosen, role, gpu) == StepBudget(1024, 256)
        assert step_budget(small, role, gpu) == StepBudget(100, 100)


ROUTERS = r"^routers: .*host:port"


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (RouterConfig, {"queue": 3}, "max_queued"),  # of those that are known
        (RouterConfig, {"max_queud": 3}, r"^max_queud: unknown key; did you mean max_queued\? known are "),
        *(
            (WorkerConfig, {"routers": ["127.0.0.1:1", at]}, ROUTERS)
            for at in ("127.0.0.1", "host", "host:", "", "host:port")
        ),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(
    kind: type[RouterConfig | WorkerConfig], values: dict[str, object], said: str
) -> None:
    with pytest.raises(StartError, match=said):
        kind.parse({"model": "m"} | values)


def test_an_unknown_key_further_inside_names_those_known_there() -> None:
    with pytest.raises(StartError, match=r"^models\.0\.foo: unknown key; known are .*input_price") as caught:
        RouterConfig.parse({"models": [{"path": "m", "foo": 1}]})
    assert "http_port" not in caught.value.reason


def check(config: WorkerConfig, role: Role) -> None:
    config.kind.check(config, role)


@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("engine", ["torch", "vllm", "sim"])
def test_a_setting_that_is_gone_is_refused_with_what_to_set(gone: str, engine: str) -> None:
    name, _, value = gone.partition(": ")
    with pytest.raises(StartError) as caught:
        WorkerConfig.parse({"model": "m", "engine": engine, name: value or "int8"})
    assert caught.value.field == name
    what = "value" if value else "setting"
    assert caught.value.reason == f"this {what} is gone: leave it out, or set {GONE[gone]}"


@pytest.mark.parametrize(
    ("engine", "setting"),
    [("torch", "tensor_parallel"), ("sim", "tensor_parallel"), ("torch", "pipeline_parallel")],
)
def test_ranks_and_stages_are_those_of_the_vllm_engine(engine: str, setting: str) -> None:
    with pytest.raises(StartError, match=f"{setting}: 2 needs engine: vllm, not {engine}"):
        check(WorkerConfig.parse({"model": "m", "engine": engine, setting: 2}), "decode")
    check(WorkerConfig.parse({"model": "m", "engine": "vllm", setting: 2}), "decode")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"engine": "torch"}, "nodes: 2 needs engine: vllm, not torch"),
        ({"tensor_parallel": 3}, "nodes: 3 ranks .* are not equally many on each of 2"),
        ({"node_rank": 2}, "node_rank: 2 is not below nodes, 2"),
        ({"master_addr": ""}, "master_addr: with several nodes, set the address of node 0"),
        ({"nodes": 1, "node_rank": 1}, "node_rank: 1 needs more nodes than 1"),
    ],
)
def test_nodes_need_ranks_and_a_first_one(settings: dict[str, object], error: str) -> None:
    good = {"model": "m", "engine": "vllm", "tensor_parallel": 4, "nodes": 2, "master_addr": "a", "cores": (4, 5)}
    config = WorkerConfig.parse(good)
    check(config, "decode")
    assert [config.of_rank(rank).cores for rank in range(4)] == [(4,), (5,)] * 2, "cores are those of a host"
    with pytest.raises(StartError, match=error):
        check(WorkerConfig.parse(good | settings), "decode")


@pytest.mark.parametrize(
    ("cores", "threads", "shares"),
    [
        ((0, 1, 2, 3), None, [((0, 1), 2), ((2, 3), 2)]),
        ((0, 1, 2), None, [((0,), 1), ((1,), 1)]),
        ((5,), None, [((5,), 1), ((5,), 1)]),
        (None, 4, [(None, 2), (None, 2)]),
        ((0, 1, 2, 3), 2, [((0, 1), 1), ((2, 3), 1)]),
    ],
)
def test_ranks_share_cores_and_threads_equally(
    cores: tuple[int, ...] | None, threads: int | None, shares: list[tuple[tuple[int, ...] | None, int]]
) -> None:
    config = WorkerConfig(model=Path(), cores=cores, threads=threads, tensor_parallel=2, shared_cores=(7,))
    ranks = [config.of_rank(rank) for rank in range(2)]
    assert [(rank.cores, rank.threads) for rank in ranks] == shares
    assert {rank.shared_cores for rank in ranks} == {()}


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("model: a\nblock_tokens: 8\nrouters: [x:1]\n")
    config = WorkerConfig.from_command_line("w", ["--config", str(file), "--set", "block_tokens=4"])
    assert (config.block_tokens, config.routers) == (4, ("x:1",))


def test_flags_are_texts_whatever_yaml_would_make_of_them() -> None:
    flags = """--hf-overrides '{"a": 1}' --quantization fp8 # 8 bits"""
    assert parse_overrides([f"vllm_args={flags}", "threads=-1", "x=-tp 2"]) == {
        "vllm_args": flags,
        "threads": -1,
        "x": "-tp 2",
    }


def test_a_configuration_survives_the_command_line() -> None:
    config = WorkerConfig.parse({"model": "m", "routers": ["a:1", "b:2"], "cores": [0], "worker_id": "w: #1"})
    assert WorkerConfig.from_command_line("w", to_overrides(config)) == config


@pytest.mark.parametrize(("content", "reason"), [("a: [", "not YAML"), ("- a", "mapping")])
def test_a_bad_file_is_named(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(content)
    with pytest.raises(StartError, match=reason):
        read_file(file)
    with pytest.raises(StartError, match="No such file"):
        read_file(tmp_path / "missing.yaml")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_what_is_no_model_directory_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with refusal_of("model", ModelRefused):
        ModelDir.open(tmp_path)


def test_start_errors_travel_between_processes() -> None:
    copy = pickle.loads(pickle.dumps(ModelRefused("too strange")))
    assert (type(copy), copy.field, copy.reason) == (StartError, "model", "too strange")


def over_the_wire(error: InvalidRequest | Overloaded | Unavailable) -> Exception:
    status = to_status(error)
    trailers = grpc.aio.Metadata(*status.trailing_metadata)
    return from_rpc_error(grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailers, details=status.details))


def test_errors_keep_their_type_and_field_across_the_wire() -> None:
    invalid = over_the_wire(InvalidRequest("sampling.top_p", "must be above 0"))
    assert (type(invalid), invalid.field, invalid.message) == (InvalidRequest, "sampling.top_p", "must be above 0")
    full = over_the_wire(Overloaded("full", "max_tokens", permanent=True))
    assert isinstance(full, Overloaded)
    assert full.permanent
    busy = over_the_wire(Overloaded("busy"))
    assert isinstance(busy, Overloaded)
    assert not busy.permanent
    assert busy.retry_after_s is None
    assert isinstance(over_the_wire(Unavailable("gone")), Unavailable)


def test_a_limit_that_was_reached_is_named_across_the_wire() -> None:
    refusal = over_limit(Reason.REQUEST_RATE, "a", "5", "1 request", 0.25)
    got = over_the_wire(refusal.error)
    assert (type(got), got.limit) == (Overloaded, ("tenant:a", "requests_per_s: 5"))
    assert over_the_wire(Overloaded("full")).limit is None


@pytest.mark.parametrize("retry_after_s", [0.0, 0.05, 12.345678901, 86_400.0, 1e8])
def test_when_to_try_again_keeps_its_nanoseconds_across_the_wire(retry_after_s: float) -> None:
    later = over_the_wire(Overloaded("later", "tenant", retry_after_s=retry_after_s))
    assert (type(later), later.retry_after_s) == (Overloaded, pytest.approx(retry_after_s, abs=1e-9))
    assert (later.message, later.field, later.permanent) == ("later", "tenant", False)


def test_when_to_try_again_is_bounded_by_what_a_status_can_say() -> None:
    never = over_the_wire(Overloaded("never", retry_after_s=float("inf")))
    assert (type(never), never.retry_after_s) == (Overloaded, MAX_RETRY_AFTER_S)


def test_a_status_that_there_is_not_is_an_unknown_error() -> None:
    error = from_proto(status_pb2.Status(code=4711, message="what a later version says"))
    assert (error.code, str(error)) == ("UNKNOWN", "what a later version says")
    assert type(from_proto(to_proto(Unavailable("later")))) is Unavailable


def test_a_call_that_its_server_dropped_is_unavailable() -> None:
    """So does gRPC end calls that wait in a server's full backlog; its status has no details."""
    none = grpc.aio.Metadata()
    dropped = from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, none, none, details="CANCELLED"))
    assert type(dropped) is Unavailable
    assert "before it accepted it" in str(dropped)
