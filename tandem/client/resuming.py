"""Continuing a stream at another router: what the client has of it, and which router is asked next. Pure."""

import ipaddress
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.errors import Unavailable
from protos import inference_pb2 as pb

CONTINUE_S = 10.0
"""Seconds for which a client looks for a router that continues a stream; Kubernetes takes about as long to notice that
one is gone."""
START_S = 3.0
"""Seconds for which a client looks for one of several routers that takes a new request. A router that has just come
back is believed dead for up to 2 s, the pause between two attempts to connect (`cluster/network/rpc.py`)."""
FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 1.0
"""First and longest pause, in seconds, after every router was asked once."""


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finished: bool = False


class StreamProgress:
    """Part of a stream that the client has."""

    def __init__(self, request: pb.GenerateRequest, has_others: bool) -> None:
        """Begin; `has_others`: another router may be there to continue the stream, for which a seed is drawn here."""
        self._request = request
        self._choices: dict[int, _Choice] = {}
        self._num_prompt_logprobs = 0
        self._origin: pb.Origin | None = None
        self._is_resuming = False
        self.has_begun = False
        """Whether a response came."""
        sampling = request.sampling
        has_no_resume = request.stream_tool_calls or request.HasField("embedding")
        self._keeps = has_others and not (has_no_resume or _has_media(request))
        if self._keeps and not sampling.HasField("seed") and not _is_greedy(sampling):
            self._request = pb.GenerateRequest()
            self._request.CopyFrom(request)
            self._request.sampling.seed = secrets.randbits(63)

    @property
    def can_continue(self) -> bool:
        """Whether another router can continue it: the first one told its origin, as earlier versions do not."""
        return self._keeps and self._origin is not None and bool(self._origin.revision)

    @property
    def is_complete(self) -> bool:
        """Whether the client has everything, so that it does not matter how the stream ends."""
        finished = sum(choice.finished for choice in self._choices.values())
        return finished == (self._request.sampling.n if self._request.sampling.HasField("n") else 1)

    def add(self, response: pb.GenerateResponse) -> None:
        """Record a response.

        Raises Unavailable for the first one of a router that begins anew, since it does not know how to continue.
        """
        if self._is_resuming and response.origin != self._origin:
            raise Unavailable("the router is of an earlier version, which cannot continue streams")
        self._is_resuming, self.has_begun = False, True
        if not self._keeps:
            return
        if response.HasField("origin"):
            self._origin = response.origin
        self._num_prompt_logprobs += len(response.prompt_logprobs)
        choice = self._choices.setdefault(response.index, _Choice())
        choice.token_ids += response.token_ids
        choice.texts.append(response.text)
        choice.finished |= response.HasField("finish")

    def next_request(self) -> pb.GenerateRequest:
        """Return the request for the next router."""
        if not self.has_begun:
            return self._request
        self._is_resuming = True
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        choices = [
            pb.ResumedChoice(
                index=index, token_ids=choice.token_ids, text="".join(choice.texts), finished=choice.finished
            )
            for index, choice in sorted(self._choices.items())
        ]
        resume = pb.Resume(origin=self._origin, choices=choices, prompt_logprobs=self._num_prompt_logprobs)
        request.resume.CopyFrom(resume)
        return request


class Tries:
    """Number of the router that is asked next, and the pause before."""

    def __init__(self, num_routers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = 0
        """Number in the client's order, counted on over all rounds."""
        self._num_routers, self._clock = num_routers, clock
        self._num_failed = 0
        self._failed_since: float | None = None

    def succeeded(self) -> None:
        """Record that the router answers."""
        self._num_failed, self._failed_since = 0, None

    def failed(self, has_begun: bool) -> float | None:
        """Go on to the next router; return the seconds to wait before, or None to give up."""
        now = self._clock()
        self._failed_since = now if self._failed_since is None else self._failed_since
        self._num_failed += 1
        self.number += 1
        num_rounds = self._num_failed // self._num_routers
        longest_s = CONTINUE_S if has_begun else START_S if self._num_routers > 1 else -1.0
        if num_rounds and now - self._failed_since > longest_s:
            return None
        return min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** (num_rounds - 1)) if num_rounds else 0.0


def may_have_others(addresses: Sequence[str]) -> bool:
    """Return whether more than one router may be meant: by several addresses, or by the name of a host."""
    host = addresses[0].rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return len(addresses) > 1 or host != "localhost"
    return len(addresses) > 1


def _is_greedy(sampling: pb.Sampling) -> bool:
    return sampling.HasField("temperature") and sampling.temperature == 0


def _has_media(request: pb.GenerateRequest) -> bool:
    parts = (part for message in request.messages for part in message.parts)
    return bool(request.media) or any(part.HasField("media") for part in parts)
