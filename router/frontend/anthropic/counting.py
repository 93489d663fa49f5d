"""POST /v1/messages/count_tokens: the tokens of a prompt, as its model reads it."""

import asyncio

from starlette.types import Receive, Scope, Send

from cluster.errors import ServiceError
from protos import inference_pb2 as pb
from router.frontend.anthropic.answer import error_form
from router.frontend.anthropic.messages import read_prompt
from router.frontend.http.blocks import compact
from router.frontend.http.caller import Caller, caller_of
from router.frontend.http.endpoint import EndpointContext
from router.frontend.http.errors import error_answer
from router.frontend.http.exchange import ClientGone, Exchange
from router.frontend.http.fields import Fields, IgnoredFields, parse_object


class TokenCounter:
    """ASGI application of the path."""

    def __init__(self, context: EndpointContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, exchange = self._context, Exchange(scope, receive, send)
        try:
            caller = caller_of(exchange.headers, context.keys)
            exchange.request_id = caller.request_id
            with context.arrivals.arriving(caller.tenant) as arrival:
                body = await exchange.body(context.limits.max_bytes, arrival)
                request = await asyncio.to_thread(self._read, body, caller)
            said = await context.handler.tokenize(request, caller.principal)
            await exchange.send_json(compact({"input_tokens": len(said.token_ids)}).encode())
        except ClientGone:
            return
        except ServiceError as error:
            await context.arrivals.pace.wait(error)
            await exchange.fail(error_answer(error, {}, error_form))

    def _read(self, body: bytes, caller: Caller) -> pb.TokenizeRequest:
        values = parse_object(body, self._context.limits.max_values)
        fields = Fields(values, ignored=IgnoredFields(self._context.strict_fields))
        request = read_prompt(fields, caller)
        fields.finish()
        return pb.TokenizeRequest(model=request.model, messages=request.messages, tools=request.tools)
