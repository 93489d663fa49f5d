"""POST /v1/messages/count_tokens: the tokens of a prompt, as its model reads it."""

from typing import Any

from protos import inference_pb2 as pb
from router.frontend.anthropic.answer import error_form
from router.frontend.anthropic.messages import read_prompt
from router.frontend.http.body.fields import Fields
from router.frontend.http.body.media import Given, named_media
from router.frontend.http.caller import Caller
from router.frontend.http.endpoint import EndpointContext
from router.frontend.http.json_endpoint import JsonEndpoint


def token_counter(context: EndpointContext) -> JsonEndpoint[tuple[pb.TokenizeRequest, Given]]:
    """Return the application of the path."""

    async def count(api_request: tuple[pb.TokenizeRequest, Given], caller: Caller) -> dict[str, Any]:
        request, media = api_request
        with named_media(request.messages, media):
            reply = await context.queries.tokenize(request, caller.principal, is_charged=True)
        return {"input_tokens": len(reply.token_ids)}

    return JsonEndpoint(context, _read, count, error_form)


def _read(fields: Fields, caller: Caller) -> tuple[pb.TokenizeRequest, Given]:
    media: Given = []
    request = read_prompt(fields, caller, media)
    fields.finish()
    counted = pb.TokenizeRequest(
        model=request.model,
        messages=request.messages,
        tools=request.tools,
        continue_final_message=request.continue_final_message,
    )
    return counted, media
