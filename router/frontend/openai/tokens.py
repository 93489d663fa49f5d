"""POST /tokenize and /detokenize, as vLLM has them: text or chats to token ids, and back."""

from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import BodyReader, IgnoredFields, Model, TokenId
from router.frontend.http.body.media import Given, named_media
from router.frontend.http.endpoint import EndpointContext, JsonEndpoint
from router.frontend.http.errors import Caller
from router.frontend.openai.chat import (
    Message,
    ToolsBody,
    read_messages,
    read_prompt_end,
    read_tools,
    template_variables,
)


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

    return JsonEndpoint(context, read_text, tokenize, names={"text": "prompt"})


class TokenizeBody(ToolsBody):
    """Body of POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


def _text_request(body: TokenizeBody, caller: Caller, ignored: IgnoredFields) -> TokensRequest:
    request = pb.TokenizeRequest(model=body.model or "", add_special_tokens=body.add_special_tokens)
    media: Given = []
    if body.messages is not None:
        ignored.unread("", "prompt", body.prompt)
        chat = pb.GenerateRequest(messages=read_messages(body.messages, media))
        read_tools(body, chat, ignored)
        read_prompt_end(body, chat)
        request.chat_template_kwargs = template_variables(body)
        request.messages.extend(chat.messages)
        request.tools.extend(chat.tools)
        request.continue_final_message = chat.continue_final_message
        request.no_generation_prompt = chat.no_generation_prompt
    elif body.prompt is not None:
        request.text = body.prompt
        for name in ToolsBody.__struct_fields__:  # those of a chat
            ignored.unread("", name, getattr(body, name))
    else:
        raise InvalidRequest("prompt", "is missing")
    return TokensRequest(request, bool(body.return_token_strs), media)


read_text = BodyReader(TokenizeBody, _text_request)


def detokenizer_endpoint(context: EndpointContext) -> JsonEndpoint[tuple[str, list[int]]]:
    """Return the application of /detokenize."""

    async def detokenize(api_request: tuple[str, list[int]], caller: Caller) -> dict[str, Any]:
        name, token_ids = api_request
        return {"prompt": await context.queries.detokenize(name, caller.principal, token_ids)}

    return JsonEndpoint(context, read_tokens, detokenize, names={"token_ids": "tokens"})


class DetokenizeBody(Model):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId] | None = None


read_tokens = BodyReader(DetokenizeBody, lambda body, _caller, _ignored: (body.model or "", body.tokens or []))
