"""Fields of all requests of OpenAI's APIs that end in an engine."""

from typing import Annotated

import msgspec

from router.frontend.http.body.fields import INT32, Model
from router.frontend.http.caller import Caller, check_name


class CommonBody(Model):
    """Fields of all requests that end in an engine."""

    model: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=1 - INT32, le=INT32 - 1)] | None = None
    """Lower ones go first, as in vLLM."""
    request_id: str | None = None
    cache_salt: str | None = None
    timeout_ms: Annotated[float, msgspec.Meta(gt=0, le=INT32)] | None = None

    def our_priority(self) -> int:
        """Return the priority in our order: higher ones go first."""
        return -(self.priority or 0)

    def id_of(self, caller: Caller) -> str:
        """Return the request's id.

        Raises InvalidRequest.
        """
        return check_name(self.request_id or "", "request_id") or caller.request_id

    def deadline_s(self) -> float | None:
        return None if self.timeout_ms is None else self.timeout_ms / 1e3
