"""Engines of one host that say what they are, and reckon from that who computes where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.roles import ROLES, Role
from engine.host.cores import MAX_CORE, CoreClaim, as_ranges, from_ranges, own_share, share_cores

cores_of_a_host = st.sets(st.integers(0, 40), min_size=1, max_size=12).map(lambda cores: tuple(sorted(cores)))
several_roles = st.lists(st.sampled_from(ROLES), min_size=1, max_size=16)


@given(cores_of_a_host, several_roles)
def test_engines_share_no_core_while_there_are_enough(cores: tuple[int, ...], roles: list[Role]) -> None:
    shares = share_cores(cores, roles)
    assert len(shares) == len(roles)
    assert all(share.own for share in shares)
    if len(roles) <= len(cores):
        assert sorted(core for share in shares for core in share.own) == list(cores)
        sizes = {len(share.own) for share in shares}
        assert max(sizes) - min(sizes) <= 1


@given(cores_of_a_host, several_roles)
def test_each_core_of_decode_is_lent_to_one_engine_of_prefill(cores: tuple[int, ...], roles: list[Role]) -> None:
    shares = list(zip(roles, share_cores(cores, roles), strict=True))
    lent = [core for role, share in shares for core in share.shared]
    assert all(not share.shared for role, share in shares if role == "decode")
    assert len(set(lent)) == len(lent)
    of_decode = {core for role, share in shares if role == "decode" for core in share.own}
    of_prefill = {core for role, share in shares if role == "prefill" for core in share.own}
    assert set(lent) == (of_decode - of_prefill if of_prefill else set())
    assert {share.niceness > 0 for role, share in shares if role == "decode"} <= {"prefill" in roles}
    assert all(share.niceness == 0 for role, share in shares if role == "prefill")


@st.composite
def engines(draw: st.DrawFn, host: tuple[int, ...]) -> list[CoreClaim]:
    """Told and not told; some may use only a part of the host."""
    claims = []
    for pid in range(draw(st.integers(1, 8))):
        told = draw(st.booleans())
        some = draw(st.sets(st.sampled_from(host), min_size=1))
        cores = tuple(sorted(some)) if told or draw(st.integers(0, 3)) == 0 else host
        claims.append(CoreClaim(draw(st.integers(0, 3)), pid, draw(st.sampled_from(ROLES)), told, cores))
    return claims


@given(st.data())
def test_all_come_to_the_same_shares_whatever_the_order_they_are_listed_in(data: st.DataObject) -> None:
    host = data.draw(cores_of_a_host)
    claims = data.draw(engines(host))
    taken = {core for claim in claims if claim.told or claim.cores != host for core in claim.cores}
    peers = [claim for claim in claims if not claim.told and claim.cores == host]
    free = set(host) - taken or set(host)
    shares = {claim: own_share(claim, data.draw(st.permutations(claims)), host) for claim in peers}
    for share in shares.values():
        assert set(share.own) <= free
        assert set(share.shared) <= free - set(share.own)
    if len(peers) <= len(free):
        own = [core for share in shares.values() for core in share.own]
        assert len(set(own)) == len(own)
        assert not peers or set(own) == free


def test_one_that_is_not_listed_yet_counts_itself() -> None:
    first, second = (CoreClaim(since, 7, "decode", False, (0, 1)) for since in (1, 2))
    assert own_share(first, [], (0, 1)).own == (0, 1)
    assert own_share(second, [first], (0, 1)).own == (1,)


@pytest.mark.parametrize(
    ("other", "own"),
    [
        ((2, 3), (0, 1)),
        ((5, 6), (0, 1, 2, 3)),
        ((3, 4), (0, 1, 2, 3)),
        ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3)),
        ((0, 1, 2, 3), (0, 1)),
    ],
)
def test_who_may_use_only_some_of_an_engines_cores_has_them(other: tuple[int, ...], own: tuple[int, ...]) -> None:
    """Not reckoned with is who may use others, some others, or more."""
    here, there = CoreClaim(1, 7, "decode", False, (0, 1, 2, 3)), CoreClaim(2, 8, "decode", False, other)
    assert own_share(here, [here, there], here.cores).own == own


def test_cores_are_shared_out_in_the_machines_order() -> None:
    first, second = (CoreClaim(since, 7, "decode", False, (0, 1, 2, 3)) for since in (1, 2))
    assert own_share(first, [second], (0, 2, 1, 3)).own == (0, 2)
    assert own_share(second, [first], (0, 2, 1, 3)).own == (1, 3)


@given(
    st.builds(
        CoreClaim,
        st.integers(0, 2**63),
        st.integers(1, 2**22),
        st.sampled_from(ROLES),
        st.booleans(),
        st.sets(st.integers(0, MAX_CORE), min_size=1).map(lambda cores: tuple(sorted(cores))),
    )
)
def test_a_claim_is_read_as_it_was_written(claim: CoreClaim) -> None:
    assert CoreClaim.parse(str(claim)) == claim


@given(st.text() | st.from_regex(r"(prefill|decode|other)-(told|shares)-[0-9]*-[0-9a]*-[0-9,/-]*", fullmatch=True))
def test_what_anybody_writes_is_a_claim_or_none(text: str) -> None:
    claim = CoreClaim.parse(text)
    assert claim is None or (claim.cores and max(claim.cores) <= MAX_CORE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "decode",
        "decode-told-1-2-",
        "decode-told-1-2-3-",
        "decode-told-1-2-0-99999999999",
        f"decode-told-1-2-0-{MAX_CORE + 1}",
        "decode-told-1-2-3,3",
        "decode-told-1-2-4-2",
        "decode-told-1-2-0-4/0",
        "decode-told-1-2-0/2",
        "decode-told-x-2-0",
        "decode-told-1-²-0",
        "decode-asks-1-2-0",
        "router-told-1-2-0",
    ],
)
def test_nonsense_is_no_claim(text: str) -> None:
    assert CoreClaim.parse(text) is None


def test_ranges_are_written_as_linux_does() -> None:
    assert as_ranges((0, 1, 2, 3, 8)) == "0-3,8"
    assert from_ranges("0-3,8") == (0, 1, 2, 3, 8)


def test_every_second_core_of_a_large_machine_fits_into_a_name() -> None:
    cores = tuple(range(0, 512, 2))
    assert as_ranges(cores) == "0-510/2"
    assert from_ranges("0-510/2") == cores
