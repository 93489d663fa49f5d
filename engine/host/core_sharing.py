"""Shares of CPU cores for several engines on one host.

Pure.

Engines on the same cores slow each other several times over. A launcher that starts all engines at once may tell each
its cores (`tandem demo`). Otherwise each engine publishes a `CoreClaim`, all compute the same shares from the same
claims, and each takes its own.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.roles import ROLES, Role

DECODE_NICENESS = 3
"""Niceness that gives a decode engine a third of a core shared with a prefill engine. Measured: docs/log.md."""
MAX_CORE = 8191
"""Largest core number that is accepted; more than Linux supports."""
_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4})(?:/([0-9]{1,4}))?)?")


@dataclass(frozen=True, slots=True)
class CoreShare:
    """Share of one engine."""

    own: tuple[int, ...]
    shared: tuple[int, ...] = ()
    """Cores of other engines on which this one computes as well."""
    niceness: int = 0

    def __str__(self) -> str:
        beyond = f", and on {as_ranges(self.shared)} of others" if self.shared else ""
        return f"cores {as_ranges(self.own)}{beyond}"


def share_cores(cores: Sequence[int], roles: Sequence[Role]) -> list[CoreShare]:
    """Return the shares of engines with these roles, one each.

    Own cores are disjoint and as equal as possible, in the order of `cores` (see `in_machine_order`), prefill engines
    first; engines beyond the number of cores share one each.

    Prefill engines also compute on decode engines' cores, each of which is lent to one of them. A decode step mostly
    waits for weights from memory, and a prompt is soon over: prefill gets more of a shared core, or prompts would queue
    behind streams that are faster than a person reads.
    """
    prefill = [number for number, role in enumerate(roles) if role == "prefill"]
    decode = [number for number, role in enumerate(roles) if role == "decode"]
    own = dict(zip([*prefill, *decode], _disjoint(cores, len(roles)), strict=True))
    prefilled_on = {core for number in prefill for core in own[number]}
    lent = [core for number in decode for core in own[number] if core not in prefilled_on]
    shared = {number: tuple(lent[place :: len(prefill)]) for place, number in enumerate(prefill)}
    niceness = DECODE_NICENESS if prefill else 0
    return [
        CoreShare(own[number], shared.get(number, ()), 0 if role == "prefill" else niceness)
        for number, role in enumerate(roles)
    ]


def _disjoint(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    if count >= len(cores):
        return [(cores[number % len(cores)],) for number in range(count)]
    each, extra = divmod(len(cores), count)
    shares: list[tuple[int, ...]] = []
    start = 0
    for number in range(count):
        end = start + each + (number < extra)
        shares.append(tuple(cores[start:end]))
        start = end
    return shares


class CoreClaim(NamedTuple):
    """Claim that an engine publishes to others on its host.

    Claims are ordered by role, then by these fields.
    """

    since: int
    """Start time in nanoseconds since the host booted."""
    pid: int
    role: Role
    told: bool
    """Whether `cores` were told to the engine; otherwise they are the ones it may use."""
    cores: tuple[int, ...]
    """Cores in ascending order."""

    def __str__(self) -> str:
        kind = "told" if self.told else "shares"
        return f"{self.role}-{kind}-{self.since}-{self.pid}-{as_ranges(self.cores)}"

    @classmethod
    def parse(cls, text: str) -> "CoreClaim | None":
        """Parse a claim; None for any other text, since any process may write one."""
        role, _, rest = text.partition("-")
        kind, _, rest = rest.partition("-")
        since, _, rest = rest.partition("-")
        pid, _, ranges = rest.partition("-")
        cores = from_ranges(ranges)
        if role not in ROLES or kind not in ("told", "shares") or not cores:
            return None
        if not all(number.isascii() and number.isdigit() for number in (since, pid)):
            return None
        return cls(int(since), int(pid), role, kind == "told", cores)


def own_share(own: CoreClaim, claims: Iterable[CoreClaim], in_order: Sequence[int]) -> CoreShare:
    """Return the share of an engine that was told nothing.

    Cores told to other engines are theirs, and so are those of engines restricted to a part of this engine's cores,
    while that leaves any. All engines that may use the same cores share the rest. `in_order`: this engine's cores in
    the order in which they are shared out.
    """
    claims = set(claims)
    may_use = set(own.cores)
    taken = {core for claim in claims if claim.told or may_use > set(claim.cores) for core in claim.cores}
    peers = sorted(claim for claim in claims | {own} if not claim.told and claim.cores == own.cores)
    free = [core for core in in_order if core not in taken] or in_order
    return share_cores(free, [peer.role for peer in peers])[peers.index(own)]


def as_ranges(cores: Iterable[int]) -> str:
    """Format cores as Linux does, 0-3,8, and 0-6/2 for every second one."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        last = runs[-1] if runs else []
        if len(last) == 1 or (len(last) > 1 and core - last[-1] == last[1] - last[0]):
            last.append(core)
        else:
            runs.append([core])
    return ",".join(text for run in runs for text in _as_texts(run))


def _as_texts(run: list[int]) -> list[str]:
    first, last = run[0], run[-1]
    step = run[1] - first if len(run) > 1 else 0
    if step == 1:
        return [f"{first}-{last}"]
    return [f"{first}-{last}/{step}"] if len(run) > 2 else [str(core) for core in run]


def from_ranges(text: str) -> tuple[int, ...]:
    """Parse the result of `as_ranges`; empty for any other text."""
    cores: list[int] = []
    for part in text.split(","):
        if (match := _RANGE.fullmatch(part)) is None:
            return ()
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if not first <= last <= MAX_CORE or step < 1 or (cores and first <= cores[-1]):
            return ()
        cores += range(first, last + 1, step)
    return tuple(cores)
