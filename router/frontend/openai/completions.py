"""POST /v1/completions: from its body to GenerateRequests.

Pure.
"""

from cluster.errors import InvalidRequest
from router.frontend.http.body.fields import BodyReader, Count, IgnoredFields, Inputs, inputs_of
from router.frontend.http.errors import Caller
from router.frontend.openai.request import ApiRequest, GenerationBody, check_choices, common, read_sampling, requests_of

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
MAX_PROMPTS = 256


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Inputs
    logprobs: Count | None = None
    echo: bool | None = None


def _request(body: CompletionBody, caller: Caller, ignored: IgnoredFields) -> ApiRequest:
    echo, max_tokens = bool(body.echo), DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if only_echo := echo and max_tokens == 0:
        max_tokens = 1  # an engine generates at least one token; the answer omits it
    names: dict[str, str] = {}
    sampling = read_sampling(body, max_tokens, body.logprobs, names)
    prompts = inputs_of(body.prompt, "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    request, api_request = common(body, caller, sampling, names)
    api_request.echo, api_request.only_echo = echo, only_echo
    api_request.echo_logprobs = echo and body.logprobs is not None
    if api_request.stream and (only_echo or api_request.echo_logprobs):
        raise InvalidRequest("echo", "cannot be streamed with logprobs or max_tokens 0")
    if api_request.echo_logprobs and body.prompt_logprobs is None:
        request.sampling.prompt_logprobs = request.sampling.logprobs
    api_request.requests += requests_of(request, prompts)
    check_choices(api_request, "n" if len(prompts) == 1 else "prompt")
    return api_request


read_completion = BodyReader(CompletionBody, _request)
