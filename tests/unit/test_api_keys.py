"""API keys: who they say asks, when they stop, and what a file of them may be."""

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import Forbidden, ServiceError, StartError, Unauthenticated
from cluster.network.error_status import from_rpc_error, to_status
from protos import inference_pb2 as pb
from router.frontend.http.errors import caller_of, error_answer
from router.request_path.preprocess import isolated
from router.security.api_keys import (
    ANYBODY,
    LOOK_S,
    MAX_KEY_CHARS,
    ApiKeys,
    Principal,
    entry_for,
    hash_of,
    new_key,
    read_keys,
)
from support.api_keys import keys_file

KEY = "tk-one"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with one key."""
    return file_of(tmp_path)


def file_of(folder: Path, **values: object) -> Path:
    return keys_file(folder, {"name": "one", "sha256": hash_of(KEY), "tenant": "t"} | values)


def test_without_keys_anybody_is_served() -> None:
    keys = ApiKeys()
    assert not keys.required
    assert keys.principal(None) is ANYBODY
    assert keys.principal("Bearer whatever") is ANYBODY
    assert ANYBODY.tenant_for("said") == "said"


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} "])
def test_a_key_says_who_asks(tmp_path: Path, header: str) -> None:
    keys = ApiKeys(file_of(tmp_path, models=["small"]))
    assert keys.principal(header) == Principal("one", "t", frozenset({"small"}))
    assert ApiKeys(file_of(tmp_path)).principal(header).models is None


WRONG = [
    None,
    "",
    "Bearer",
    "Bearer ",
    KEY,
    f"Basic {KEY}",
    "Bearer tk-two",
    f"Bearer {hash_of(KEY)}",
    f"Bearer {KEY} x",
]


@pytest.mark.parametrize("header", [*WRONG, "Bearer " + "x" * (MAX_KEY_CHARS + 1)])
def test_whatever_is_no_key_is_refused_and_not_repeated(file: Path, header: str | None) -> None:
    with pytest.raises(Unauthenticated) as refused:
        ApiKeys(file).principal(header)
    assert refused.value.field == "authorization"
    assert KEY not in str(refused.value)


def test_no_text_is_a_key_by_chance(file: Path) -> None:
    keys = ApiKeys(file)

    @given(st.text())
    def refused(header: str) -> None:
        with pytest.raises(Unauthenticated):
            keys.principal(header)

    refused()


def test_a_key_expires(tmp_path: Path) -> None:
    end = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
    now = end.timestamp() - 1
    keys = ApiKeys(file_of(tmp_path, expires=end.isoformat()), wall_clock=lambda: now)
    assert keys.principal(f"Bearer {KEY}").name == "one"
    now += 1
    with pytest.raises(Unauthenticated, match="'one' expired"):
        keys.principal(f"Bearer {KEY}")


def test_a_tenant_is_the_keys_whatever_the_request_says(file: Path) -> None:
    principal = Principal("one", "t")
    assert principal.tenant_for("") == principal.tenant_for("t") == "t"
    with pytest.raises(Forbidden, match="does not belong to tenant"):
        principal.tenant_for("u")
    keys, bearer = ApiKeys(file), {"authorization": f"Bearer {KEY}"}
    assert caller_of(bearer, keys).tenant == "t"
    with pytest.raises(Forbidden):
        caller_of(bearer | {"x-tenant": "u"}, keys)
    with pytest.raises(Unauthenticated):
        caller_of({"x-tenant": "t"}, keys)


def test_errors_are_typed_on_both_doors() -> None:
    import grpc

    for error, status, code in (
        (Unauthenticated("no", "authorization"), 401, "invalid_api_key"),
        (Forbidden("no"), 403, ""),
    ):
        wire = to_status(error)
        rpc = grpc.aio.AioRpcError(
            wire.code, grpc.aio.Metadata(), grpc.aio.Metadata(*wire.trailing_metadata), wire.details
        )
        typed: ServiceError = from_rpc_error(rpc)
        assert (type(typed), typed.field) == (type(error), error.field)
        answer = error_answer(error, {})
        assert answer.status == status
        assert code.encode() in answer.body
    assert error_answer(Unauthenticated("no"), {}).headers == {"www-authenticate": "Bearer"}


# ------------------------------------------------------------------------------------------------ the file


def test_a_file_is_read_again_when_it_changes_and_not_while_it_is_broken(tmp_path: Path) -> None:
    file, now = tmp_path / "keys.yaml", 0.0

    def known(*names: str) -> list[bool]:
        nonlocal now
        now += LOOK_S
        found = []
        for name in names:
            try:
                found.append(keys.principal(f"Bearer {name}").name == name)
            except Unauthenticated:
                found.append(False)
        return found

    file.write_text(entry_for("a", "a", "", [], None))
    keys = ApiKeys(file, clock=lambda: now)
    assert known("a", "b") == [True, False]
    file.write_text(entry_for("b", "b", "", [], None) + "# another size\n")
    assert known("a", "b") == [False, True]
    for broken in ("- {name: c}", "{", "[1]", "- {name: c, sha256: short}"):
        file.write_text(broken)
        assert known("b", "c") == [True, False], broken
    file.unlink()
    assert known("b") == [True]
    file.write_text("")
    assert known("b") == [False]
    assert keys.required


def test_a_new_key_is_known_by_its_entry_and_its_hash_only(tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "keys.yaml"
    entry = entry_for(key, "ci", "team", ["small"], 1.0)
    assert key not in entry
    assert len(key) > 40
    file.write_text(entry)
    (known,) = read_keys(file)
    assert (known.name, known.tenant, known.models) == ("ci", "team", ("small",))
    assert known.expires is not None
    assert ApiKeys(file).principal(f"Bearer {key}").tenant == "team"
    assert hash_of(key) not in repr(known)


BAD_FILES = {
    "no yaml": ("{", "api_keys_file"),
    "no list": ("{name: a}", "api_keys_file"),
    "no mapping": ("[a]", "api_keys_file"),
    "no hash": ("[{name: a}]", "api_keys_file.0.sha256"),
    "a key in the clear": ("[{name: a, sha256: tk-secret}]", "api_keys_file.0.sha256"),
    "an unknown key": (f"[{{name: a, sha256: {'a' * 64}, tenants: x}}]", "api_keys_file.0.tenants"),
    "a date without a zone": (f"[{{name: a, sha256: {'a' * 64}, expires: 2030-01-01}}]", "api_keys_file.0.expires"),
    "the same key twice": (f"[{{name: a, sha256: {'a' * 64}}}, {{name: b, sha256: {'a' * 64}}}]", "api_keys_file"),
    "the same name twice": (f"[{{name: a, sha256: {'a' * 64}}}, {{name: a, sha256: {'b' * 64}}}]", "api_keys_file"),
}


@pytest.mark.parametrize(("text", "field"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_router_starts_with_no_file_that_is_none(tmp_path: Path, text: str, field: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(StartError) as refused:
        ApiKeys(file)
    assert refused.value.field == field
    assert "secret" not in str(refused.value)


def test_a_missing_file_names_its_setting(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="api_keys_file: cannot read"):
        ApiKeys(tmp_path / "none")


# ------------------------------------------------------------------------------------------------ salts


names = st.text(st.sampled_from("ab 1:"), max_size=4)


@given(names, names, names, names)
def test_no_two_tenants_have_a_salt_in_common(tenant: str, salt: str, other: str, other_salt: str) -> None:
    first = isolated(pb.GenerateRequest(tenant=tenant, cache_salt=salt))
    second = isolated(pb.GenerateRequest(tenant=other, cache_salt=other_salt))
    assert (first == second) == ((tenant, salt) == (other, other_salt))
