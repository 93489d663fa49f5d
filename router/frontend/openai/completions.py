"""POST /v1/completions: from its body to GenerateRequests.

Pure.
"""

from typing import Any

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import INT32, Fields, are_token_ids
from router.frontend.http.caller import Caller
from router.frontend.openai.request import ApiRequest, check_choices, common
from router.frontend.openai.sampling import read_sampling

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
MAX_PROMPTS = 256


def read_completion(fields: Fields, caller: Caller) -> ApiRequest:
    """Read a completion request.

    Raises InvalidRequest naming the field at fault.
    """
    options = read_sampling(fields, ("max_tokens",), DEFAULT_MAX_TOKENS)
    if (logprobs := fields.integer("logprobs", -INT32, INT32 - 1)) is not None:
        options.sampling.logprobs = logprobs
    prompts = _prompts(fields.take("prompt"))
    echo = fields.boolean("echo")
    only_echo = echo and options.sampling.HasField("max_tokens") and options.sampling.max_tokens == 0
    if only_echo:
        options.sampling.max_tokens = 1  # an engine generates at least one token; the answer omits it
    request, api_request = common(fields, caller, options)
    api_request.echo, api_request.only_echo = echo, only_echo
    api_request.echo_logprobs = echo and options.sampling.HasField("logprobs")
    if api_request.stream and (only_echo or api_request.echo_logprobs):
        raise fields.refuse("echo", "cannot be streamed with logprobs or max_tokens 0")
    if api_request.echo_logprobs and not request.sampling.HasField("prompt_logprobs"):
        request.sampling.prompt_logprobs = request.sampling.logprobs
    fields.finish()
    for number, prompt in enumerate(prompts):
        one = pb.GenerateRequest()
        one.CopyFrom(request)
        if isinstance(prompt, str):
            one.text = prompt
        else:
            one.token_ids.extend(prompt)
        if len(prompts) > 1:
            one.request_id = f"{request.request_id}-{number}"
        api_request.requests.append(one)
    check_choices(api_request, "n" if len(prompts) == 1 else "prompt")
    return api_request


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a text, a list of texts, token ids, or a list of token id lists.

    Raises InvalidRequest.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("prompt", "must be a text, a list of token ids, or a list of either, and not empty")
    if are_token_ids(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"at most {MAX_PROMPTS} prompts, not {len(value)}")
    if all(isinstance(prompt, str) for prompt in value):
        return value
    if all(prompt and are_token_ids(prompt) for prompt in value):
        return value
    raise InvalidRequest("prompt", "must be a text, a list of token ids, or a list of either, and not empty")
