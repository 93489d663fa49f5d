"""Pool sizes: `decide` maps an observation and the remembered state to desired sizes.

Pure.

Invariants of all desired sizes, whatever is observed (`tests/unit/test_planner_policy.py`):

- Each pool is within its bounds, and both together within `max_total`, except that min_workers has precedence.
- A pool grows at once, to the size that the predicted load needs when a new worker would serve: by arrival rate and by
  waiting work, which rises before any request is late.
- A pool shrinks only when fewer workers would have sufficed for `down_after_s` without interruption, even for a load
  larger by `margin`; then one step each `down_every_s`. A load that varies by less changes nothing.
- A pool is empty only where `min_workers` allows it, nothing runs or waits, and no request came for `down_after_s`.
- Where one pool lacks a worker and the other can spare one, that worker switches if this is faster than a start. A pool
  gets no worker that the other pool needs.
- More waiting work never makes a pool smaller.
"""

from dataclasses import dataclass, replace

from cluster.roles import ROLES, Role
from planner.config import PolicyConfig, PoolConfig
from planner.estimates import Estimates, Observation, decode_is_full, load_of, streams_per_worker

BUSY = 0.6
"""Busy share below which more workers would not help, whatever misses the SLO."""
RAISE_S, LOWER_S = 600.0, 1800.0
"""Seconds in which headroom grows by 1, and shrinks by 1."""
DOWN_SHARE = 0.2
"""Size of a shrink step as a share of the pool, rounded down, at least one worker."""
MOST_HEADROOM = 2.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """Remembered state of one pool."""

    wanted: int
    headroom: float
    needs: tuple[tuple[float, int], ...] = ()
    """Needed workers, margin included, with their times within `down_after_s`; only entries that no later one exceeds,
    so the first is the maximum."""
    shrunk_at: float = -1e18

    @property
    def most_needed(self) -> int:
        return self.needs[0][1]


