"""`tandem up`, alone and as a Ray job, on a real Ray cluster; and `tandem demo`, `generate`, `chat`."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import Unavailable
from engine.host.cores import DECODE_NICENESS
from protos import inference_pb2 as pb
from support.batch_site import begin, client_of, content_of, ended
from support.hub import Hub, Served
from support.media_files import picture
from support.media_models import write_media_model
from support.ports import free_port
from support.sim_directories import write_sim_model
from tandem.client import Client
from tandem.storyteller import STORYTELLER

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
MARK = ("TANDEM_STARTED_BY", str(os.getpid()))
"""In the environment of all that these tests start: other tests' processes run at the same time."""
START_S = 600.0
"""Seconds to wait for what a Ray cluster takes to start, on the slowest and busiest machine."""
STATE = tempfile.TemporaryDirectory(prefix="tandem-state-")
"""Where these clusters keep files and batches, instead of the user's folder."""
ENVIRONMENT = os.environ | {
    MARK[0]: MARK[1],
    "XDG_STATE_HOME": STATE.name,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else a token that an earlier Ray left in the home folder is wanted here and there
    "PYTHONUNBUFFERED": "1",
    "COLUMNS": "200",
}


def run(*arguments: str, timeout: float = 600, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env=ENVIRONMENT,
        **options,
    )


def of_this_model(model: Path) -> dict[int, str]:
    """Command lines by pid of running processes that name `model`, and of engines."""
    lines = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                ours = "=".join(MARK).encode() in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(model) in command or (ours and "engine.process.engine_process" in command):
                lines[int(entry.name)] = command
    return lines


def niceness_of_engines(model: Path) -> list[int]:
    """How far each engine gives way to other processes, more than these tests: Ray's own default is 15."""
    pids = [pid for pid, command in of_this_model(model).items() if "engine.process.engine_process" in command]
    return sorted(os.getpriority(os.PRIO_PROCESS, pid) - os.getpriority(os.PRIO_PROCESS, 0) for pid in pids)


def wait_until_gone(model: Path, timeout_s: float = START_S) -> None:
    give_up_at = time.monotonic() + timeout_s
    while left := of_this_model(model):
        assert time.monotonic() < give_up_at, left
        time.sleep(0.1)


def wait_until_nothing_is_new(shared_memory: set[str], timeout_s: float = 60) -> None:
    """Other tests' comes and goes in a moment."""
    give_up_at = time.monotonic() + timeout_s
    left = set(os.listdir("/dev/shm")) - shared_memory
    while left:
        assert time.monotonic() < give_up_at, left
        time.sleep(0.1)
        left &= set(os.listdir("/dev/shm"))


async def tokens_from(address: str) -> list[int]:
    """Wait for the cluster, then one request whose KV must move."""
    async with Client(address) as client:
        give_up_at = time.monotonic() + START_S
        while True:
            try:
                await client.wait_for_workers(1, 1, timeout_s=START_S)
                break
            except Exception:
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(0.2)
        tokens: list[int] = []
        async for message in client.generate(token_ids=list(range(1, 60)), timeout_s=200):
            tokens += message.token_ids
        assert message.finish.receipt.kv.moved_blocks == 3
        return tokens


async def batch_by(http_port: int) -> None:
    """Upload a file and run a batch of it, by OpenAI's client."""
    async with client_of(f"127.0.0.1:{http_port}") as client:
        body = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        batch = await ended(client, (await begin(client, [line])).id)
        (answered,) = await content_of(client, batch.output_file_id)
        assert answered["response"]["body"]["usage"]["completion_tokens"] == 3


