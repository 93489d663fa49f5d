"""Paths below /v1/responses: GET and DELETE of {id}, GET {id}/input_items, and the refusal of all others."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from cluster.errors import UnknownRequest
from router.admission.arrivals import Arrivals
from router.frontend.http.caller import caller_of
from router.frontend.openai.responses.response_store import ResponseStore, StoredResponse
from router.security.api_keys import ApiKeys


def add_stored_responses(app: FastAPI, store: ResponseStore, keys: ApiKeys, arrivals: Arrivals) -> None:
    """Add the paths, whose calls are charged; errors are the application's."""

    def charged(request: Request) -> str:
        tenant = caller_of(request.headers, keys).tenant
        arrivals.charge(tenant)
        return tenant

    async def found(request: Request) -> StoredResponse:
        stored = await store.get(charged(request), request.path_params["name"])
        if stored is None:
            raise _unknown(request)
        return stored

    async def one(request: Request) -> Response:
        return JSONResponse((await found(request)).response)

    async def input_items(request: Request) -> Response:
        items = (await found(request)).named_input_items()
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": "", "last_id": ""}
        return JSONResponse({"object": "list", "data": items, "has_more": False, **ends})

    async def delete(request: Request) -> Response:
        name = request.path_params["name"]
        if not await store.delete(charged(request), name):
            raise _unknown(request)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    for path, answer, method in (
        ("/v1/responses/{name}", one, "GET"),
        ("/v1/responses/{name}", delete, "DELETE"),
        ("/v1/responses/{name}/input_items", input_items, "GET"),
    ):
        app.router.add_route(path, answer, methods=[method])


def refuse_other_paths(app: FastAPI) -> None:
    """Answer 404 at all other paths, of whatever method; to be called when all paths are added."""

    async def refuse(request: Request) -> Response:
        raise HTTPException(404, "is not offered here")

    app.router.add_route("/v1/responses/{path:path}", refuse, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])


def _unknown(request: Request) -> UnknownRequest:
    return UnknownRequest(f"{request.path_params['name'][:80]!r} is not kept here, or no longer", "response_id")
