"""A cluster with its own preprocessor, with the sim engine: it serves, starts or does not, and stops."""

import base64
import os
from pathlib import Path

import pytest
import yaml

from cluster.errors import StartError
from support.media_files import picture
from support.media_models import write_media_model
from support.openai_http import call
from support.processes import children_running, state_of
from tandem.cluster_file import read_cluster
from tandem.local.local_cluster import LocalCluster

FILE = picture(1)


def cluster_of(folder: Path, **values: object) -> LocalCluster:
    models = [{"path": str(write_media_model(folder / "seeing"))}]
    worker = {"engine": "sim", "sim_step_ms": 1.0, "kv_memory_mib": 64}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"models": models, "worker": worker, "preprocessor": {"processes": 1}} | values))
    router = {"port": 0, "http_port": 0}
    return LocalCluster(read_cluster(file, None, 1, 1).plan(router, {}, sorted(os.sched_getaffinity(0)), 1))


async def test_a_cluster_reads_pictures_by_its_own_preprocessor(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        role = cluster.preprocessor
        (child,) = children_running(role.pid, "preprocessor.child")
        url = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
        content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        status, _, answer = call(cluster.router.http_address, "/v1/chat/completions", body)
        assert status == 200, answer
        _, _, plain = call(
            cluster.router.http_address,
            "/v1/chat/completions",
            body | {"messages": [{"role": "user", "content": "see"}]},
        )
        assert answer["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 10
    assert role.process.returncode == 0
    assert not state_of(child)


async def test_a_preprocessor_that_does_not_start_ends_the_start(tmp_path: Path) -> None:
    values = {"worker": {"engine": "torch", "kv_memory_mib": 64}}
    with pytest.raises(StartError) as caught:
        async with cluster_of(tmp_path, **values):
            pass
    assert caught.value.field == "preprocessor: engine"
    assert caught.value.reason == "torch reads no pictures, sounds or videos"


async def test_an_engine_without_an_encoder_has_no_encode_workers(tmp_path: Path) -> None:
    with pytest.raises(StartError) as caught:
        async with cluster_of(tmp_path, encoder={}):
            pass
    assert caught.value.field == "encoder-0: engine"
    assert caught.value.reason == "sim has no encoder of its own"
