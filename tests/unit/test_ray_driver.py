"""The start of a Ray cluster for `tandem up`, and what is shown of a role's log."""

import io
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console

from cluster.errors import StartError
from tandem.progress import ProgressSteps
from tandem.ray.driver import RAY_ATTEMPTS, start_ray
from tandem.ray.role_actor import LAST_LINES, last_lines

LATE = "The current node timed out during startup. This could happen because ..."
OTHER = "no room"


@pytest.mark.parametrize(
    ("errors", "num_starts", "refused"),
    [
        ([], 1, ""),
        ([LATE], 2, ""),
        ([LATE] * RAY_ATTEMPTS, RAY_ATTEMPTS, "timed out"),
        ([OTHER], 1, OTHER),
    ],
)
def test_a_node_that_is_late_is_started_again(
    monkeypatch: pytest.MonkeyPatch, errors: list[str], num_starts: int, refused: str
) -> None:
    starts, left = [], list(errors)

    def init(**options: Any) -> None:
        starts.append(options)
        if left:
            raise Exception(left.pop())

    monkeypatch.setattr(ray, "init", init)
    say = ProgressSteps(Console(file=io.StringIO()), "")
    if refused:
        with pytest.raises(StartError, match=refused) as caught:
            start_ray(say, namespace="n")
        assert caught.value.field == "ray"
    else:
        start_ray(say, namespace="n")
    assert starts == [{"address": "local", "namespace": "n"}] * num_starts


def test_the_end_of_a_log_is_shown_without_ray_s_own_lines(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text(":job_id:01\n:actor_name:RoleActor\nfirst\nlast\n")
    assert last_lines(str(log)) == ["first", "last"]
    log.write_text("".join(f"{number}\n" for number in range(100)))
    assert last_lines(str(log)) == [str(number) for number in range(100 - LAST_LINES, 100)]
    assert last_lines(str(tmp_path / "on another node")) == last_lines("") == []
