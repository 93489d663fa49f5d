"""How large each pool is to be: `decide`, of what was seen and what was learnt from it. Pure.

What holds of every wish, whatever is seen (`tests/unit/test_planner_policy.py`):

- Each pool is within its bounds, and both together within `max_total`, but that min_workers go before.
- A pool grows at once, as far as the load is predicted to need by the time a new worker serves: by the rate of
  arrivals, and by what waits, which is more before anything is late.
- It shrinks only when fewer would have done for `down_after_s` without a break, even for a load larger by `margin`;
  then a step each `down_every_s`. So a constant load, or one that wavers by less than the margin, changes nothing.
- It is at nothing only where `min_workers` says so, nothing runs or waits, and nothing came for `down_after_s`.
- Where one pool is short and the other could spare a worker, one switches, if that is quicker than a start. A pool that
  is short gets nothing that the other one needs.
- More that waits never makes a pool smaller.
"""

from dataclasses import dataclass, replace

from cluster.roles import ROLES, Role
from planner.config import PolicyConfig, PoolConfig
from planner.estimates import Estimates
from planner.observation import Observation
from planner.sizing import decode_is_full, load_of, streams_per_worker

BUSY = 0.6
"""A pool of which less is busy would not be better off larger, whatever misses the SLO."""
RAISE_S, LOWER_S = 600.0, 1800.0
"""Of headroom: how long it takes to grow by 1, and to shrink by that."""
MOST_HEADROOM = 2.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """What is remembered of a pool."""

    wanted: int
    headroom: float
    needs: tuple[tuple[float, int], ...] = ()
    """When how many were needed, with the margin, within the last `down_after_s`: those that no later one exceeds. So
    the first is the most."""
    shrunk_at: float = -1e18

    @property
    def most_needed(self) -> int:
        return self.needs[0][1]


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What is remembered from one decision to the next."""

    began_at: float
    seen: Observation
    learned: Estimates
    prefill: PoolState
    decode: PoolState
    asked_at: float
    """When the last request came, waited or ran."""

    def pool(self, role: Role) -> PoolState:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class DesiredSizes:
    """How many there are to be, those on their way among them."""

    prefill: int
    decode: int
    to_prefill: int = 0
    """Decode workers that are to become prefill workers; they count as such already."""
    to_decode: int = 0

    def pool(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class _Need:
    """Of a pool, now."""

    now: int
    spare: int
    """Workers that it could do without, by all that is remembered."""


def decide(state: PolicyState | None, seen: Observation, config: PolicyConfig) -> tuple[PolicyState, DesiredSizes]:
    """`state` is None at first, and then what this gave with the observation before, which must be earlier. The first
    wish is what there is, within the bounds."""
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
    learned = state.learned.seen(state.seen, seen)
    asked = seen.counters.arrived != state.seen.counters.arrived or seen.waiting or seen.decode.running
    state = replace(state, learned=learned, seen=seen, asked_at=seen.at_s if asked else state.asked_at)
    pools = {}
    for role in ROLES:
        pool, load = state.pool(role), load_of(role, learned, seen, config)
        headroom = _headroom(pool.headroom, role, state, config, over_s)
        need = _bounded(_floor(state, config, load.workers(headroom, config.margin)), config.pool(role))
        since = seen.at_s - config.down_after_s
        kept = tuple((at_s, other) for at_s, other in pool.needs if at_s >= since and other > need)
        if _idle(state, config):  # that it was not for so long is known already
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
    """One is needed where anything was asked for lately; none where nothing was."""
    return 0 if _idle(state, config) else max(1, need)


def _bounded(need: int, bounds: PoolConfig) -> int:
    return max(bounds.min_workers, min(bounds.max_workers, need))


def _headroom(value: float, role: Role, state: PolicyState, config: PolicyConfig, over_s: float) -> float:
    """More while requests miss what this pool is answerable for, and it is busy."""
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
    """As far as there is room: the one that is shorter, beside what it has, first."""
    room = sum(pool.max_workers for pool in (config.prefill, config.decode))
    if config.max_total is not None:
        room = min(room, config.max_total)
    room -= sum(wanted.values())
    while room > 0 and (short := [role for role in ROLES if needs[role].now > wanted[role]]):
        shortest = max(short, key=lambda role: needs[role].now / max(0.5, wanted[role]))
        wanted[shortest] += 1
        room -= 1


def _shrink(wanted: dict[Role, int], state: PolicyState, needs: dict[Role, _Need], config: PolicyConfig) -> list[Role]:
    """Those that did."""
    shrunk: list[Role] = []
    for role in ROLES:
        pool = state.pool(role)
        spare = min(needs[role].spare, wanted[role] - pool.most_needed)  # of which some may have switched
        if spare > 0 and state.seen.at_s - pool.shrunk_at >= config.down_every_s:
            wanted[role] -= min(spare, max(1, int(config.down_share * wanted[role])))
            shrunk.append(role)
    return shrunk
