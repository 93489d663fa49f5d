"""Tandem's own log of served requests: one JSON object a line, written by a client that has receipts.

    arrived_s      time of arrival, in seconds of any clock; never less than in the line before
    prompt_tokens, completion_tokens
    block_tokens   size of a block in `blocks`, and
    blocks         one number for each block of the prompt, also a partial last one: equal numbers, equal prompts
    tenant, priority, session_id
    ttft_s, itl_s  latencies seen by the client: for `tandem calibrate`; a replay ignores them
    receipt        the receipt in protobuf's JSON form: likewise

A log holds no text and no tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from protos import inference_pb2 as pb
from workloads.traces.columns import BadRow, Row, hash_ids_of, seconds_of, tokens_of, whole_of


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Log entry of one served request."""

    arrived_s: float
    prompt_tokens: int
    completion_tokens: int
    block_tokens: int
    blocks: Sequence[int]
    ttft_s: float
    itl_s: float
    """Mean gap between tokens; 0 for a single token."""
    receipt: pb.Receipt = field(default_factory=pb.Receipt)
    tenant: str = ""
    priority: int = 0
    session_id: str = ""


def write_served(file: TextIO, served: ServedRequest) -> None:
    """Write one line; call in order of arrival."""
    line = {
        "arrived_s": served.arrived_s,
        "prompt_tokens": served.prompt_tokens,
        "completion_tokens": served.completion_tokens,
        "block_tokens": served.block_tokens,
        "blocks": [*served.blocks],
        "tenant": served.tenant,
        "priority": served.priority,
        "session_id": served.session_id,
        "ttft_s": served.ttft_s,
        "itl_s": served.itl_s,
        "receipt": MessageToDict(served.receipt, preserving_proto_field_name=True),
    }
    file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_served(values: dict[str, Any]) -> ServedRequest:
    """Return all fields of a line.

    Raises BadRow.
    """
    row = read_row(values)
    try:
        receipt = ParseDict(values.get("receipt") or {}, pb.Receipt(), ignore_unknown_fields=True)
    except ParseError as error:
        raise BadRow(f"receipt: {error}") from None
    return ServedRequest(
        arrived_s=row.at_s,
        prompt_tokens=row.input_tokens,
        completion_tokens=row.output_tokens,
        block_tokens=row.hash_tokens,
        blocks=row.hash_ids,
        ttft_s=seconds_of(values, "ttft_s", 1.0),
        itl_s=seconds_of(values, "itl_s", 1.0),
        receipt=receipt,
        tenant=row.tenant,
        priority=row.priority,
        session_id=row.session_id,
    )


def read_row(values: dict[str, Any]) -> Row:
    """Return the row of a line.

    Raises BadRow.
    """
    prompt_tokens = tokens_of(values, "prompt_tokens")
    block_tokens = whole_of(values, "block_tokens", 1, 1 << 16, 64)
    return Row(
        at_s=seconds_of(values, "arrived_s", 1.0),
        input_tokens=prompt_tokens,
        output_tokens=tokens_of(values, "completion_tokens"),
        hash_ids=hash_ids_of(values, "blocks", prompt_tokens, block_tokens),
        hash_tokens=block_tokens,
        tenant=str(values.get("tenant", "")),
        priority=whole_of(values, "priority", -(1 << 31), (1 << 31) - 1, 0),
        session_id=str(values.get("session_id", "")),
    )
