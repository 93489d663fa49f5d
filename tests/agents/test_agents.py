"""Whole agents from npm against a cluster: each completes a turn with a tool call. Run by `make test-agents`."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.directing_proxy import DirectingProxy, Direction
from support.openai_http import http_cluster, with_tools
from tandem.local.local_cluster import LocalCluster
from tandem.storyteller import STORYTELLER

BIN = Path(__file__).parents[2] / ".agents" / "node_modules" / ".bin"
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not BIN.exists(), reason="`make agents` installs the agents, from npm"),
]
SAID = "tandem-42"
COMMAND = "echo tandem-$((6*7))"
CODEX = """
model = "teller"
model_provider = "tandem"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.tandem]
name = "Tandem"
base_url = "http://{address}/v1"
env_key = "TANDEM_KEY"
wire_api = "responses"
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """A cluster whose model takes tools and long prompts."""
    model = with_tools(STORYTELLER, tmp_path_factory.mktemp("models") / "teller", max_position_embeddings=131_072)
    async with http_cluster(model, dtype="float32", kv_memory_mib=256) as started:
        yield started


async def run(program: str, *arguments: str, cwd: Path, **environment: str) -> str:
    """Run an agent with an empty home folder; return its output."""
    home = cwd / "home"
    home.mkdir(exist_ok=True)
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb"} | environment
    process = await asyncio.create_subprocess_exec(
        str(BIN / program),
        *arguments,
        cwd=cwd,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(300):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()[-3000:]
    return output.decode()


def events_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


async def test_codex_runs_a_command_over_responses(cluster: LocalCluster, tmp_path: Path) -> None:
    direction = Direction({"exec_command": {"cmd": COMMAND}, "shell": {"command": ["bash", "-lc", COMMAND]}})
    async with DirectingProxy(cluster.router.http_address, direction) as proxy:
        folder = tmp_path / "home" / ".codex"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(CODEX.format(address=proxy.address))
        output = await run(
            "codex", "exec", "--skip-git-repo-check", "--json", "Say hello", cwd=tmp_path, TANDEM_KEY="none"
        )
    events = events_of(output)
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    (command,) = [item for item in done if item["type"] == "command_execution"]
    assert (command["exit_code"], command["aggregated_output"].strip()) == (0, SAID)
    assert any(item["type"] == "agent_message" and item["text"] for item in done)
    assert events[-1]["type"] == "turn.completed"
    assert set(direction.paths) == {"/v1/responses"}
    assert any(SAID in result for result in direction.results), "the result came back to the model"


@pytest.mark.parametrize(
    ("package", "path"),
    [("@ai-sdk/openai-compatible", "/v1/chat/completions"), ("@ai-sdk/anthropic", "/v1/messages")],
)
async def test_opencode_runs_a_command(cluster: LocalCluster, tmp_path: Path, package: str, path: str) -> None:
    direction = Direction({"bash": {"command": COMMAND, "description": "Says it"}})
    async with DirectingProxy(cluster.router.http_address, direction) as proxy:
        provider: Mapping[str, Any] = {
            "npm": package,
            "name": "Tandem",
            "options": {"baseURL": f"http://{proxy.address}/v1", "apiKey": "none"},
            "models": {"teller": {"name": "teller", "limit": {"context": 100_000, "output": 400}}},
        }
        settings = {"autoupdate": False, "share": "disabled", "permission": {"bash": "allow"}}
        (tmp_path / "opencode.json").write_text(json.dumps(settings | {"provider": {"tandem": provider}}))
        output = await run("opencode", "run", "--model", "tandem/teller", "--format", "json", "Say hello", cwd=tmp_path)
    events = events_of(output)
    (used,) = [event["part"] for event in events if event["type"] == "tool_use"]
    assert (used["tool"], used["state"]["status"], used["state"]["output"].strip()) == ("bash", "completed", SAID)
    assert any(event["type"] == "text" and event["part"]["text"] for event in events)
    assert path in direction.paths
    assert any(SAID in result for result in direction.results), "the result came back to the model"
