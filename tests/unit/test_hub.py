"""Which `model` settings name a repository of the Hub, and what clients call it."""

from pathlib import Path

import pytest

from engine.config import WorkerConfig
from engine.model.hub import CONFIG_FILES, Repository, absolute, fetch, model_name, repository_of
from engine.model.model_dir import ModelDir
from router.models.config import ModelsConfig
from support.sim_directories import write_sim_model


@pytest.mark.parametrize(
    ("setting", "name", "revision"),
    [
        ("org/name", "org/name", ""),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", ""),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/7", "org/name", "refs/pr/7"),
        (f"a_b/c.d@{'0' * 40}", "a_b/c.d", "0" * 40),
    ],
)
def test_a_repository_is_named_with_its_owner(setting: str, name: str, revision: str) -> None:
    assert repository_of(Path(setting)) == Repository(name, revision)
    assert model_name(Path(setting)) == name.partition("/")[2]
    assert absolute(Path(setting)) == Path(setting)


@pytest.mark.parametrize("setting", ["name", "/org/name", "../org/name", "a/b/c", "org/name@", "org/n ame", "~/name"])
def test_what_else_may_be_a_path_is_one(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert repository_of(Path(setting)) is None
    assert absolute(Path(setting)).is_absolute()
    assert fetch(Path(setting), CONFIG_FILES) == Path(setting), "whoever opens it says that it is not there"


def test_a_directory_that_is_there_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    write_sim_model(tmp_path / "org" / "name@v1", 100)
    here = Path("org/name@v1")
    assert repository_of(here) is None
    assert (absolute(here), fetch(here, CONFIG_FILES)) == (tmp_path / here, here)
    assert model_name(here) == ModelDir.open(here).name == "name@v1"


def test_a_path_that_begins_with_a_dot_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    router = ModelsConfig.parse({"model": "./org/name"})
    worker = WorkerConfig.parse({"model": "./org/name", "adapters": {"a": "./org/other"}})
    named = (router.model, worker.model, worker.adapters["a"])
    assert named == tuple(tmp_path / "org" / each for each in ("name", "name", "other"))
    assert WorkerConfig.parse({"model": "org/name@main"}).model == Path("org/name@main")


def test_a_fetched_model_has_the_name_of_its_repository(tmp_path: Path) -> None:
    for folder, name, expected in (("models--org--a-name", "0" * 40, "a-name"), ("models", "mine", "mine")):
        snapshots = tmp_path / folder / "snapshots"
        snapshots.mkdir(parents=True)
        assert ModelDir.open(write_sim_model(snapshots / name, 100)).name == expected
