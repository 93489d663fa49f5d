"""Bodies that a client compressed: read within their limit, or refused by the header's name."""

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.frontend.http.body.fields import encoding_of, inflated, refuse_encoding
from router.frontend.http.errors import HttpRefusal, error_answer
from support.refusals import refusal_of


def raw(body: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(body) + deflater.flush()


WAYS = {"gzip": ("gzip", gzip.compress), "zlib": ("deflate", zlib.compress), "raw": ("deflate", raw)}


@given(body=st.binary(max_size=300), way=st.sampled_from(sorted(WAYS)), spare=st.integers(-2, 2))
def test_what_was_compressed_comes_back_within_the_limit(body: bytes, way: str, spare: int) -> None:
    encoding, compress = WAYS[way]
    limit = max(0, len(body) + spare)
    assert inflated(compress(body), encoding, limit) == body[: limit + 1]


@pytest.mark.parametrize("way", sorted(WAYS))
def test_little_that_inflates_to_much_takes_little_memory(way: str) -> None:
    encoding, compress = WAYS[way]
    bomb = compress(bytes(256 << 20))
    tracemalloc.start()
    assert len(inflated(bomb, encoding, 1 << 20)) == (1 << 20) + 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("damage", ["cut", "more", "other"])
def test_what_is_not_in_its_encoding_is_refused_by_the_headers_name(way: str, damage: str) -> None:
    encoding, compress = WAYS[way]
    body = compress(b'{"prompt": "hello"}')
    wrong = {"cut": body[:-1], "more": body + b"x", "other": b"\x07\x07 no such thing"}[damage]
    with refusal_of("content-encoding"):
        inflated(wrong, encoding, 1 << 20)


def test_other_encodings_are_refused_with_their_own_status() -> None:
    assert [encoding_of({"content-encoding": name}) for name in ("identity", "GZIP", "x-gzip", "deflate", "")] == [
        *("", "gzip", "gzip", "deflate", ""),
    ]
    assert encoding_of({}) == ""
    for headers in ({"content-encoding": "br"}, {"content-encoding": "gzip, gzip"}):
        with pytest.raises(HttpRefusal) as caught:
            encoding_of(headers)
        answer = error_answer(caught.value, {})
        assert (answer.status, caught.value.field) == (415, "content-encoding")
        assert answer.headers["accept-encoding"] == "gzip, deflate"
    refuse_encoding({})
    with pytest.raises(HttpRefusal, match="uploads"):
        refuse_encoding({"content-encoding": "gzip"})
