"""Forms, bodies and queries of the files and batches API."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batches.api.reading import PageQuery, UploadForm, page_of, read_batch_form, read_page, read_upload_form
from batches.api.upload import Form
from cluster.errors import InvalidRequest
from cluster.process.life import Drain
from protos import inference_pb2 as pb
from router.batches.link import HEALTH, LINE, OnBehalf
from router.frontend.http.endpoint import run_below
from router.frontend.http.errors import CALLER, Caller, openai_form
from router.frontend.http.generation import Generation
from router.frontend.openai_files.lines import LineApplication
from router.security.api_keys import ApiKeys, Principal
from support.api_keys import keys_file
from support.batch_runs import ENDPOINT, link
from support.refusals import refusal_of

BODY = {"input_file_id": "file-1", "endpoint": "/a", "completion_window": "24h"}
EXPIRY = {"anchor": "created_at", "seconds": 3600}


def test_a_batch_with_everything() -> None:
    form = read_batch_form(BODY | {"metadata": {"a": "b"}, "output_expires_after": EXPIRY}, ["/a", "/b"])
    assert (form.input_file_id, form.endpoint, form.completion_window, form.window_s) == ("file-1", "/a", "24h", 86_400)
    assert (form.metadata, form.output_lasts_s) == ({"a": "b"}, 3600)
    least = read_batch_form(BODY | {"metadata": None}, ["/a"])
    assert (least.metadata, least.output_lasts_s) == (None, None)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("input_file_id", {"input_file_id": None}),
        ("endpoint", {"endpoint": "/c"}),
        ("completion_window", {"completion_window": None}),
        ("metadata", {"metadata": ["a"]}),
        ("metadata", {"metadata": {str(number): "x" for number in range(17)}}),
        ("metadata", {"metadata": {"x" * 65: "x"}}),
        ("output_expires_after.anchor", {"output_expires_after": {"seconds": 3600}}),
        ("output_expires_after.seconds", {"output_expires_after": EXPIRY | {"seconds": 3599}}),
        ("output_expires_after.seconds", {"output_expires_after": {"anchor": "created_at"}}),
        ("user", {"user": "x"}),
    ],
)
def test_a_wrong_field_of_a_batch_is_named(field: str, change: dict[str, Any]) -> None:
    with refusal_of(field):
        read_batch_form(BODY | change, ["/a"])


def test_fields_of_an_upload() -> None:
    assert read_upload_form({"purpose": "batch"}) == UploadForm(None)
    expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    assert read_upload_form({"purpose": "batch"} | expiry) == UploadForm(7200)
    assert read_upload_form({"purpose": "vision"}) == UploadForm(None, "vision")
    for field, form in (
        ("purpose", {}),
        ("purpose", {"purpose": "fine-tune"}),
        ("extra", {"purpose": "batch", "extra": "x"}),
        ("expires_after.seconds", {"purpose": "batch"} | expiry | {"expires_after[seconds]": "soon"}),
        ("expires_after.anchor", {"purpose": "batch", "expires_after[seconds]": "7200"}),
    ):
        with refusal_of(field):
            read_upload_form(form)


def test_pages() -> None:
    ids = ["a", "b", "c"]
    assert page_of(ids, PageQuery(2, "")) == (["c", "b"], True)
    assert page_of(ids, PageQuery(2, "b")) == (["a"], False)
    assert page_of(ids, PageQuery(2, "a", newest_first=False)) == (["b", "c"], False)
    assert page_of([], PageQuery(2, "")) == ([], False)
    with pytest.raises(InvalidRequest, match="after"):
        page_of(ids, PageQuery(2, "x"))
    assert read_page({}, 20, 100) == PageQuery(20, "")
    assert read_page({"limit": "100", "after": "a", "order": "asc"}, 20, 100) == PageQuery(100, "a", newest_first=False)
    for field, query in (("limit", {"limit": "101"}), ("limit", {"limit": "-1"}), ("order", {"order": "up"})):
        with refusal_of(field):
            read_page(query, 20, 100)


# ------------------------------------------------------------------ multipart


def body_of(content: bytes, filename: str = "a.jsonl", boundary: bytes = b"bound") -> bytes:
    head = b'--%s\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n'
    file = head % (boundary, b"file", f'; filename="{filename}"'.encode())
    return head % (boundary, b"purpose", b"") + b"batch\r\n" + file + content + b"\r\n--" + boundary + b"--\r\n"


@given(
    content=st.binary(max_size=200) | st.text("\r\n-bound", max_size=60).map(str.encode),
    cuts=st.lists(st.integers(1, 40), max_size=30),
)
def test_a_form_is_read_however_it_is_cut(content: bytes, cuts: list[int]) -> None:
    if b"\r\n--bound" in b"\r\n" + content:
        return  # that is an end
    form, body, found = Form('multipart/form-data; boundary="bound"'), body_of(content), b""
    while body:
        cut = cuts.pop() if cuts else len(body)
        found += form.feed(body[:cut])
        body = body[cut:]
    assert found == content
    assert form.finish() == "a.jsonl"
    assert form.texts == {"purpose": "batch"}


def test_forms_that_are_none() -> None:
    for content_type in ("", "application/json", "multipart/form-data", "multipart/form-data; boundary="):
        with pytest.raises(InvalidRequest, match="content-type"):
            Form(content_type)
    whole = body_of(b"abc")
    cut_off = Form("multipart/form-data; boundary=bound")
    cut_off.feed(whole[:-10])
    with pytest.raises(InvalidRequest, match="last boundary"):
        cut_off.finish()
    with pytest.raises(InvalidRequest, match="multipart"):
        Form("multipart/form-data; boundary=other").feed(whole)
    with pytest.raises(InvalidRequest, match="bytes at most"):
        Form("multipart/form-data; boundary=bound").feed(whole.replace(b"batch", b"x" * 70_000))
    long_name = Form("multipart/form-data; boundary=bound")
    long_name.feed(body_of(b"abc", "é" * 300))
    assert long_name.finish() == "é" * 255


# ------------------------------------------------------------------ lines

MINE = {"name": "mine", "sha256": "0" * 64, "tenant": "a", "models": ["m"]}
LINE_OF_MINE = OnBehalf(tenant="a", key="mine", deadline_s=99.0)


class Endpoint:
    """Endpoint that notes who asks it."""

    error_form = staticmethod(openai_form)

    def __init__(self) -> None:
        self.caller: Caller | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.caller = scope[CALLER]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})


async def asked(
    keys: ApiKeys, line: OnBehalf = LINE_OF_MINE, key: str = "secret", path: str = ENDPOINT, drain: Drain | None = None
) -> tuple[int, bytes, Caller | None]:
    """The status and the body of an answer at the socket for lines, and whose request the endpoint got."""
    endpoint, sent = Endpoint(), list[Any]()
    endpoints: Any = {ENDPOINT: endpoint}
    headers = {"authorization": f"Bearer {key}", LINE: line.header(), "x-request-id": "r-1"}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def send(message: Any) -> None:
        sent.append(message)

    app = LineApplication(endpoints, link(), keys, drain or Drain())
    await app({"type": "http", "path": path, "headers": raw}, send, send)  # type: ignore[arg-type] # nothing is received
    return sent[0]["status"], sent[1]["body"], endpoint.caller


async def test_a_line_has_the_tenant_and_the_permissions_that_its_key_has_now(tmp_path: Path) -> None:
    status, _, caller = await asked(ApiKeys(keys_file(tmp_path, MINE)))
    assert status == 200
    assert caller == Caller("a", "r-1", Principal("mine", "a", frozenset("m")), 99.0)
    for change, refused in (({"name": "other"}, 401), ({"tenant": "b"}, 403)):
        status, _, caller = await asked(ApiKeys(keys_file(tmp_path, MINE | change)))
        assert (status, caller) == (refused, None)
    unkeyed = OnBehalf(tenant="\u00e9\n", key="", deadline_s=1.0)
    _, _, caller = await asked(ApiKeys(), unkeyed)
    assert caller.tenant == "\u00e9\n", "whatever a tenant is called"


async def test_the_socket_for_lines_takes_its_own_key_alone() -> None:
    for path in (ENDPOINT, HEALTH):
        status, body, caller = await asked(ApiKeys(), key="secret2", path=path)
        assert (status, caller) == (401, None)
        assert b"authorization" in body
    status, _, caller = await asked(ApiKeys(), path="/v1/models")
    assert (status, caller) == (404, None)


async def test_the_socket_for_lines_tells_that_the_router_stops() -> None:
    drain = Drain()
    assert (await asked(ApiKeys(), path=HEALTH, drain=drain))[:2] == (200, b'{"draining": false}')
    drain.begin()
    assert (await asked(ApiKeys(), path=HEALTH, drain=drain))[:2] == (200, b'{"draining": true}')


def test_a_line_runs_below_interactive_requests_and_as_long_as_its_batch() -> None:
    def read(**asked: Any) -> Generation:
        return Generation("r", [pb.GenerateRequest(priority=3), pb.GenerateRequest(priority=-7)], {}, **asked)

    run_below(line := read(), 99.0)
    assert [request.priority for request in line.requests] == [-1, -7]
    assert line.deadline_s == 99
    run_below(own := read(deadline_s=2.0), 99.0)
    assert own.deadline_s == 2
    with pytest.raises(InvalidRequest, match="stream"):
        run_below(read(stream=True), 99.0)
