"""Names that the backend uses of vLLM, in the installed version and in those that TANDEM_VLLM_TREES names."""

import os
from pathlib import Path

import pytest

from support import vllm_contract
from support.vllm_engines import PYTHON, ROOT, need_vllm

pytestmark = need_vllm
INSTALLED = [str(each) for each in PYTHON.parent.parent.glob("lib/python3*/site-packages")]
TREES = [each for each in os.environ.get("TANDEM_VLLM_TREES", "").split(":") if each]


@pytest.mark.parametrize("tree", INSTALLED + TREES)
def test_vllm_has_the_names_that_the_backend_uses(tree: str) -> None:
    assert list(vllm_contract.lacking(ROOT / tree, ROOT / "engine")) == []


def test_names_that_are_gone_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "vllm.v1.core.sched.scheduler:Scheduler"
    monkeypatch.setattr(vllm_contract, "MEMBERS", {place: "schedule no_such_member"})
    monkeypatch.setattr(vllm_contract, "SIGNATURES", {f"{place}.finish_requests": "request_ids no_such_parameter"})
    (tmp_path / "user.py").write_text(
        "from vllm.v1.request import Request, NoSuchName\nfrom vllm.no_such import Thing\n"
    )
    gone = list(vllm_contract.lacking(Path(INSTALLED[0]), tmp_path))
    assert gone[0] == "user.py: vllm.v1.request has no NoSuchName"
    assert gone[1] == "user.py: vllm.no_such has no Thing"
    assert gone[2] == f"{place} has no no_such_member"
    assert gone[3].startswith(f"{place}.finish_requests takes request_ids finished_status")
    assert len(gone) == 4
