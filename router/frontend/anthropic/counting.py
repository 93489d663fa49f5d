"""POST /v1/messages/count_tokens: the tokens of a prompt, as its model reads it."""

from typing import Any

from protos import inference_pb2 as pb
from router.frontend.anthropic.answer import error_form
from router.frontend.anthropic.messages import read_prompt
from router.frontend.http.body.media import Given, named_media
from router.frontend.http.caller import Caller
from router.frontend.http.endpoint import EndpointContext
from router.frontend.http.json_endpoint import JsonEndpoint


def token_counter(context: EndpointContext) -> JsonEndpoint[tuple[pb.GenerateRequest, Given]]:
    """Return the application of the path."""

    async def count(api_request: tuple[pb.GenerateRequest, Given], caller: Caller) -> dict[str, Any]:
        request, media = api_request
        with named_media(request.messages, media):
            return {"input_tokens": await context.queries.num_prompt_tokens(request, caller.principal)}

    return JsonEndpoint(context, read_prompt, count, error_form)
