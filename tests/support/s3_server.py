"""A server that speaks S3's protocol, moto's, as a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.exceptions import EndpointConnectionError

from support.ports import free_port

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
