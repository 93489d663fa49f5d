"""POST /v1/responses/input_tokens: the tokens of a response's prompt, earlier turns included."""

from typing import Any

from router.frontend.http.body.media import named_media
from router.frontend.http.caller import Caller
from router.frontend.http.endpoint import EndpointContext
from router.frontend.http.json_endpoint import JsonEndpoint
from router.frontend.openai.responses.response_store import ResponseHooks
from router.frontend.openai.responses.responses import NAMES, ResponsesRequest, read_response
from router.frontend.openai.responses.responses_answer import error_form


def input_token_counter(context: EndpointContext, hooks: ResponseHooks) -> JsonEndpoint[ResponsesRequest]:
    """Return the application of the path."""

    async def count(api_request: ResponsesRequest, caller: Caller) -> dict[str, Any]:
        await hooks.before(api_request, caller)
        (request,) = api_request.requests
        with named_media(request.messages, api_request.media):
            num_tokens = await context.queries.num_prompt_tokens(request, caller.principal)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    return JsonEndpoint(context, read_response, count, error_form, NAMES)
