"""What `tandem up` starts: the models of a file, their workers, and what of it is refused before anything starts."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.errors import StartError
from support.refusals import refusal_of
from support.sim_directories import write_sim_model
from tandem.cluster_file import read_cluster, read_settings, with_preprocessor
from tandem.ray.settings import RaySettings
from tandem.topology import Topology


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, vocab_size in (("small", 600), ("large", 900)):
        write_sim_model(tmp_path / name, vocab_size)
    return tmp_path


def write(folder: Path, **values: Any) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def planned(file: Path | None, model: Path | None = None, router: dict[str, Any] | None = None) -> Topology:
    cluster = read_cluster(file, model, 1, 2)
    cluster.check()
    return cluster.plan({"port": 7} | (router or {}), {}, [0, 1, 2], 1)


def test_each_model_of_a_file_has_its_workers(folder: Path) -> None:
    models = [
        {"path": str(folder / "small"), "input_price": 1, "output_price": 2, "prefill": 0},
        {"path": str(folder / "large"), "name": "big", "decode": 2, "worker": {"kv_memory_mib": 64}},
    ]
    rules = [{"max_prompt_tokens": 9, "models": ["big"]}]
    file = write(folder, models=models, router={"model_rules": rules}, worker={"engine": "sim", "kv_memory_mib": 8})
    topology = planned(file)
    assert [(worker.worker_id, worker.model.name, worker.kv_memory_mib) for _, worker in topology.workers()] == [
        ("small-decode-0", "small", 8),
        ("big-decode-0", "large", 64),
        ("big-decode-1", "large", 64),
        ("big-prefill-0", "large", 64),
    ]
    assert [(entry.path.name, entry.name, entry.input_price) for entry in topology.router.entries] == [
        ("small", "", 1),
        ("large", "big", None),
    ]
    assert (topology.router.port, topology.router.model_rules[0].models) == (7, ("big",))


def test_one_model_is_served_as_ever(folder: Path) -> None:
    file = write(folder, router={"worker_silence_s": 3}, worker={"engine": "sim"})
    topology = planned(file, folder / "small")
    assert [worker.worker_id for _, worker in topology.workers()] == ["decode-0", "decode-1", "prefill-0"]
    assert (topology.router.model, topology.router.worker_silence_s) == (folder / "small", 3)
    alone = planned(write(folder, models=[{"path": str(folder / "small"), "quality": 0.5}]))
    assert [worker.worker_id for _, worker in alone.workers()] == ["decode-0", "prefill-0"]
    assert alone.router.entries[0].quality == 0.5


@pytest.mark.parametrize(
    ("values", "field", "reason"),
    [
        ({"workers": {}}, "workers", "unknown key; did you mean worker? known are models, fleet, router, worker"),
        ({"models": {}}, "models", "must be a list of mappings"),
        ({"models": []}, "models", "must be a list of mappings"),
        ({"router": []}, "router", "must be a mapping"),
        ({}, "model", "name one directory or repository, or list several"),
        ({"models": [{"path": "small", "colour": "red"}]}, "models.0.colour", "unknown key"),
        ({"models": [{"path": "small"}, {"path": "large", "decode": -1}]}, "models.1.decode", "greater than or equal"),
        ({"models": [{"path": "small", "decode": 0}]}, "models", "at least one decode worker"),
        ({"models": [{"path": "small"}], "router": {"models": []}}, "router", "those of the cluster"),
        ({"models": [{"path": "small"}, {"path": "small"}]}, "models.1.name", "have the same name, 'small'"),
        ({"models": [{"path": "small"}], "preprocessor": None}, "preprocessor", "must be a mapping"),
        ({"models": [{"path": "small"}], "preprocessor": {"model": "x"}}, "preprocessor.model", "leave it out"),
        ({"models": [{"path": "small"}], "preprocessor": {"max_itmes": 1}}, "preprocessor.max_itmes", "unknown key"),
        ({"models": [{"path": "small", "preprocessor": ""}], "preprocessor": {}}, "preprocessor", "no model is left"),
        ({"models": [{"path": "small"}], "encoder": {}}, "encoder", "needs the key `preprocessor`"),
        ({"models": [{"path": "small"}], "preprocessor": {}, "encoder": {"model": "x"}}, "encoder.model", "leave it"),
        (
            {"models": [{"path": "small"}], "preprocessor": {"encoders": ["a:1"]}, "encoder": {}},
            *("preprocessor.encoders", "leave it out"),
        ),
        (
            {"models": [{"path": "small"}], "preprocessor": {}, "encoder": {"replicas": 0}},
            *("encoder.replicas", "must be a number from 1, not 0"),
        ),
        (
            {"models": [{"path": "small"}, {"path": "large"}], "preprocessor": {}, "encoder": {}},
            *("encoder", "encode workers are for one model, and the preprocessor has 2"),
        ),
        ({"models": [{"path": "small"}], "router": {"default_model": "x"}}, "default_model", "'x' is not among small"),
    ],
)
def test_what_cannot_be_started_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], field: str, reason: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(StartError) as caught:
        planned(write(folder, **values))
    assert caught.value.field == field
    assert reason in caught.value.reason


def media_of(file: Path) -> Topology:
    return read_cluster(file, None, 1, 1).plan({"port": 7}, {}, [0, 1, 2], 1)


def test_a_preprocessor_has_the_settings_of_the_workers(folder: Path) -> None:
    options = {"max_model_len": 900, "max_num_seqs": 3, "limit_mm_per_prompt": {"image": 2}}
    worker = {"engine": "vllm", "dtype": "float32", "vllm_python": "/v/python", "vllm_options": options}
    worker |= {"vllm_args": "--quantization fp8 --mm-processor-kwargs.size=7 --seed 1", "log_format": "json"}
    models = [{"path": str(folder / "small"), "name": "seeing"}]
    file = write(
        folder, models=models, worker=worker, preprocessor={"processes": 1}, encoder={"replicas": 2, "port": 9}
    )
    topology = media_of(file)
    config = topology.preprocessor
    assert config.paths == {"seeing": folder / "small"}
    assert (config.engine, config.dtype, str(config.vllm_python), config.log_format, config.processes, config.port) == (
        *("vllm", "float32", "/v/python", "json", 1, 0),
    )
    assert config.vllm_options == {"max_model_len": 900, "limit_mm_per_prompt": {"image": 2}}
    assert config.vllm_args == "--mm-processor-kwargs.size=7"
    first, second = topology.encoders
    assert (first.model, first.port, second.port, first.vllm_options) == (folder / "small", 9, 10, config.vllm_options)
    assert first.vllm_args == "--quantization fp8 --mm-processor-kwargs.size=7"


def test_models_that_name_a_preprocessor_or_none_keep_that(folder: Path) -> None:
    models = [{"path": str(folder / "small"), "preprocessor": "a:5"}, {"path": str(folder / "large")}]
    topology = media_of(write(folder, models=models, worker={"engine": "sim"}, preprocessor={}))
    assert list(topology.preprocessor.paths) == ["large"]
    (router,) = with_preprocessor(topology.routers, "b:6")
    assert [entry.preprocessor for entry in router.entries] == ["a:5", "b:6"]
    one = media_of(write(folder, models=models[1:], worker={"engine": "sim"}))
    assert (one.preprocessor, one.encoders) == (None, ())


def test_workers_that_differ_need_a_setting_of_their_preprocessor(folder: Path) -> None:
    models = [{"path": str(folder / "small")}, {"path": str(folder / "large"), "worker": {"dtype": "float32"}}]
    values: dict[str, Any] = {"models": models, "worker": {"engine": "sim"}}
    with refusal_of("preprocessor.dtype", StartError, match="workers of several models differ in it"):
        media_of(write(folder, **values, preprocessor={}))
    topology = media_of(write(folder, **values, preprocessor={"dtype": "float16"}))
    assert topology.preprocessor.dtype == "float16"


def test_a_model_is_named_once(folder: Path) -> None:
    file = write(folder, models=[{"path": str(folder / "large")}])
    with pytest.raises(StartError, match="name one directory or repository, or list several"):
        planned(file, folder / "small")
    assert read_settings(None).models == []


def test_where_http_is_served(folder: Path) -> None:
    """The command line goes before the file, and the file before the default."""
    model = folder / "small"
    said = read_cluster(write(folder, router={"http_port": 9000}), model, 1, 1)
    silent = read_cluster(None, model, 1, 1)
    assert silent.http_settings(None, off=False) == {"http_port": 8000}
    assert silent.http_settings(0, off=False) == {"http_port": 0}
    assert said.http_settings(None, off=False) == {}
    assert said.http_settings(8001, off=False) == {"http_port": 8001}
    assert said.http_settings(None, off=True) == {"http_port": None}


def test_encode_workers_have_resources_of_their_own() -> None:
    settings = RaySettings.parse({"decode": {"num_gpus": 1}, "encoder": {"num_gpus": 0.3}})
    assert settings.bundle("encode_worker") == {"GPU": 0.3}
    assert settings.bundle("decode_worker") == {"GPU": 1}
    assert settings.options("encode_worker")["num_gpus"] == 0.3


@pytest.mark.parametrize("strategy", ["STRICT_SPREAD", "STRICT_PACK"])
def test_a_number_of_workers_that_may_change_cannot_be_placed_strictly(strategy: str) -> None:
    RaySettings().check(autoscale=True)
    settings = RaySettings.parse({"strategy": strategy})
    settings.check(autoscale=False)
    with refusal_of("ray.strategy", StartError):
        settings.check(autoscale=True)


def test_files_and_batches_have_a_folder_by_name_and_port(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    cluster = read_cluster(None, folder / "small", 1, 1)
    settings, fault = cluster.with_files_folder({"http_port": 8000, "port": 9})
    assert (settings["batches_folder"], fault) == (folder / "state" / "tandem" / "tandem-9" / "batches", "")
    assert settings["batches_folder"].is_dir()
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(folder / "home"))
    settings, _ = cluster.with_files_folder({"http_port": 0, "cluster_name": "b"})
    assert settings["batches_folder"] == folder / "home" / ".local" / "state" / "tandem" / "b-50051" / "batches"


def test_a_named_folder_stays_and_without_http_there_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    file = write(folder, router={"batches_folder": "elsewhere"})
    for cluster, given in (
        (read_cluster(file, folder / "small", 1, 1), {"http_port": 8000}),
        (read_cluster(None, folder / "small", 1, 1), {"http_port": 8000, "batches_folder": None}),
        (read_cluster(None, folder / "small", 1, 1), {"http_port": None}),
    ):
        assert cluster.with_files_folder(given) == (given, "")
    assert not (folder / "state").exists()


def test_a_folder_that_cannot_be_used_is_told_and_stops_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "state").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    settings, fault = read_cluster(None, folder / "small", 1, 1).with_files_folder({"http_port": 8000})
    assert settings == {"http_port": 8000}
    assert fault.startswith("cannot be used")


def test_a_machine_with_gpus_takes_vllm_unless_an_engine_is_named(folder: Path) -> None:
    python = {"vllm_python": sys.executable}
    plain, named = read_cluster(None, folder / "small", 1, 1), {"engine": "torch"}
    assert plain.default_engine(python, 2) == {"engine": "vllm"}
    assert plain.default_engine(python, 0) == plain.default_engine(python | named, 2) == {}
    in_file = read_cluster(write(folder, worker=named), folder / "small", 1, 1)
    each = read_cluster(write(folder, models=[{"path": str(folder / "small"), "worker": named}]), None, 1, 1)
    assert in_file.default_engine(python, 2) == each.default_engine(python, 2) == {}


def test_where_vllm_is_missing_it_says_how_to_install_it(folder: Path) -> None:
    cluster = read_cluster(None, folder / "small", 1, 1)
    with pytest.raises(StartError, match=r"default on a machine with GPUs, but .*make vllm, or set vllm_python"):
        cluster.default_engine({"vllm_python": str(folder / "nowhere")}, 1)