@pytest.fixture
def ray_head() -> Iterator[str]:
    """A Ray cluster of its own, as `ray start` makes it: its dashboard's address.

    It lies in a folder of its own, so that whoever looks for a cluster on this machine does not find it. A socket's
    path in it must be short.
    """
    port, dashboard = free_port(), free_port()
    options = (f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2", "--object-store-memory=100000000")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [BIN / "ray", "start", "--head", "--block", "--disable-usage-stats", "--temp-dir", folder, *options]
        head = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
        assert head.stdout is not None
        printed = ""
        while "Ray runtime started" not in printed:
            line = head.stdout.readline()
            assert line, printed
            printed += line
        yield f"http://127.0.0.1:{dashboard}"
        head.terminate()
        head.communicate()


def submit(*arguments: str) -> None:
    """Submit a Ray job; a cluster that has just started has no agent to take it yet."""
    give_up_at = time.monotonic() + START_S
    while True:
        submitted = run(BIN / "ray", "job", "submit", *arguments)
        printed = submitted.stdout + submitted.stderr
        if "No available agent" not in printed or time.monotonic() > give_up_at:
            assert submitted.returncode == 0, printed
            return
        time.sleep(1.0)


def test_ray_job_submit(tiny_model: Path, ray_head: str, tmp_path: Path) -> None:
    port = free_port()
    settings = "--no-http --worker dtype=float32 --worker kv_memory_mib=16"
    words = f"{BIN / 'tandem'} up --model {tiny_model} --port {port} {settings}".split()
    submit("--address", ray_head, "--working-dir", ".", "--no-wait", "--submission-id", "tandem-test", "--", *words)
    try:
        assert len(asyncio.run(tokens_from(f"127.0.0.1:{port}"))) == 256
        assert niceness_of_engines(tiny_model) == [0, DECODE_NICENESS]
    finally:
        logs = run(BIN / "ray", "job", "logs", "--address", ray_head, "tandem-test").stdout
        run(BIN / "ray", "job", "stop", "--address", ray_head, "tandem-test")
    assert "joined the Ray cluster that was running" in logs
    assert f"serving at 127.0.0.1:{port}" in logs
    wait_until_gone(tiny_model)
    a_batch_brings_its_cluster(tmp_path, ray_head)


def a_batch_brings_its_cluster(folder: Path, ray_head: str) -> None:
    """As a Ray job: it starts, works, and leaves nothing behind but its answers."""
    model = write_sim_model(folder / "simulated", 1000)
    cluster, prompts, answers = (folder / name for name in ("cluster.yaml", "in.jsonl", "out.jsonl"))
    settings = {"models": [{"path": str(model)}], "worker": {"engine": "sim", "kv_memory_mib": 16}}
    cluster.write_text(json.dumps(settings))
    lines = [{"id": str(n), "token_ids": [n, 1, 2], "sampling": {"max_tokens": 5, "temperature": 0}} for n in range(20)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"id": "bad", "sampling": {}}]))
    tandem = f"{BIN / 'tandem'} batch {prompts} -o {answers} --up {cluster}"
    submitted = run(BIN / "ray", "job", "submit", "--address", ray_head, "--working-dir", ".", "--", *tandem.split())
    assert submitted.returncode == 1, submitted.stdout + submitted.stderr
    assert "20 finished, 1 failed" in submitted.stdout
    assert "tandem: stopped" in submitted.stdout
    said = {line["id"]: line for line in map(json.loads, answers.read_text().splitlines())}
    assert said.keys() == {"bad", *(str(n) for n in range(20))}
    assert all(len(said[str(n)]["token_ids"]) == 5 for n in range(20))
    wait_until_gone(model)


