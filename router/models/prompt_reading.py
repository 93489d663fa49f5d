"""A request as one model reads it: the prompt in its tokens, the options resolved and in its limits."""

from dataclasses import dataclass

from protos import inference_pb2 as pb
from router.models.model_runtime import ModelRuntime
from router.validation import check_prompt, prompt_field, resolve_sampling


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Checked, but for a grammar."""

    prompt: list[int]
    sampling: pb.Sampling


async def read(model: ModelRuntime, request: pb.GenerateRequest, prompt: list[int] | None = None) -> PreparedPrompt:
    """`prompt` where its tokens are known already. Raises InvalidRequest naming the field that it cannot serve."""
    if prompt is None:
        prompt = await model.encoder.encode(request)
    check_prompt(prompt, prompt_field(request), model.model_dir)
    return PreparedPrompt(prompt, resolve_sampling(request.sampling, len(prompt), model.model_dir))
