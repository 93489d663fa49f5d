"""Forms, bodies and queries of the files and batches API."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import Draining, Forbidden, InvalidRequest, Overloaded
from cluster.process.life import Drain
from protos import inference_pb2 as pb
from router.batches.lines.line import LineRequest
from router.frontend.http.errors import Caller, openai_form
from router.frontend.http.generation import Generation
from router.frontend.openai_files.lines import line_handler
from router.frontend.openai_files.reading import (
    PageQuery,
    UploadForm,
    page_of,
    read_batch_form,
    read_page,
    read_upload_form,
)
from router.frontend.openai_files.upload import Form
from router.security.api_keys import ApiKeys
from router.security.config import ApiKey

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
    with pytest.raises(InvalidRequest) as refused:
        read_batch_form(BODY | change, ["/a"])
    assert refused.value.field == field


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
        with pytest.raises(InvalidRequest) as refused:
            read_upload_form(form)
        assert refused.value.field == field


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
        with pytest.raises(InvalidRequest) as refused:
            read_page(query, 20, 100)
        assert refused.value.field == field


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


class FakeEndpoint:
    """Endpoint that notes what it was asked, and fails if told."""

    error_form = staticmethod(openai_form)

    def __init__(self, failure: Exception | None = None, **asked: Any) -> None:
        self.asked = Generation("r", [pb.GenerateRequest(priority=3), pb.GenerateRequest(priority=-7)], {}, **asked)
        self.caller: Caller | None = None
        self._failure = failure

    async def whole(self, values: Any, caller: Caller, adapt: Any) -> bytes:
        self.caller = caller
        adapt(self.asked)
        if self._failure is not None:
            raise self._failure
        return b"{}"


LINE = LineRequest({}, "r-1", "a", "mine", 99.0)


async def asked_of(endpoint: FakeEndpoint, keys: ApiKeys | None = None, line: LineRequest = LINE) -> int:
    handle = line_handler(endpoint, keys or ApiKeys(), Drain())  # type: ignore[arg-type] # a fake
    return (await handle(line)).status


async def test_a_line_runs_below_interactive_requests_and_as_long_as_its_batch() -> None:
    endpoint = FakeEndpoint()
    assert await asked_of(endpoint) == 200
    assert [request.priority for request in endpoint.asked.requests] == [-1, -7]
    assert endpoint.asked.deadline_s == 99
    assert endpoint.caller is not None
    assert (endpoint.caller.tenant, endpoint.caller.request_id) == ("a", "r-1")
    own = FakeEndpoint(deadline_s=2.0)
    await asked_of(own)
    assert own.asked.deadline_s == 2
    assert await asked_of(FakeEndpoint(stream=True)) == 400


async def test_a_line_has_the_permissions_that_its_key_has_now() -> None:
    now = ApiKey(name="mine", sha256="0" * 64, tenant="a", models=("m",))
    endpoint = FakeEndpoint()
    assert await asked_of(endpoint, ApiKeys([now])) == 200
    assert endpoint.caller is not None
    assert endpoint.caller.principal.models == {"m"}
    assert await asked_of(FakeEndpoint(), ApiKeys([now.model_copy(update={"name": "other"})])) == 401
    assert await asked_of(FakeEndpoint(), ApiKeys([now.model_copy(update={"tenant": "b"})])) == 403


async def test_only_retriable_errors_leave_a_line_unanswered() -> None:
    assert await asked_of(FakeEndpoint(Forbidden("no"))) == 403
    assert await asked_of(FakeEndpoint(Overloaded("never", permanent=True))) == 400
    assert await asked_of(FakeEndpoint(ZeroDivisionError())) == 500
    with pytest.raises(Overloaded):
        await asked_of(FakeEndpoint(Overloaded("full")))
    drain = Drain()
    drain.begin()
    with pytest.raises(Draining):
        await line_handler(FakeEndpoint(), ApiKeys(), drain)(LINE)  # type: ignore[arg-type] # a fake
