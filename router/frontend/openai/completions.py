"""POST /v1/completions: from its body to GenerateRequests.

Pure.
"""

from router.frontend.http.body.fields import INT32, Fields
from router.frontend.http.caller import Caller
from router.frontend.openai.request import ApiRequest, check_choices, common, requests_of
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
    prompts = fields.prompts("prompt")
    if len(prompts) > MAX_PROMPTS:
        raise fields.refuse("prompt", f"at most {MAX_PROMPTS} prompts, not {len(prompts)}")
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
    api_request.requests += requests_of(request, prompts)
    check_choices(api_request, "n" if len(prompts) == 1 else "prompt")
    return api_request
