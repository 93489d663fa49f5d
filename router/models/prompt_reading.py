"""Reading of a request by one model: the prompt in its tokens, and resolved options within its limits."""

from dataclasses import dataclass

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival
from router.models.model_runtime import ModelRuntime
from router.models.output_plan import OutputPlan, PromptEnd, plan_output
from router.validation import check_embedding, check_prompt, prompt_field, resolve_sampling


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A request that is checked except for its grammar."""

    prompt: list[int]
    sampling: pb.Sampling
    output: OutputPlan


async def read(
    model: ModelRuntime, request: pb.GenerateRequest, arrival: Arrival, prompt: list[int] | None = None
) -> PreparedPrompt:
    """Read a request; `prompt` has its tokens if known.

    Raises InvalidRequest naming the field.
    """
    embeds = request.HasField("embedding")
    if embeds:
        check_embedding(request, model.check_embeds().dimensions)
    elif not model.generates:
        raise InvalidRequest("model", f"{model.name!r} has no output layer: it makes embeddings only")
    if prompt is None:
        prompt = await model.encoder.encode(request, arrival.tenant)
        arrival.tokens_read += len(prompt)
    check_prompt(prompt, prompt_field(request), model.model_dir)
    encoder = model.encoder
    end = PromptEnd(encoder.generation_prompt(request), encoder.begun_answer(request))
    output, sampling = plan_output(request, model.output_format, end, encoder.reasoning_marks)
    if embeds:
        sampling.max_tokens = 1  # no token is generated
    return PreparedPrompt(prompt, resolve_sampling(sampling, len(prompt), model.model_dir, model.clamps), output)
