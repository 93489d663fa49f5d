"""The example plug-ins, installed as packages of their own are: found by their entry points alone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ModelFactory
from engine.config import WorkerConfig
from engine.errors import EngineStartError
from kvtransfer.errors import TransportUnavailable
from kvtransfer.registry import open_transport
from support.processes import Stream, finished
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
LAG = 8


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory with the example package, which processes started meanwhile import from."""
    folder = tmp_path_factory.mktemp("plugins")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(PLUGINS)]
    subprocess.run(command, check=True)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    yield folder
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def test_a_transport_of_another_package_passes_the_contract(installed: Path, tmp_path: Path) -> None:
    suite = tmp_path / "test_process_vm.py"
    suite.write_text((PLUGINS / "test_process_vm.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "40 passed" in done.stdout


async def test_a_cluster_serves_with_an_engine_a_transport_and_a_placement_term_of_another_package(
    installed: Path, sim_model: ModelFactory
) -> None:
    settings = {"model": sim_model(400), "engine": "recall", "transport": "process_vm", "kv_memory_mib": 1}
    topology = plan_topology(1, 1, {"model": settings["model"], "port": 0}, settings, [0, 1])
    prompt = [7 * number % 390 + 1 for number in range(100)]
    async with LocalCluster(topology) as cluster, Client(cluster.address) as client:
        (stream,) = await finished([Stream(client, prompt, 20)])
        explanation = await client.explain(token_ids=prompt)
    expected = list(prompt)
    for _ in range(20):
        expected.append(expected[-LAG])
    assert stream.token_ids == expected[len(prompt) :]
    assert stream.receipt.kv.moved_blocks > 0
    assert stream.receipt.kv.verified_blocks == stream.receipt.kv.moved_blocks
    assert list(stream.receipt.kv.ucx_transports) == ["process_vm/memory"]
    assert explanation.candidates
    for candidate in explanation.candidates:
        assert 0 <= candidate.further_ms["fullness"] <= min(50, candidate.delay_ms)


def test_a_plug_in_that_no_package_has_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(TransportUnavailable, match="unknown transport 'carrier_pigeon'; installed are nixl, ucxx"):
        open_transport("carrier_pigeon", "a")
    with pytest.raises(EngineStartError, match="unknown engine 'abacus'; installed are torch, vllm, sim"):
        WorkerConfig.parse({"model": tmp_path, "engine": "abacus"}).kind  # noqa: B018
