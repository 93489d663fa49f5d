"""Judgement of trials in which KV goes wrong."""

import random
from typing import Any

from bench.compare_kv.__main__ import bars_of
from bench.compare_kv.cases import CASES, Outcome, Trial, beyond, row_of
from bench.compare_kv.sides import Answer, Side, is_decided


def outcome(status: str = "200", equal: bool = True, seconds: float = 0.5, **fields: Any) -> Outcome:
    return Outcome(status, equal, seconds, **({"serves": True, "held": {}, "free_s": 0.1, "notes": {}} | fields))


def test_a_row_counts_wrong_lost_and_hung_trials() -> None:
    failed = outcome("500", equal=False, serves=False, held={"lender": 0.25}, notes={"crashed": ["lender"]})
    hung = outcome("none", equal=False, seconds=9.0, free_s=4.0)
    row = row_of(CASES["stale"], [outcome(), outcome(equal=False), outcome(seconds=10.5), failed, hung])
    assert row.statuses == {"200": 3, "500": 1, "none": 1}
    assert (row.wrong, row.lost, row.hung, row.broken, row.held) == (1, 2, 2, 1, 1)
    assert row.text() == "200 x 3 500 x 1 none x 1, wrong 1, hung 2, broken 1, crashed 1, held 1, 10.5 s, free 4.0 s"


def test_a_receipt_tells_of_detected_damage() -> None:
    said: list[dict[str, Any]] = [{"mismatched": 1}, {"mismatched": 0, "borrowed": 20}, {"mismatched_blocks": 1}]
    row = row_of(CASES["flipped-there"], [outcome(notes={"receipt": receipt}) for receipt in said] + [outcome()])
    assert (row.detected, row.text()) == (2, "200 x 4, detected 2, 0.5 s, free 0.1 s")


def test_a_request_whose_server_is_killed_is_not_lost() -> None:
    closed = outcome("closed", equal=False, seconds=12.0)
    assert (row_of(CASES["borrower-killed"], [closed]).lost, row_of(CASES["borrower-killed"], [closed]).hung) == (0, 0)
    assert row_of(CASES["cut"], [closed]).lost == 1


def test_only_our_sides_have_bars() -> None:
    found = {
        "nixl": {"stale": [outcome(equal=False)]},
        "tandem": {"stale": [outcome(equal=False)], "none": [outcome()]},
    }
    bars = bars_of(found)
    assert [bar.measured for bar in bars] == [1, 0, 0, 0, 0, 0]
    assert [bar.met for bar in bars] == [False, True, True, True, True, True]
    assert all(bar.what.startswith("TandemConnector: ") for bar in bars)


def test_a_prompt_is_decided_where_the_best_token_leads_everywhere() -> None:
    assert is_decided([{"a": -0.1, "b": -3.0}, {"c": -0.5, "d": -0.6}])
    assert not is_decided([{"a": -0.1, "b": -3.0}, {"c": -0.695, "d": -0.692}])
    assert not is_decided([{"a": -0.1}]), "two tokens of one text leave one entry"


async def test_references_are_changed_in_what_their_case_says() -> None:
    class Recorder(Side):
        """Side that keeps the last reference; its lender has blocks of their own for each prompt."""

        sent: dict[str, Any]
        asked = 0

        async def prefill(self, prompt: Any) -> dict[str, Any]:
            self.asked += 1
            numbers = [[self.asked, self.asked + 10]]
            return {"remote_engine_id": "e-109", "remote_request_id": f"r{self.asked}", "remote_block_ids": numbers}

        async def decode(self, prompt: Any, reference: Any) -> Answer:
            self.sent = dict(reference)
            return Answer("200")

        async def compute(self, prompt: Any) -> None: ...

        def receipt_of(self, answer: Answer) -> dict[str, Any]:
            return {}

    async def sent(name: str) -> dict[str, Any]:
        side = Recorder(None, None)  # type: ignore[arg-type]
        await CASES[name].disturb(Trial(side, random.Random(1)), [5])
        return side.sent

    right = {"remote_engine_id": "e-109", "remote_request_id": "r2", "remote_block_ids": [[2, 12]]}
    assert await sent("unknown-engine") == right | {"remote_engine_id": "e-201"}
    assert await sent("unknown-request") == right | {"remote_request_id": "r3"}
    assert await sent("out-of-range") == right | {"remote_block_ids": beyond([[2, 12]])}
    assert beyond([[2, 12]]) == [[962, 972]]
    assert await sent("other-blocks") == right | {"remote_block_ids": [[1, 11]]}
    assert (await sent("used-twice"))["remote_request_id"] == "r1"
