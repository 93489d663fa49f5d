"""Names of vLLM that the hosted engine and TandemConnector use, in the installed version."""

import re
from pathlib import Path

import pytest

from cluster.errors import StartError
from engine.backends.vllm import contract
from engine.backends.vllm.contract import UsedNames
from engine.config import WorkerConfig
from support.real_engines import engines, greedy
from support.vllm_engines import PYTHON, ROOT, ids, need_vllm, vllm_engine
from tandem.doctor.checks import check_environment
from tandem.doctor.machine import Finding, read_machine
from tandem.storyteller import STORYTELLER
from tandem_connector import contract as of_connector

pytestmark = need_vllm
(TREE,) = PYTHON.parent.parent.glob("lib/python3*/site-packages") if PYTHON.exists() else (ROOT,)


@pytest.mark.parametrize("used", [contract.USED, of_connector.USED], ids=["hosted", "connector"])
def test_vllm_has_the_names(used: UsedNames) -> None:
    assert list(used.lacking(TREE)) == []


ANOTHER_VERSION = """
import importlib.metadata as metadata, sys, types
module, of = types.ModuleType("vllm._version"), metadata.version
module.__version__ = module.version = "0.99.1"
module.__version_tuple__ = module.version_tuple = (0, 99, 1)
sys.modules["vllm._version"] = module
metadata.version = lambda name: "0.99.1+cpu" if name == "vllm" else of(name)
"""
WITHOUT_A_NAME = """
from engine.backends.vllm import contract
from engine.config import WorkerConfig
from tandem_connector import contract as of_connector
contract.MEMBERS["vllm.v1.engine.core:EngineCore"] += " no_such_member"
of_connector.MEMBERS["vllm.v1.request:Request"] += " no_such_member"
"""


def python_with(folder: Path, sitecustomize: str) -> Path:
    """vLLM's interpreter, which runs this code as it starts."""
    (folder / "sitecustomize.py").write_text(sitecustomize)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:{ROOT}" exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    return python


def findings_of(python: Path) -> list[Finding]:
    """What the doctor finds in vLLM's environment."""
    config = WorkerConfig.parse({"model": STORYTELLER, "engine": "vllm", "vllm_python": python})
    return check_environment(read_machine(config), config)


async def test_an_untried_version_with_all_names_starts_and_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = python_with(tmp_path, ANOTHER_VERSION)
    assert [(each.check, each.level) for each in findings_of(python)] == [("vllm", "ok"), ("connector", "ok")]
    untried, tried = vllm_engine("untried", vllm_python=python), vllm_engine("tried")
    async with engines(untried, tried):
        answers = [await each.answer(greedy("a", list(range(5, 70)))) for each in (untried, tried)]
    assert ids(answers[0]) == ids(answers[1])
    assert capfd.readouterr().err.count("vLLM 0.99.1 has all names that Tandem uses, but was not tried") == 1


async def test_an_untried_version_that_lacks_a_name_is_refused_by_it(tmp_path: Path) -> None:
    python = python_with(tmp_path, ANOTHER_VERSION + WITHOUT_A_NAME)
    (_, finding, connector), engine = findings_of(python), vllm_engine("lacking", vllm_python=python)
    reason = "vLLM 0.99.1.* lacks names that Tandem uses: vllm.v1.engine.core:EngineCore has no no_such_member"
    assert finding.level == "broken"
    assert re.search(reason, finding.found)
    assert (connector.check, connector.level) == ("connector", "warning")
    assert "lacks names that TandemConnector uses: vllm.v1.request:Request has no no_such_member" in connector.found
    try:
        with pytest.raises(StartError, match=reason) as raised:
            await engine.start()
        assert raised.value.field == "vllm_python"
    finally:
        await engine.host.stop()


def test_names_that_are_gone_are_found(tmp_path: Path) -> None:
    place = "vllm.v1.core.sched.scheduler:Scheduler"
    signatures = {f"{place}.finish_requests": "request_ids no_such_parameter"}
    (tmp_path / "user.py").write_text(
        "from vllm.v1.request import Request, NoSuchName\nfrom vllm.no_such import Thing\n"
    )
    gone = list(UsedNames("it", (), (tmp_path,), {place: "schedule no_such_member"}, signatures).lacking(TREE))
    assert gone[0] == "user.py: vllm.v1.request has no NoSuchName"
    assert gone[1] == "user.py: vllm.no_such has no Thing"
    assert gone[2] == f"{place} has no no_such_member"
    assert gone[3].startswith(f"{place}.finish_requests takes request_ids finished_status")
    assert len(gone) == 4
