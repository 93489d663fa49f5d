"""Models of the Hugging Face Hub, from a server that speaks its API: what is fetched, by whom, and what goes wrong."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartError
from conftest import Ask, ClusterFactory
from engine.config import WorkerConfig
from engine.errors import ModelRefused
from engine.model.hub import CONFIG_FILES, LORA_FILES, MODEL_FILES, fetch, fetch_beside
from router.config import RouterConfig
from support.hub import EXPIRED, Hub, Served
from support.processes import role, until
from support.refusals import refusal_of
from support.sim_directories import write_sim_model
from tandem.client import Client
from tandem.local.local_cluster import start_role, stop_process
from tandem.storyteller import STORYTELLER
from worker.runtime import with_local_files

WEIGHTS = "model.safetensors"
CONFIGS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
NEVER = ("pytorch_model.bin", "weights.pt", "modeling_story.py", "consolidated.safetensors", "README.md")
HALF = STORYTELLER.joinpath(WEIGHTS).stat().st_size // 2


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub for this process and its children, whose cache is empty."""
    full = shutil.copytree(STORYTELLER, tmp_path / "full")
    for name in NEVER:
        (full / name).write_bytes(b"never")
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with Hub({"org/story": Served({"main": full, "v1": full, "feature/x": full})}) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def unfinished() -> list[Path]:
    return list(Path(os.environ["HF_HOME"]).glob("hub/models--*/blobs/*.incomplete"))


def half_is_there(hub: Hub) -> Callable[[], Awaitable[bool]]:
    async def there() -> bool:
        return WEIGHTS not in hub.holds and bool(unfinished())

    return there


async def test_a_cluster_serves_a_repository_like_its_directory(hub: Hub, cluster_of: ClusterFactory, ask: Ask) -> None:
    prompt = list(range(5, 60))
    async with cluster_of(STORYTELLER) as cluster, Client(cluster.address) as client:
        expected = await ask(client, prompt, max_tokens=24)
    async with cluster_of(Path("org/story@v1")) as cluster, Client(cluster.address) as client:
        assert [model.name for model in await client.list_models()] == ["story"]
        found = await ask(client, prompt, max_tokens=24)
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    assert sorted(hub.bodies()) == sorted([*CONFIGS, WEIGHTS]), "each file once, by whoever came first"


async def test_a_router_fetches_no_weights_and_a_worker_does(hub: Hub) -> None:
    async with role("router", "router", RouterConfig.parse({"model": "org/story@feature/x", "port": 0})) as router:
        assert set(hub.bodies()) == CONFIGS
        sim = WorkerConfig.parse({"model": "org/story", "engine": "sim", "routers": [router.address]})
        await stop_process((await start_role("decode_worker", "sim", sim)).process)
        assert set(hub.bodies()) == CONFIGS, "nor does a simulated worker"
        found = await with_local_files(WorkerConfig.parse({"model": "org/story"}))
        assert hub.bodies(WEIGHTS) == [WEIGHTS]
        assert {file.name for file in found.model.iterdir()} == {*CONFIGS, WEIGHTS}


