"""Which routers a worker tries to reach, and what of a url may be seen."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from redis.asyncio import ConnectionPool, Redis

from cluster.discovery.discovery import Roster, StaticDiscovery
from cluster.errors import StartError
from cluster.network.redis_link import PASSWORD_VARIABLE, RedisLink
from engine.config import WorkerConfig
from router.config import RouterConfig

ADDRESSES = ["a:1", "b:2", "c:3"]
some = st.frozensets(st.sampled_from(ADDRESSES))


def test_new_ones_are_wanted_at_once_and_old_ones_until_they_were_absent_for_long() -> None:
    roster = Roster(forget_after=3)
    roster.listed({"a:1", "b:2"}, joined=())
    assert roster.wanted == {"a:1", "b:2"}
    for _ in range(2):
        roster.listed({"a:1"}, joined=())
        assert roster.wanted == {"a:1", "b:2"}
    roster.listed({"a:1"}, joined=())
    assert roster.wanted == {"a:1"}


def test_who_is_connected_is_kept_whatever_the_list_says() -> None:
    roster = Roster(forget_after=2)
    roster.listed({"a:1"}, joined=())
    for _ in range(10):
        roster.listed((), joined={"a:1"})
    assert roster.wanted == {"a:1"}
    roster.listed((), joined=())
    roster.listed((), joined=())
    assert roster.wanted == frozenset()


class RosterModel(RuleBasedStateMachine):
    """Against the whole history, looked through anew each time."""

    LONG = 3

    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster(pinned=["p:9"], forget_after=self.LONG)
        self.history: list[frozenset[str]] = []
        """Who was listed or joined, at each listing; absence is counted from there."""

    @rule(addresses=some, joined=some)
    def listing(self, addresses: frozenset[str], joined: frozenset[str]) -> None:
        joined &= self.roster.wanted  # nobody is joined to a router that is not wanted
        self.roster.listed(addresses, joined)
        self.history.append(addresses | joined)

    @invariant()
    def wanted_are_those_seen_of_late(self) -> None:
        expected = frozenset(["p:9"]).union(*self.history[-self.LONG :])
        assert self.roster.wanted == expected


TestRoster = RosterModel.TestCase


async def test_static_discovery_tells_its_addresses_once() -> None:
    assert [listing async for listing in StaticDiscovery(["a:1", "b:2"]).listings()] == [{"a:1", "b:2"}]


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://x", "redis://host:port/0", "redis://:swordfish@h:6379/0?db=x"]
)
def test_a_bad_url_is_named_and_not_shown(url: str) -> None:
    with pytest.raises(StartError) as caught:
        RedisLink(url, 1.0)
    assert caught.value.field == "redis_url"
    assert "swordfish" not in str(caught.value)


def test_no_password_is_ever_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "rediss://somebody:swordfish@redis.example:6380/0"
    monkeypatch.setenv(PASSWORD_VARIABLE, "hidden")
    for config in (WorkerConfig(model=".", redis_url=url), RouterConfig(model=".", redis_url=url)):
        assert "swordfish" not in repr(config) + str(config)
    pools: list[ConnectionPool] = []
    monkeypatch.setattr(Redis, "from_pool", pools.append)
    link = RedisLink(url, 1.0)
    assert link.where == "redis.example:6380"
    bare = RedisLink("redis://redis.example", 1.0)
    assert [pool.connection_kwargs["password"] for pool in pools] == ["swordfish", "hidden"]
    assert bare.where == "redis.example:6379"


@pytest.mark.parametrize("name", ["", "a b", "a:b", "x" * 129])
def test_a_cluster_name_is_fit_to_be_part_of_a_key(name: str) -> None:
    with pytest.raises(StartError) as caught:
        RouterConfig.parse({"model": "m", "cluster_name": name})
    assert caught.value.field == "cluster_name"