@dataclass(frozen=True, slots=True)
class PolicyState:
    """State kept between decisions."""

    began_at: float
    seen: Observation
    learned: Estimates
    prefill: PoolState
    decode: PoolState
    asked_at: float
    """Time when the last request arrived, waited or ran."""

    def pool(self, role: Role) -> PoolState:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class DesiredSizes:
    """Desired numbers of workers, starting ones included."""

    prefill: int
    decode: int
    to_prefill: int = 0
    """Decode workers that should become prefill workers; they count as prefill already."""
    to_decode: int = 0

    def pool(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class _Need:
    """Present need of one pool."""

    now: int
    spare: int
    """Workers that the pool could spare, by all that is remembered."""


def decide(state: PolicyState | None, seen: Observation, config: PolicyConfig) -> tuple[PolicyState, DesiredSizes]:
    """Return the new state and the desired sizes.

    `state` is None at first, and later the state returned for the previous, earlier observation. The first desired
    sizes are the present ones, within the bounds.
    """
    if state is None:
        state = _begin(seen, config)
        return state, DesiredSizes(state.prefill.wanted, state.decode.wanted)
    assert seen.at_s > state.seen.at_s, "time goes on"
    state = _remember(state, seen, config)
    needs = {role: _need(role, state, config) for role in ROLES}
    wanted = {role: state.pool(role).wanted for role in ROLES}
    to_prefill = _switch("decode", "prefill", wanted, needs, config)
    to_decode = _switch("prefill", "decode", wanted, needs, config)
    _grow(wanted, needs, config)
    shrunk = _shrink(wanted, state, needs, config)
    pools = {
        role: replace(
            state.pool(role),
            wanted=wanted[role],
            shrunk_at=seen.at_s if role in shrunk else state.pool(role).shrunk_at,
        )
        for role in ROLES
    }
    state = replace(state, prefill=pools["prefill"], decode=pools["decode"])
    return state, DesiredSizes(wanted["prefill"], wanted["decode"], to_prefill, to_decode)


def _begin(seen: Observation, config: PolicyConfig) -> PolicyState:
    wanted = {role: _bounded(seen.pool(role).serving + seen.pool(role).starting, config.pool(role)) for role in ROLES}
    while config.max_total is not None and sum(wanted.values()) > config.max_total:
        above = [role for role in ROLES if wanted[role] > config.pool(role).min_workers]
        wanted[max(above, key=lambda role: wanted[role])] -= 1
    pools = {role: PoolState(wanted[role], config.pool(role).headroom) for role in ROLES}
    return PolicyState(seen.at_s, seen, Estimates.priors(config), pools["prefill"], pools["decode"], seen.at_s)


def _remember(state: PolicyState, seen: Observation, config: PolicyConfig) -> PolicyState:
    over_s = seen.at_s - state.seen.at_s
    learned = state.learned.updated(state.seen, seen)
    has_requests = seen.counters.arrived != state.seen.counters.arrived or seen.waiting or seen.decode.running
    state = replace(state, learned=learned, seen=seen, asked_at=seen.at_s if has_requests else state.asked_at)
    pools = {}
    for role in ROLES:
        pool, load = state.pool(role), load_of(role, learned, seen, config)
        headroom = _headroom(pool.headroom, role, state, config, over_s)
        need = _bounded(_floor(state, config, load.workers(headroom, config.margin)), config.pool(role))
        since = seen.at_s - config.down_after_s
        kept = tuple((at_s, other) for at_s, other in pool.needs if at_s >= since and other > need)
        if _idle(state, config):  # the pool was idle long enough: this is already known
            kept = ()
        pools[role] = replace(pool, headroom=headroom, needs=(*kept, (seen.at_s, need)))
    return replace(state, prefill=pools["prefill"], decode=pools["decode"])


def _need(role: Role, state: PolicyState, config: PolicyConfig) -> _Need:
    pool = state.pool(role)
    load = load_of(role, state.learned, state.seen, config)
    now = _bounded(_floor(state, config, load.workers(pool.headroom)), config.pool(role))
    long_enough = state.seen.at_s - state.began_at >= config.down_after_s
    return _Need(now, max(0, pool.wanted - pool.most_needed) if long_enough else 0)


def _idle(state: PolicyState, config: PolicyConfig) -> bool:
    unasked_s = state.seen.at_s - state.asked_at
    return unasked_s > 0 and unasked_s >= config.down_after_s


def _floor(state: PolicyState, config: PolicyConfig, need: int) -> int:
    """Return 1 if any request came recently, else 0."""
    return 0 if _idle(state, config) else max(1, need)


def _bounded(need: int, bounds: PoolConfig) -> int:
    return max(bounds.min_workers, min(bounds.max_workers, need))


def _headroom(value: float, role: Role, state: PolicyState, config: PolicyConfig, over_s: float) -> float:
    """Return the headroom: more while requests miss the SLO of this pool and it is busy."""
    learned, seen, least = state.learned, state.seen, config.pool(role).headroom
    pool, late = seen.pool(role), learned.ttft_missed.value
    full = decode_is_full(learned, seen, config) and seen.waiting > 0
    if role == "prefill":
        busy = pool.busy / pool.serving if pool.serving else 1.0
        missed = 0.0 if full else late
    else:
        streams = pool.serving * streams_per_worker(learned, seen, config)
        busy = 1.0 if full else learned.running / streams if streams else 1.0
        missed = max(learned.itl_missed.value, late if full else 0.0)
    if missed > 1 - config.goal and busy > BUSY:
        return min(max(least, MOST_HEADROOM), value + over_s / RAISE_S)
    return max(least, value - over_s / LOWER_S)


def _switch(giver: Role, taker: Role, wanted: dict[Role, int], needs: dict[Role, _Need], config: PolicyConfig) -> int:
    if not config.switch or config.switch_s >= config.start_s:
        return 0
    short = max(0, needs[taker].now - wanted[taker])
    count = min(short, needs[giver].spare)
    wanted[giver] -= count
    wanted[taker] += count
    return count


def _grow(wanted: dict[Role, int], needs: dict[Role, _Need], config: PolicyConfig) -> None:
    """Grow pools within `max_total`, the pool with the larger relative shortage first."""
    room = sum(pool.max_workers for pool in (config.prefill, config.decode))
    if config.max_total is not None:
        room = min(room, config.max_total)
    room -= sum(wanted.values())
    while room > 0 and (short := [role for role in ROLES if needs[role].now > wanted[role]]):
        shortest = max(short, key=lambda role: needs[role].now / max(0.5, wanted[role]))
        wanted[shortest] += 1
        room -= 1


def _shrink(wanted: dict[Role, int], state: PolicyState, needs: dict[Role, _Need], config: PolicyConfig) -> list[Role]:
    """Shrink pools and return those that shrank."""
    shrunk: list[Role] = []
    for role in ROLES:
        pool = state.pool(role)
        spare = min(needs[role].spare, wanted[role] - pool.most_needed)  # some of the spare workers may have switched
        if spare > 0 and state.seen.at_s - pool.shrunk_at >= config.down_every_s:
            wanted[role] -= min(spare, max(1, int(DOWN_SHARE * wanted[role])))
            shrunk.append(role)
    return shrunk
