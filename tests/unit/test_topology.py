"""Cores and ids of the workers `tandem up` starts."""

import pytest

from cluster.errors import StartError
from support.refusals import refusal_of
from tandem.topology import ClusterModel, plan_models, plan_topology

SETTINGS = {"model": "m"}


def test_every_worker_has_its_id_and_cores() -> None:
    topology = plan_topology(1, 2, SETTINGS, SETTINGS, [0, 1, 2])
    assert [(module, config.worker_id, config.cores) for module, config in topology.workers()] == [
        ("decode_worker", "decode-0", (1,)),
        ("decode_worker", "decode-1", (2,)),
        ("prefill_worker", "prefill-0", (0,)),
    ]


def test_prefill_engines_also_compute_on_the_cores_of_decode_engines_which_step_back() -> None:
    topology = plan_topology(2, 2, SETTINGS, SETTINGS, [0, 1, 2, 3])
    assert [worker.cores for worker in topology.prefill] == [(0,), (1,)]
    assert [worker.shared_cores for worker in topology.prefill] == [(2,), (3,)], "each core is lent to one of them"
    assert all(worker.niceness > 0 and not worker.shared_cores for worker in topology.decode)
    assert all(worker.niceness == 0 for worker in topology.prefill)


def test_who_finds_its_cores_is_not_told_them() -> None:
    """Who was told has them for good: a worker added later would be told those of the one it is modelled on."""
    workers = {"model": "m", "cores": (1,)}, {"model": "m", "threads": 2}, {"model": "m"}
    planned = [
        plan_topology(1, 1, SETTINGS, worker, [0, 1], finds_cores=lambda config: config.threads is None).workers()
        for worker in workers
    ]
    cores = [[(config.cores, config.niceness > 0) for _, config in each] for each in planned]
    assert cores == [[((1,), False)] * 2, [((1,), True), ((0,), False)], [(None, False)] * 2]


def test_nobody_steps_back_where_nothing_is_shared() -> None:
    alone = plan_topology(0, 2, SETTINGS, SETTINGS, [0, 1, 2])
    assert [(worker.shared_cores, worker.niceness) for worker in alone.decode] == [((), 0), ((), 0)]


def test_engines_that_share_one_core_anyway_get_it_once() -> None:
    topology = plan_topology(1, 1, SETTINGS, SETTINGS, [5])
    assert topology.prefill[0].cores == (5,)
    assert topology.prefill[0].shared_cores == ()


@pytest.mark.parametrize(
    ("first", "expected"), [(8000, [8000, 8001, 8002]), (0, [0, 0, 0]), (None, [None, None, None])]
)
@pytest.mark.parametrize("name", ["http_port", "metrics_port"])
def test_each_of_several_routers_has_its_port(name: str, first: int | None, expected: list[int | None]) -> None:
    topology = plan_topology(1, 1, SETTINGS | {name: first}, SETTINGS, [0], num_routers=3)
    assert [getattr(router, name) for router in topology.routers] == expected


# ------------------------------------------------------------------ data-parallel groups

GROUPS = SETTINGS | {"engine": "sim", "data_parallel": 2}


def test_workers_of_a_pool_are_groups_with_ranks_and_a_port_each() -> None:
    topology = plan_topology(2, 4, SETTINGS, GROUPS, [0])
    places = {each.worker_id: (each.data_parallel_rank, each.data_parallel_port) for _, each in topology.workers()}
    assert places == {
        "prefill-0": (0, 29550),
        "prefill-1": (1, 29550),
        "decode-0": (0, 29551),
        "decode-1": (1, 29551),
        "decode-2": (0, 29552),
        "decode-3": (1, 29552),
    }


def flags(text: str) -> dict[str, object]:
    return SETTINGS | {"engine": "vllm", "vllm_args": text}


@pytest.mark.parametrize(
    ("prefill", "decode", "worker", "field", "reason"),
    [
        (1, 0, SETTINGS, "decode", None),
        (-1, 1, SETTINGS, "prefill", None),
        (2, 3, GROUPS, "decode", "3 workers are no whole groups of data_parallel, 2"),
        (1, 2, GROUPS, "prefill", "1 workers are no whole groups of data_parallel, 2"),
        (0, 2, GROUPS | {"data_parallel_local": 2}, "data_parallel_local", "each worker is started by itself"),
        (0, 1, flags("--served-model-name a b"), "vllm_args", None),
        (0, 1, flags("--reasoning-parser"), "vllm_args", None),
        (0, 1, flags("--no-enable-auto-tool-choice"), "vllm_args", None),
    ],
)
def test_what_cannot_be_is_refused(
    prefill: int, decode: int, worker: dict[str, object], field: str, reason: str | None
) -> None:
    with refusal_of(field, StartError, match=reason):
        plan_topology(prefill, decode, SETTINGS, worker, [0])


# ------------------------------------------------------------------ vLLM's flags that are the router's

SERVE = "--reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes --max-model-len 4096"


def test_flags_of_the_router_set_its_entry_of_the_model() -> None:
    worker = SETTINGS | {"engine": "vllm", "vllm_args": f"{SERVE} --served-model-name mine"}
    topology = plan_topology(1, 1, SETTINGS, worker, [0])
    (entry,) = topology.router.entries
    assert (entry.name, entry.reasoning_parser, entry.tool_parser) == ("mine", "qwen3", "hermes")
    assert topology.models == ("mine",)
    assert {config.vllm_args for _, config in topology.workers()} == {"--max-model-len 4096"}


def test_each_of_several_models_has_its_flags() -> None:
    models = [
        ClusterModel.parse({"path": "a", "worker": {"vllm_args": "--reasoning-parser deepseek_r1"}}),
        ClusterModel.parse({"path": "b", "tool_parser": "hermes"}),
    ]
    topology = plan_models(models, {}, {"engine": "vllm", "vllm_args": SERVE}, [0])
    parsers = [(entry.reasoning_parser, entry.tool_parser) for entry in topology.router.entries]
    assert parsers == [("deepseek_r1", "auto"), ("qwen3", "hermes")]
    with refusal_of("vllm_args", StartError, match="hermes differs from tool_parser of the model"):
        plan_models([ClusterModel.parse({"path": "b", "tool_parser": "mistral"})], {}, {"vllm_args": SERVE}, [0])
