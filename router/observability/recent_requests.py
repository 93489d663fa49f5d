"""Recently ended requests with their receipts, without texts of prompts and outputs.

Pure.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict

from protos import inference_pb2 as pb
from router.placement.demand import Alternative
from router.placement.place import Decision

MOST = 256
MOST_WITH_THUMBNAILS = 40
"""Requests whose thumbnails are kept: as many as the console shows."""


@dataclass(slots=True)
class _Ended:
    number: int
    at: float
    finish: pb.Finish
    decision: Decision | None
    num_output_tokens: int
    total_s: float
    ttft_s: float
    thumbnails: Sequence[str]


class RecentRequests:
    """Recent requests of one router."""

    def __init__(self, most: int = MOST) -> None:
        self._ended: deque[_Ended] = deque(maxlen=most)
        self._count = 0

    def add(
        self,
        at: float,
        finish: pb.Finish,
        decision: Decision | None,
        num_output_tokens: int,
        ttft_s: float,
        total_s: float,
        thumbnails: Sequence[str] = (),
    ) -> None:
        """Add a request that ended `at` seconds since the epoch.

        `decision` is that of its last placement; `num_output_tokens` counts all choices; `thumbnails` are data: URLs.
        """
        if finish.HasField("receipt"):
            ended = _Ended(self._count, at, finish, decision, num_output_tokens, total_s, ttft_s, thumbnails)
            self._ended.append(ended)
            self._count += 1
            if len(self._ended) > MOST_WITH_THUMBNAILS:
                self._ended[-1 - MOST_WITH_THUMBNAILS].thumbnails = ()

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return the requests from `number` on as JSON values; numbers grow by one."""
        return [_as_json(ended) for ended in self._ended if ended.number >= number]


def _as_json(ended: _Ended) -> dict[str, Any]:
    receipt, usage = ended.finish.receipt, ended.finish.usage
    return {
        "number": ended.number,
        "at": ended.at,
        "ttft_ms": ended.ttft_s * 1e3,
        "total_ms": ended.total_s * 1e3,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": ended.num_output_tokens,
        "cached_tokens": usage.cached_tokens,
        "receipt": MessageToDict(receipt, preserving_proto_field_name=True),
        "thumbnails": list(ended.thumbnails),
        "ways": [] if ended.decision is None else _ways(ended.decision),
    }


def _ways(decision: Decision) -> list[dict[str, Any]]:
    """Return the chosen candidate and the next best."""
    chosen = Alternative(decision.decode_id, decision.lender_id, decision.lender_computes, decision.cost_s)
    return [
        {
            "decode_worker": way.decode_id,
            "lender": way.lender_id or "",
            "lender_computes": way.lender_computes,
            "cost_ms": way.cost_s * 1e3,
        }
        for way in (chosen, *decision.alternatives)
    ]
