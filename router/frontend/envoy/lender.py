"""The lender in a request's body. Pure."""

import json
from collections.abc import Mapping
from typing import Any

FIELD = "kv_transfer_params"


def with_lender(body: bytes, values: Mapping[str, Any], lender: str) -> bytes | None:
    """Return a JSON object, whose parsed fields are `values`, with the server from which vLLM borrows blocks.

    All else stays as it is, byte by byte. None where the client set the field itself: it steers its own transfers.
    """
    if values.get(FIELD) is not None:
        return None
    end = body.rindex(b"}")
    # At the end, since of a field that comes twice JSON's readers take the last: the client's may be null.
    field = f"{',' if values else ''}{json.dumps(FIELD)}:{json.dumps({'lender': lender})}"
    return body[:end] + field.encode() + body[end:]
