"""What a drill counts as lost, wrong and recovered."""

import json

import pytest

from cluster.errors import InvalidRequest, Unavailable
from protos import inference_pb2 as pb
from tandem.drill.drill import DrillPlan
from tandem.drill.load import DrillReply, LoadSize
from tandem.drill.report import DrillReport, FaultResult


def answer(*token_ids: int, error: Unavailable | None = None, attempt: int = 1, **kv: int | str) -> DrillReply:
    receipt = pb.Receipt(placement=pb.Placement(attempt=attempt), kv=pb.KvReceipt(**kv))  # type: ignore[arg-type]
    return DrillReply(list(token_ids), error, receipt=receipt)


def test_each_stream_is_counted_by_what_became_of_it() -> None:
    """What came before an error may be wrong too; a prompt without an expected answer can only be lost."""
    result = FaultResult("kill", "decode-0", recovered_s=1.0)
    gone = Unavailable("no worker")
    answers = [
        answer(1, 2),
        answer(1, 2, attempt=3),
        answer(1, 3, mismatched_blocks=2, loan_failure="mismatch"),
        answer(1, error=gone),
        answer(9, error=gone),
        answer(4, hedged_blocks=1),
    ]
    result.add(answers, [[1, 2]] * 5 + [None])
    assert (result.streams, result.lost, result.wrong) == (6, 2, 2)
    assert (result.placed_again, result.loans_failed, result.mismatched_blocks) == (1, 2, 2)
    assert result.errors == ["no worker", "no worker"]
    assert [each.is_undisturbed for each in answers] == [True, False, False, False, False, False]


@pytest.mark.parametrize(
    "bad",
    [{"lost": 1}, {"wrong": 1}, {"stranded_blocks": 1}, {"broken": ["a block has two owners"]}, {"recovered_s": None}],
)
def test_a_drill_fails_by_any_of_its_faults(bad: dict[str, object]) -> None:
    good = FaultResult("stop", "prefill-0", recovered_s=2.0)
    report = DrillReport(0.1, 1.0, 0, [good])
    assert report.passed
    report.results.append(FaultResult("kill", "decode-0", **({"recovered_s": 1.0} | bad)))  # type: ignore[arg-type]
    assert not report.passed
    assert [each["passed"] for each in json.loads(report.to_json())["results"]] == [True, False]


@pytest.mark.parametrize(
    ("field", "plan"),
    [
        ("drill", {"faults": ("kill", "hit")}),
        ("rounds", {"rounds": 0}),
        ("recovery_s", {"recovery_s": float("nan")}),
    ],
)
def test_a_plan_out_of_its_limits(field: str, plan: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        DrillPlan(**plan)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_a_load_of_nothing() -> None:
    with pytest.raises(InvalidRequest, match="output_tokens: must be at least 1, not 0"):
        LoadSize(output_tokens=0)
