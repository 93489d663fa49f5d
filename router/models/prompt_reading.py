"""Reading of a request by one model: the prompt in its tokens, and resolved options within its limits."""

from dataclasses import dataclass

from cluster.errors import InvalidRequest
from kvcache.items import Item
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival
from router.models.media import MediaSource, ReadingContext, ReadyMedia, sources_of
from router.models.model_runtime import ModelRuntime
from router.models.output.output_plan import OutputPlan, PromptEnd, plan_output
from router.validation import check_embedding, check_prompt, prompt_field, resolve_sampling


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A request that is checked except for its grammar."""

    prompt: list[int]
    sampling: pb.Sampling
    output: OutputPlan
    media: ReadyMedia | None = None
    """Media of the prompt, whose items are among its tokens; None: it has none. Who has it must close it."""

    @property
    def items(self) -> tuple[Item, ...]:
        """Items of the prompt, in order."""
        return () if self.media is None else self.media.items

    def close(self) -> None:
        """Let go of the media, if there are any."""
        if self.media is not None:
            self.media.close()


async def encode(
    model: ModelRuntime,
    request: pb.GenerateRequest,
    sources: list[MediaSource],
    tenant: str,
    deadline: float,
    adds_special: bool = True,
) -> list[int]:
    """Return a prompt's tokens, with one placeholder for each of its media, the `sources`.

    Raises InvalidRequest, also for media that the model does not read, and Unavailable.
    """
    if not sources:
        return await model.encoder.encode(request, tenant, adds_special)
    placeholders = await model.media(sources).placeholders(sources, deadline)
    return await model.encoder.encode(request, tenant, adds_special, placeholders)


async def expand(
    model: ModelRuntime,
    request: pb.GenerateRequest,
    prompt: list[int],
    sources: list[MediaSource],
    tenant: str,
    context: ReadingContext,
) -> ReadyMedia:
    """Have the media of a request made ready, of which `prompt` has the placeholders.

    Raises ServiceError.
    """
    field = prompt_field(request)
    check_prompt(prompt, field, model.model_dir)
    return await model.media(sources).process(prompt, sources, field, tenant, context)


async def read(
    model: ModelRuntime,
    request: pb.GenerateRequest,
    arrival: Arrival,
    context: ReadingContext,
    prompt: list[int] | None = None,
) -> PreparedPrompt:
    """Read a request; `prompt` has its tokens if known, with placeholders for media.

    The caller must close what is returned. Raises ServiceError, InvalidRequest naming the field.
    """
    embeds = request.HasField("embedding")
    if embeds:
        check_embedding(request, model.check_pools())
    elif not model.generates:
        reason = "it has no output layer, or vLLM's pooling runner has it"
        raise InvalidRequest("model", f"{model.name!r} makes embeddings or labels only: {reason}")
    sources = sources_of(request)
    if prompt is None:
        prompt = await encode(model, request, sources, arrival.tenant, context.deadline)
        arrival.tokens_read += len(prompt)
    if not sources:
        return _checked(model, request, prompt, None)
    media = await expand(model, request, prompt, sources, arrival.tenant, context)
    try:
        arrival.tokens_read += len(media.prompt) - len(prompt)
        return _checked(model, request, media.prompt, media)
    except BaseException:
        media.close()
        raise


def _checked(
    model: ModelRuntime, request: pb.GenerateRequest, prompt: list[int], media: ReadyMedia | None
) -> PreparedPrompt:
    check_prompt(prompt, prompt_field(request), model.model_dir)
    encoder = model.encoder
    end = PromptEnd(encoder.generation_prompt(request), encoder.begun_answer(request))
    output, sampling = plan_output(request, encoder.output_format, end, encoder.reasoning_marks)
    if request.HasField("embedding"):
        sampling.max_tokens = 1  # no token is generated
    resolved = resolve_sampling(sampling, len(prompt), model.model_dir, model.clamps)
    return PreparedPrompt(prompt, resolved, output, media)
