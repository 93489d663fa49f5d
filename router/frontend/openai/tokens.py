"""POST /tokenize and /detokenize, as vLLM has them: text or chats to token ids, and back."""

from dataclasses import dataclass
from typing import Any

from protos import inference_pb2 as pb
from router.frontend.http.body.fields import Fields
from router.frontend.http.body.media import Given, named_media
from router.frontend.http.caller import Caller
from router.frontend.http.endpoint import EndpointContext
from router.frontend.http.json_endpoint import JsonEndpoint
from router.frontend.openai.chat import read_messages, read_prompt_end, read_tools


@dataclass(frozen=True, slots=True)
class TokensRequest:
    """One request to tokenise."""

    request: pb.TokenizeRequest
    returns_texts: bool
    """Whether the answer has each token's text."""
    media: Given


def tokenizer_endpoint(context: EndpointContext) -> JsonEndpoint[TokensRequest]:
    """Return the application of /tokenize."""

    async def tokenize(api_request: TokensRequest, caller: Caller) -> dict[str, Any]:
        request = api_request.request
        with named_media(request.messages, api_request.media):
            reply = await context.queries.tokenize(request, caller.principal, is_charged=True)
        texts = None
        if api_request.returns_texts:
            encoder = context.queries.model_of(reply.model, caller.principal).encoder
            texts = [encoder.token(token_id).text for token_id in reply.token_ids]
        ids = list(reply.token_ids)
        return {"count": len(ids), "max_model_len": reply.max_context_tokens, "tokens": ids, "token_strs": texts}

    return JsonEndpoint(context, _read_text, tokenize, names={"text": "prompt"})


def _read_text(fields: Fields, caller: Caller) -> TokensRequest:
    request = pb.TokenizeRequest(model=fields.text("model"))
    media: Given = []
    if fields.given("messages"):
        chat = pb.GenerateRequest()
        chat.messages.extend(read_messages(fields, media))
        read_tools(fields, chat)
        read_prompt_end(fields, chat)
        if (variables := fields.nested("chat_template_kwargs")) is not None:
            request.chat_template_kwargs = variables.rest()
        request.messages.extend(chat.messages)
        request.tools.extend(chat.tools)
        request.continue_final_message = chat.continue_final_message
        request.no_generation_prompt = chat.no_generation_prompt
    else:
        request.text = fields.text("prompt", required=True)
    if fields.given("add_special_tokens"):
        request.add_special_tokens = fields.boolean("add_special_tokens")
    returns_texts = fields.boolean("return_token_strs")
    fields.finish()
    return TokensRequest(request, returns_texts, media)


def detokenizer_endpoint(context: EndpointContext) -> JsonEndpoint[tuple[str, list[int]]]:
    """Return the application of /detokenize."""

    async def detokenize(api_request: tuple[str, list[int]], caller: Caller) -> dict[str, Any]:
        name, token_ids = api_request
        return {"prompt": await context.queries.detokenize(name, caller.principal, token_ids)}

    return JsonEndpoint(context, _read_tokens, detokenize, names={"token_ids": "tokens"})


def _read_tokens(fields: Fields, caller: Caller) -> tuple[str, list[int]]:
    api_request = fields.text("model"), fields.token_ids("tokens")
    fields.finish()
    return api_request