async def test_adapters_may_be_repositories(hub: Hub, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in (*LORA_FILES.patterns, "optimizer.bin"):
        (adapter / name).write_bytes(b"{}")
    hub.repositories["org/adapter"] = Served({"main": adapter})
    values = {"model": STORYTELLER, "adapters": {"a": "org/adapter"}}
    found = await with_local_files(WorkerConfig.parse(values))
    assert found.model == STORYTELLER
    assert {file.name for file in found.adapters["a"].iterdir()} == set(LORA_FILES.patterns)
    gone = WorkerConfig.parse(values | {"adapters": {"a": "org/gone"}})
    with pytest.raises(StartError, match=r"adapters: no directory 'org/gone'; the Hub at .* has no repository 'org/g"):
        await with_local_files(gone)


@pytest.mark.parametrize(
    ("setting", "environment", "said"),
    [
        ("examples/storyteler", {}, "no directory 'examples/storyteler'; the Hub at {hub} has no repository "),
        ("org/gone", {}, "no repository 'org/gone', or it is private: then set HF_TOKEN"),
        ("org/private", {}, "no repository 'org/private', or it is private: then set HF_TOKEN"),
        ("org/private", {"HF_TOKEN": "another"}, "no repository 'org/private', or HF_TOKEN may not read it"),
        ("org/private", {"HF_TOKEN": EXPIRED}, "does not accept the token in HF_TOKEN"),
        ("org/gated", {}, "is gated: accept its terms at {hub}/org/gated with an account, and set HF_TOKEN"),
        ("org/gated", {"HF_TOKEN": "another"}, "is gated: accept its terms at {hub}/org/gated with the account of HF_"),
        ("org/story@v9", {}, "no directory 'org/story@v9'; the Hub at {hub} has no revision 'v9' of 'org/story'"),
        ("org/story@" + "1" * 40, {}, "the Hub at {hub} has no revision '1111"),
        ("org/story", {"HF_HUB_OFFLINE": "1"}, "'org/story'; HF_HUB_OFFLINE is set, and the cache {home}/hub does not"),
        ("org/story", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hub at http://127.0.0.1:9 cannot be reached (Connec"),
        ("org/gguf", {}, "the repository org/gguf has no config.json"),
        ("org/pickled", {}, "the repository org/pickled has no *.safetensors"),
        (
            "org/a--b",
            {},
            "no directory 'org/a--b'; no name of a repository either: HFValidationError: Cannot have --",
        ),
    ],
)
def test_an_error_names_its_cause(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, environment: dict[str, str], said: str
) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    write_sim_model(tmp_path / "pickled", 100).joinpath("pytorch_model.bin").write_bytes(b"")
    story = hub.repositories["org/story"].revisions["main"]
    hub.repositories |= {
        "org/private": Served({"main": story}, token="right"),
        "org/gated": Served({"main": story}, token="right", gated=True),
        "org/gguf": Served({"main": tmp_path / "gguf"}),
        "org/pickled": Served({"main": tmp_path / "pickled"}),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with refusal_of("model", ModelRefused, says=said.format(hub=hub.url, home=os.environ["HF_HOME"])):
        fetch(Path(setting), MODEL_FILES)
    assert not hub.bodies(WEIGHTS)


@pytest.mark.parametrize("gated", [False, True])
def test_a_token_opens_what_is_private_or_gated(hub: Hub, monkeypatch: pytest.MonkeyPatch, gated: bool) -> None:
    hub.repositories["org/story"].token, hub.repositories["org/story"].gated = "right", gated
    monkeypatch.setenv("HF_TOKEN", "right")
    assert (fetch(Path("org/story"), CONFIG_FILES) / "config.json").exists()


@pytest.mark.parametrize("module", ["router", "prefill_worker", "decode_worker"])
async def test_the_last_line_of_a_process_that_cannot_start_names_the_cause(hub: Hub, module: str) -> None:
    config = (RouterConfig if module == "router" else WorkerConfig).parse({"model": "examples/storyteler"})
    with pytest.raises(StartError) as refused:
        await start_role(module, "it", config)
    assert refused.value.field == "it: model"
    assert refused.value.reason.startswith(
        f"no directory 'examples/storyteler'; the Hub at {hub.url} has no repository"
    )


async def test_what_is_cached_is_served_offline_and_while_the_hub_is_away(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fetch(Path("org/story@v1"), CONFIG_FILES)
    fetched = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(Path("org/story@v1"), CONFIG_FILES) == found
    with pytest.raises(ModelRefused, match=r"HF_HUB_OFFLINE is set, and the cache .* does not have all of 'org/story'"):
        fetch(Path("org/story@v1"), MODEL_FILES)  # a router was here, and no worker
    assert len(hub.requests) == fetched
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.failing = 503
    assert fetch(Path("org/story@v1"), CONFIG_FILES) == found
    with pytest.raises(ModelRefused, match=r"the Hub at .* answers 503, and the cache .* does not have all"):
        fetch(Path("org/story@main"), CONFIG_FILES)


def test_a_download_that_breaks_off_in_the_middle_of_a_file_resumes(hub: Hub, tmp_path: Path) -> None:
    """At the last of huggingface_hub's chunks that arrived whole; each has 10 MiB."""
    large = write_sim_model(tmp_path / "large", 100)
    content = random.Random(1).randbytes(24 << 20)
    (large / WEIGHTS).write_bytes(content)
    hub.repositories["org/large"] = Served({"main": large})
    hub.breaks[WEIGHTS] = 13 << 20
    said: list[str] = []
    found = fetch(Path("org/large"), MODEL_FILES, say=said.append)
    assert (found / WEIGHTS).read_bytes() == content
    assert hub.bodies(WEIGHTS) == [WEIGHTS, f"{WEIGHTS} bytes={10 << 20}-"]
    begin, *_, end = said  # between them its progress, where it takes long
    assert begin == "fetching org/large from the Hugging Face Hub"
    assert end.startswith("fetched org/large: 25.17 MB in ")


async def test_a_worker_that_is_told_to_stop_in_a_download_leaves_no_half_file(hub: Hub) -> None:
    """It says nothing before it is ready, and the next one starts the file again."""
    hub.holds[WEIGHTS] = HALF
    settings = ("model=org/story", "health_port=0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "decode_worker", *(part for each in settings for part in ("--set", each))),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )

    await until(half_is_there(hub), "the weights are on their way")
    process.send_signal(signal.SIGTERM)
    assert await process.stdout.read() == b""
    assert await process.wait() == 0
    assert not unfinished()
    hub.release.set()
    found = await fetch_beside(Path("org/story"), MODEL_FILES)
    assert (found / WEIGHTS).read_bytes() == (STORYTELLER / WEIGHTS).read_bytes()
    assert hub.bodies(WEIGHTS) == [WEIGHTS, WEIGHTS]


async def test_a_download_ends_with_a_process_that_is_killed(hub: Hub) -> None:
    hub.holds[WEIGHTS] = HALF
    code = "from engine.model.hub import *; fetch(Path('org/story'), MODEL_FILES)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await until(half_is_there(hub), "the weights are on their way")
    process.kill()
    await process.wait()

    await until(lambda: not unfinished(), "the download is gone, and its half file")


def test_a_file_that_begins_while_the_download_ends_is_not_left(tmp_path: Path) -> None:
    """Another thread begins one file after the other."""
    program = """
import os, sys, threading
from engine.model.hub_download import end_with_input
threading.Thread(target=end_with_input, daemon=True).start()
print("begun", flush=True)
last = None
for number in range(10**9):
    file = open(f"{sys.argv[1]}/{number}.incomplete", "w")
    if last is not None:
        os.unlink(last.name)
        last.close()
    last = file
"""
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout.readline() == b"begun\n"
        process.stdin.close()
        process.wait()
        assert not list(tmp_path.iterdir())


def test_processes_that_start_together_fetch_a_file_once(hub: Hub) -> None:
    found: list[Path] = []
    starts = [
        threading.Thread(target=lambda: found.append(fetch(Path("org/story"), MODEL_FILES)), daemon=True)
        for _ in range(3)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert hub.bodies(WEIGHTS) == [WEIGHTS]


@pytest.mark.long
def test_a_long_download_tells_its_progress(hub: Hub) -> None:
    hub.holds[WEIGHTS] = 3 << 20
    threading.Timer(12, hub.release.set).start()
    said: list[str] = []
    fetch(Path("org/story"), MODEL_FILES, say=said.append)
    total = sum((STORYTELLER / name).stat().st_size for name in [*CONFIGS, WEIGHTS]) / 1e6
    _, midway, _ = said
    assert f"of {total:.2f} MB after 1" in midway


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--rate", "1", "--prompt", "100", "--output", "10", "--model", "org/story@v1"],
        ["doctor", "--workers", "2", "--model", "org/story"],
    ],
    ids=lambda command: command[0],
)
async def test_commands_that_look_at_a_model_fetch_no_weights(hub: Hub, command: list[str]) -> None:
    program = [sys.executable, "-m", "tandem.cli", *command]
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert set(hub.bodies()) == CONFIGS


def test_the_server_of_these_tests_refuses_what_the_hub_refuses(hub: Hub) -> None:
    """Otherwise the tests above could not fail."""
    import urllib.error
    import urllib.request

    def status(path: str, **headers: Any) -> int:
        request = urllib.request.Request(f"{hub.url}{path}", headers=headers)
        try:
            return int(urllib.request.urlopen(request).status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status("/api/models/org/gone/revision/main") == 401
    assert status("/api/models/org/story/revision/v9") == 404
    assert status("/api/models/org/story/revision/feature%2Fx") == 200
    assert status(f"/org/story/resolve/main/{WEIGHTS}", Range=f"bytes={HALF}-") == 206
