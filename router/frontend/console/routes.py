"""HTTP paths of the console."""

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from google.protobuf.json_format import MessageToDict

from protos import inference_pb2 as pb
from router.observability.explained import to_console
from router.observability.records import RequestRecords
from router.security.api_keys import ApiKeys

PAGE = Path(__file__).with_name("page.html")
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def add_console(
    app: FastAPI, keys: ApiKeys, status: Callable[[], pb.ClusterStatusResponse], records: RequestRecords
) -> None:
    """Add the console at /console.

    With API keys only operators see its data.
    """
    page = PAGE.read_bytes()

    async def show(request: Request) -> Response:
        return Response(page, headers=HEADERS, media_type="text/html; charset=utf-8")

    async def tell(request: Request) -> Response:
        """Return all that changes: the status, and the requests that ended since `since`."""
        keys.principal(request.headers.get("authorization")).check_operator()
        since = request.query_params.get("since", "0")
        number = int(since) if since.isdecimal() and len(since) < 18 else 0
        body = MessageToDict(status(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        requests = [to_console(record) for record in records.since(number)]
        return JSONResponse({"status": body, "requests": requests}, headers=HEADERS)

    for path, answer in (("/console", show), ("/console/data", tell)):
        app.router.add_route(path, answer, methods=["GET"])
