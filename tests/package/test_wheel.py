"""The wheel in clean environments: what a user gets who installs Tandem and has no checkout of it."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from cluster.install import EXTRAS

ROOT = Path(__file__).parents[2]
COMMANDS = ("generate", "chat", "status", "top", "explain", "cache", "batch", "keys", "switch")
"""Commands that need no more than the client."""


class Environment:
    """Virtual environment with the wheel and nothing of the checkout."""

    def __init__(self, folder: Path, wheel: Path, extra: str = "", python: str = sys.executable) -> None:
        self.folder = folder
        if python == sys.executable:
            venv.create(folder, with_pip=True)
        else:
            subprocess.run([python, "-m", "venv", folder], check=True)
        self.wheel = f"{wheel}[{extra}]" if extra else str(wheel)
        self.run("python", "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), self.wheel)

    def run(self, program: str, *arguments: str, code: int | None = 0, timeout_s: float = 600) -> str:
        """Run a program of this environment and return what it printed, after checking its exit code."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.folder,
            env=environment | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        printed = done.stdout + done.stderr
        assert code is None or done.returncode == code, printed
        return printed

    @property
    def packages(self) -> set[str]:
        listed = self.run("python", "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check")
        return {line.partition("==")[0].lower() for line in listed.splitlines()}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("base"), wheel)


@pytest.fixture(scope="session")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("client"), wheel, "client")


@pytest.fixture(scope="session")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents' Python that uses Tandem, a file each."""
    folder = tmp_path_factory.mktemp("snippets")
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)):
            if "tandem" in code:
                (folder / f"{document.stem}_{number}.py".lower().replace("-", "_")).write_text(code)
    (folder / "typed.py").write_text((Path(__file__).parent / "typed_client.py").read_text())
    return folder


def test_the_base_is_what_every_part_needs(base: Environment) -> None:
    bring = {"numpy", "protobuf", "pydantic", "pyyaml", "tandem-serving"}
    of_pydantic = {"annotated-types", "pydantic_core", "typing-inspection", "typing_extensions"}
    assert base.packages - {"pip", "setuptools"} == bring | of_pydantic
    base.run("python", "-c", "import tandem_connector, loans.component, loans.peers.socket_network, engine.config")


def test_what_an_environment_lacks_is_named_with_the_command_that_installs_it(
    base: Environment, client: Environment
) -> None:
    for command in (["tandem", "--version"], ["python", "-m", "tandem.cli", "status"]):
        said = base.run(*command, code=2)
        assert re.fullmatch(r"error: No module named '\w+': `pip install '.\[client\]'` .*\n", said)
    assert "pip install '.[worker]'" in client.run("tandem", "demo", code=2)
    planned = client.run("tandem", "plan", "--rate", "1", "--prompt", "100", "--output", "10", code=2)
    assert re.match(r"error: No module named '\w+': `pip install '.\[router\]'`", planned)


def test_the_client_has_the_commands_that_talk(client: Environment) -> None:
    assert client.run("tandem", "--version") == "tandem 0.1.0\n"
    assert not client.packages & {"torch", "transformers", "fastapi", "llguidance", "redis", "ray", "uvloop"}
    for command in COMMANDS:
        assert "Usage" in client.run("tandem", command, "--help")
    refused = client.run("tandem", "--address", "127.0.0.1:1", code=2)
    assert "No such option" in refused
    assert "no router answers at 127.0.0.1:1" in client.run("tandem", "generate", "hi", "-a", "127.0.0.1:1", code=1)
    client.run("python", "-c", "import tandem.errors; from tandem.client import Client, SyncClient, Piece, Receipt")


def test_the_documents_python_is_strictly_typed(client: Environment, snippets: Path) -> None:
    files = [str(path) for path in sorted(snippets.glob("*.py"))]
    assert len(files) >= 3
    python = client.folder / "bin" / "python"
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--cache-dir", "/dev/null"]
    done = subprocess.run([*mypy, *files], cwd=snippets, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"no issues found in {len(files)} source files" in done.stdout


@pytest.mark.long
def test_the_documents_python_passes_pyright(client: Environment, snippets: Path, tmp_path: Path) -> None:
    subprocess.run(["npm", "install", "--silent", "--no-fund", "--prefix", tmp_path, "pyright@1.1"], check=True)
    python = str(client.folder / "bin" / "python")
    pyright = [str(tmp_path / "node_modules" / ".bin" / "pyright"), "--pythonpath", python, str(snippets)]
    (snippets / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    done = subprocess.run(pyright, cwd=snippets, capture_output=True, text=True, check=False)
    assert "0 errors" in done.stdout, done.stdout


@pytest.mark.long
def test_a_router_and_the_demo_run_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    worker = Environment(tmp_path / "worker", wheel, "worker")
    assert "0 mismatched" in worker.run("tandem", "demo")
    assert "cache_salt" not in worker.run("python", "-m", "router", "--help")


@pytest.mark.long
@pytest.mark.parametrize("extra", ["router", "gateway", "plot", "otel", "bench", "preprocessor", "ray"])
def test_each_extra_can_be_installed(wheel: Path, tmp_path: Path, extra: str) -> None:
    there = Environment(tmp_path / extra, wheel, extra)
    assert there.run("tandem", "--version") == "tandem 0.1.0\n"
    for module in EXTRAS[extra]:
        there.run("python", "-c", f"import {module}")
    if extra in ("router", "ray"):
        assert "prefill" in there.run("tandem", "plan", "--rate", "1", "--prompt", "100", "--output", "10")


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_other_versions_of_python(wheel: Path, tmp_path: Path, version: str) -> None:
    pythons = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    if not pythons:
        pytest.skip(f"no Python {version} here")
    there = Environment(tmp_path / version, wheel, "router", str(pythons[-1]))
    assert there.run("tandem", "--version") == "tandem 0.1.0\n"
    assert "prefill" in there.run("tandem", "plan", "--rate", "1", "--prompt", "100", "--output", "10")