def test_ctrl_c_leaves_nothing_behind(tiny_model: Path) -> None:
    port, http_port = free_port(), free_port()
    shared_memory = set(os.listdir("/dev/shm"))
    up = subprocess.Popen(
        [
            *(BIN / "tandem", "up", "--model", tiny_model, "--worker", "kv_memory_mib=16"),
            *("--port", str(port), "--http-port", str(http_port)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    assert up.stdout is not None
    try:
        assert up.stdout.readline().startswith("tandem: tiny-llama"), "says what it does before anything slow"
        asyncio.run(tokens_from(f"127.0.0.1:{port}"))
        assert niceness_of_engines(tiny_model) == [0, DECODE_NICENESS]
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/ready", timeout=60) as answer:
            assert json.load(answer)["status"] == "ready"
        asyncio.run(batch_by(http_port))
        os.killpg(up.pid, signal.SIGINT)  # as a terminal does: the whole group
        output = up.communicate(timeout=START_S)[0]
    finally:
        if up.poll() is None:
            os.killpg(up.pid, signal.SIGKILL)
    assert up.returncode == 0, output
    assert output.splitlines()[-1] == "tandem: stopped"
    assert all(line.startswith("tandem: ") for line in output.splitlines()), "logs are in files"
    logs = re.findall(r"(\S+) starts; its log: (\S+)\n", output)
    assert {name for name, _ in logs} == {"router", "prefill-0", "decode-0"}
    assert all(Path(log).is_file() for _, log in logs)
    assert "decode-0 is ready, started in " in output
    assert f"OpenAI-compatible API at http://127.0.0.1:{http_port}/v1" in output
    assert f"files and batches in {STATE.name}/tandem/tandem-{port}/batches" in output
    wait_until_gone(tiny_model)
    wait_until_nothing_is_new(shared_memory)
    assert not [line for line in run("ps", "-eo", "args").stdout.splitlines() if "raylet" in line]


def test_a_repository_of_the_hub_is_served(tmp_path: Path) -> None:
    """The driver asks the Hub first: a repository that is not there is told before Ray is started."""
    port = free_port()
    with Hub({"org/story": Served({"main": STORYTELLER})}) as hub:
        environment = ENVIRONMENT | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        command = [BIN / "tandem", "up", "--worker", "kv_memory_mib=16", "--port", str(port), "--no-http", "--model"]
        refused = subprocess.run(
            [*command, "org/gone"], env=environment, capture_output=True, text=True, timeout=START_S
        )
        assert refused.returncode == 2
        last = refused.stderr.splitlines()[-1]
        assert last.startswith(f"error: model: no directory 'org/gone'; the Hub at {hub.url} has no repository")
        assert "Ray" not in refused.stdout

        up = subprocess.Popen(
            [*command, "org/story"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert asyncio.run(tokens_from(f"127.0.0.1:{port}"))
            up.send_signal(signal.SIGINT)
            output = up.communicate(timeout=START_S)[0]
        finally:
            up.kill()
        assert output.splitlines()[-1] == "tandem: stopped"
        assert "tandem: story, 1 prefill + 1 decode" in output
        assert hub.bodies(".safetensors") == ["model.safetensors"]


async def sees(address: str) -> bool:
    """Whether a chat with a picture is answered."""
    message = ("user", ["see", {"type": "image", "data": picture(1)}])
    async with Client(address) as client:
        try:
            pieces = client.generate(messages=[message], sampling=pb.Sampling(max_tokens=2), timeout_s=120)
            return [piece async for piece in pieces][-1].HasField("finish")
        except Unavailable:
            return False


def seen_within(address: str, timeout_s: float = START_S) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not asyncio.run(sees(address)):
        assert time.monotonic() < give_up_at, "a chat with a picture is not answered"
        time.sleep(0.2)


def preprocessors() -> dict[int, int]:
    """The actor of each running child of a preprocessor that these tests have started."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            is_one = entry.name.isdigit() and b"preprocessor.child" in (entry / "cmdline").read_bytes()
            if is_one and "=".join(MARK).encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


def test_a_cluster_has_its_own_preprocessor_which_starts_again(tmp_path: Path) -> None:
    port = free_port()
    model = write_media_model(tmp_path / "seeing")
    worker = {"engine": "sim", "sim_step_ms": 1.0, "kv_memory_mib": 16}
    values = {"models": [{"path": str(model)}], "worker": worker, "preprocessor": {"processes": 1}}
    (tmp_path / "cluster.yaml").write_text(json.dumps(values))
    command = [BIN / "tandem", "up", "--config", tmp_path / "cluster.yaml", "--port", str(port), "--no-http"]
    up = subprocess.Popen(
        command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        seen_within(f"127.0.0.1:{port}")
        ((child, actor),) = preprocessors().items()
        os.kill(actor, signal.SIGKILL)
        seen_within(f"127.0.0.1:{port}")
        ((again, _),) = preprocessors().items()
        assert again != child
        up.send_signal(signal.SIGINT)
        output = up.communicate(timeout=START_S)[0]
    finally:
        up.kill()
    assert output.splitlines()[-1] == "tandem: stopped"
    assert "tandem: preprocessor: its actor died" in output
    assert "tandem: preprocessor runs again" in output
    wait_until_gone(model)
    assert not preprocessors()


@pytest.mark.parametrize("what", ["no such directory", "unsupported architecture", "port in use", "unknown key"])
def test_a_failed_start_names_its_cause_in_the_last_line(tiny_model: Path, tmp_path: Path, what: str) -> None:
    arguments, cause = ["--model", tiny_model, "--http-port", "0", "--port", str(free_port())], ""
    with socket.socket() as taken:
        match what:
            case "no such directory":
                arguments, cause = ["--model", tmp_path / "nowhere"], "error: model: no directory"
            case "unsupported architecture":
                config = {"model_type": "t5", "vocab_size": 9, "n_positions": 64, "is_encoder_decoder": True}
                (tmp_path / "config.json").write_text(json.dumps(config))
                arguments, cause = ["--model", tmp_path, "--port", "0", "--http-port", "0"], "error: "
            case "port in use":
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                port = taken.getsockname()[1]
                arguments, cause = [*arguments[:-1], str(port)], "error: router: port: cannot listen on"
            case "unknown key":
                arguments, cause = [*arguments, "--worker", "colour=blue"], "error: colour: unknown key; known are"
        failed = run(BIN / "tandem", "up", *arguments)
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert failed.stderr.splitlines()[-1].startswith(cause), failed.stderr
    if what == "unsupported architecture":
        assert "-0: model: t5 is an encoder-decoder" in failed.stderr.splitlines()[-1]


def test_demo_generate_and_chat() -> None:
    shown = run(BIN / "tandem", "demo", timeout=600)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stdout.count("why: ") == 10, "eight requests, then two again"
    *_, summed_up, _, _ = shown.stdout.strip().splitlines()
    moved = [int(count) for count in re.findall(r"(\d+) moved", shown.stdout)]
    assert len(moved) == 10
    reused = sum(int(count) for count in re.findall(r"(\d+) reused,", shown.stdout))
    assert summed_up == (
        f"both rounds: 4 of 4 loans were whole; {sum(moved)} KV blocks moved, {sum(moved)} verified, 0 mismatched; "
        f"{reused} reused from the cache"
    )
    assert sum(moved[:8]) == sum(moved) > 40, "the second round reuses what is there"
    assert "over nixl" in shown.stdout
    assert "Once" in shown.stdout
    assert "where the time of" in shown.stdout
