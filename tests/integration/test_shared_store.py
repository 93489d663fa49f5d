"""The shared store in real places: a folder with writers that are killed, a bucket behind a server, and clusters."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from botocore.exceptions import EndpointConnectionError

from cluster.errors import StartError
from kvcache.layout import KvLayout
from kvcache.store.bucket import BucketObjects
from kvcache.store.kv_store import ObjectMissing, ObjectRefused, StoreError, StoreSettings
from kvcache.store.local import open_shared_store
from support.ports import free_port
from support.processes import Stream, finished, running
from support.store_damage import FORMAT, KEYS, damage_files, kill_writers, object_of
from tandem.local.local_cluster import LocalCluster

BUCKET = "tandem-kv"
PATIENCE_S = 60.0


class S3Server:
    """A server with one bucket, and the environment in which clients find it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.environ = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
        }
        self._client: Any = boto3.client(
            "s3", "us-east-1", endpoint_url=self.url, aws_access_key_id="tests", aws_secret_access_key="tests"
        )

    def create_bucket(self) -> None:
        self._client.create_bucket(Bucket=BUCKET)

    def put(self, path: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=path, Body=content)

    def get(self, path: str) -> bytes:
        content: bytes = self._client.get_object(Bucket=BUCKET, Key=path)["Body"].read()
        return content


@contextmanager
def s3_server() -> Iterator[S3Server]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environ = os.environ | {"MOTO_SERVICE": "s3"}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = S3Server(port)
    try:
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            try:
                server.create_bucket()
                break
            except EndpointConnectionError:
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < give_up_at, "the server does not answer"
                time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()


PROMPTS = [[number, *range(100, 400)] for number in range(4)]
"""18 full blocks and a tail."""


def rows(count: int) -> list[np.ndarray]:
    return list(np.zeros((count, FORMAT.object_bytes), np.uint8))


def test_writers_killed_at_random_leave_whole_objects(tmp_path: Path) -> None:
    """Two writers fill a folder beyond its bound; both are killed again and again."""
    found = kill_writers(tmp_path, 6)
    assert set(found) <= {"used", "missing"}
    assert found["used"] > 60


def test_damaged_files_are_refused_by_name_or_by_fingerprint(tmp_path: Path) -> None:
    found = damage_files(tmp_path, 500)
    assert set(found) == {"used", "missing", "refused", "mismatched"}, "used where the damage fell into padding"
    assert found["used"] < 10


def test_objects_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        objects, other = BucketObjects(BUCKET, "/kv/"), BucketObjects(BUCKET, "kv")
        assert objects.identity == other.identity != BucketObjects(BUCKET, "elsewhere").identity
        names = [FORMAT.name(key) for key in KEYS[:6]]
        assert objects.held(names) == [False] * 6
        for index in (0, 1, 3):
            objects.write(names[index], object_of(index))
        assert server.get(f"kv/{names[1]}") == object_of(1).tobytes()
        assert other.held(names) == [True, True, False, True, False, False]
        found = rows(6)
        failures = other.read(names, found)
        assert [failure is None for failure in failures] == [True, True, False, True, False, False]
        assert all(isinstance(failures[index], ObjectMissing) for index in (2, 4, 5))
        for index in (0, 1, 3):
            assert np.array_equal(found[index], object_of(index))
        server.put(f"kv/{names[0]}", b"short")
        (failure,) = other.read(names[:1], rows(1))
        if failure is None:  # the plugin does not tell a short object from a whole one
            with pytest.raises(ObjectRefused):
                FORMAT.check(KEYS[0], found[5])
        objects.close()
        other.close()
        with pytest.raises(StoreError, match="bucket another-bucket: write of 1 objects failed"):
            BucketObjects("another-bucket", "kv")


@pytest.mark.parametrize(
    ("settings", "field", "reason"),
    [
        ({"kv_store": "/proc/none/store"}, "kv_store", "No such file"),
        ({"kv_store": "DIR", "kv_store_secret_file": "DIR/none"}, "kv_store_secret_file", "No such file"),
        ({"kv_store": "DIR", "kv_store_secret_file": "DIR/short"}, "kv_store_secret_file", "fewer than 16 bytes"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_at_start(
    settings: dict[str, str], field: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "short").write_text("short")
    filled = {name: value.replace("DIR", str(tmp_path)) for name, value in settings.items()}
    layout = KvLayout(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float32")
    with pytest.raises(StartError, match=reason) as refused:
        open_shared_store(StoreSettings(**filled), layout, bytes(32))
    assert refused.value.field == field


def brought(streams: list[Stream]) -> int:
    """Blocks that came from the store, at decode workers or at their lenders."""
    return sum(s.receipt.kv.store_blocks + s.receipt.kv.lender_fetched_blocks for s in streams)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_new_cluster_finds_what_an_earlier_one_computed(
    prefill: int, sim_model: Callable[..., Path], cluster_of: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    model = sim_model(600)
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes or more")
    settings = {"engine": "sim", "kv_store": str(tmp_path / "store"), "kv_store_secret_file": secret}
    settings |= {"sim_prompt_token_us": 500.0}
    answers = []
    for number in range(2):
        cluster = cluster_of(model, prefill=prefill, decode=1, kv_store_writes="computed", **settings)
        async with running(cluster) as (_, client):
            streams = await finished([Stream(client, prompt, 5) for prompt in PROMPTS])
            answers.append([stream.token_ids for stream in streams])
            assert all(not stream.receipt.kv.mismatched_blocks for stream in streams)
            assert brought(streams) == number * 18 * len(PROMPTS)
            if not prefill and number:
                again = await finished([Stream(client, [*PROMPTS[0][:200], 7], 5)])
                assert again[0].receipt.kv.reused_blocks == 12, "they are in its own cache now"
    assert answers[0] == answers[1]
