"""Which CPU cores each of several engines on one host computes on. Pure.

Engines that are not kept apart slow each other several times over. Who starts all of them for good knows how many there
are, and may tell each its cores (`tandem demo`). Where nobody does, each says what it is (a `CoreClaim`), all
reckon the same shares from the same claims, and each takes its own.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.roles import ROLES, Role

DECODE_NICENESS = 3
"""Of two engines on one core, the one that decodes gets a third. Measured: docs/benchmarks.md."""
MAX_CORE = 8191
"""More than Linux knows of."""
_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4})(?:/([0-9]{1,4}))?)?")


@dataclass(frozen=True, slots=True)
class CoreShare:
    """Of one engine."""

    own: tuple[int, ...]
    shared: tuple[int, ...] = ()
    """Cores of others that it computes on as well."""
    niceness: int = 0

    def __str__(self) -> str:
        beyond = f", and on {as_ranges(self.shared)} of others" if self.shared else ""
        return f"cores {as_ranges(self.own)}{beyond}"


def share_cores(cores: Sequence[int], roles: Sequence[Role]) -> list[CoreShare]:
    """Of an engine of each role. Disjoint cores of their own, as equally many as can be, in the order of `cores` (see
    `in_machine_order`) and those for prefill first; engines beyond the number of cores share one each.

    Prefill engines compute on decode engines' cores too, each of which is lent to one of them. A decode step mostly
    waits for weights to come from memory, and a prompt is soon over: it gets more of a core that both want, or prompts
    would queue behind streams that are faster than anybody reads.
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
    """What an engine says to the others of its host. They are served in the order of their roles, then of these."""

    since: int
    """Nanoseconds since the host started."""
    pid: int
    role: Role
    told: bool
    """Whether `cores` are those it was told to use; else those it may use."""
    cores: tuple[int, ...]
    """In order."""

    def __str__(self) -> str:
        kind = "told" if self.told else "shares"
        return f"{self.role}-{kind}-{self.since}-{self.pid}-{as_ranges(self.cores)}"

    @classmethod
    def parse(cls, text: str) -> "CoreClaim | None":
        """None for what no claim is written like: anybody may write one."""
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
    """Of an engine that was told nothing: what others were told to use is theirs, and so is what others may use who may
    use nothing else, while that leaves anything; the rest is shared by all who may use the same cores. `in_order`: the
    engine's cores, in the order in which they are shared out."""
    claims = set(claims)
    may_use = set(own.cores)
    taken = {core for claim in claims if claim.told or may_use > set(claim.cores) for core in claim.cores}
    peers = sorted(claim for claim in claims | {own} if not claim.told and claim.cores == own.cores)
    free = [core for core in in_order if core not in taken] or in_order
    return share_cores(free, [peer.role for peer in peers])[peers.index(own)]


def as_ranges(cores: Iterable[int]) -> str:
    """0-3,8 as Linux writes them, and 0-6/2 for every second one."""
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
    """Empty for anything that `as_ranges` does not write."""
    cores: list[int] = []
    for part in text.split(","):
        if (match := _RANGE.fullmatch(part)) is None:
            return ()
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if not first <= last <= MAX_CORE or step < 1 or (cores and first <= cores[-1]):
            return ()
        cores += range(first, last + 1, step)
    return tuple(cores)
