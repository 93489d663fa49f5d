"""Sampling options common to both endpoints, from OpenAI's and vLLM's names to ours.

Pure.

Limits are checked for every request in `router/validation.py`; here only types are.
"""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import INT64, Count, Model, Texts, TokenId, shown, texts_of
from router.frontend.openai.common_body import CommonBody

KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
"""Kinds of structured output: vLLM's names, and ours."""
GUIDED = {kind: f"guided_{kind}" for kind in KINDS}
"""Older names of the kinds, as fields of the body."""
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""llguidance's option, within a schema, for JSON without whitespace."""


class TextForm(Model, tag_field="type", tag="text"):
    pass


class ObjectForm(Model, tag_field="type", tag="json_object"):
    pass


class JsonSchema(Model):
    schema: str | dict[str, Any]
    name: Any = None
    description: Any = None
    strict: Any = None
    """Not read: the schema is enforced in any case."""


class SchemaForm(Model, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class StructuredOutputs(Model):
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class SamplingBody(CommonBody):
    """Fields of completions and chats that set how tokens are chosen."""

    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: Count | None = None
    min_tokens: Count | None = None
    prompt_logprobs: Count | None = None
    top_k: Count | None = None
    seed: Annotated[int, msgspec.Meta(ge=-INT64, le=INT64 - 1)] | None = None
    stop: Texts | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: TextForm | ObjectForm | SchemaForm | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None


@dataclass(slots=True)
class GenerationOptions:
    """Requested options besides the prompt."""

    sampling: pb.Sampling
    names: dict[str, str] = field(default_factory=dict)
    """Client's names of fields that we call otherwise."""


def read_sampling(body: SamplingBody, max_tokens: int | None, logprobs: int | None) -> GenerationOptions:
    """Read the options.

    Raises InvalidRequest.
    """
    sampling = pb.Sampling(
        max_tokens=max_tokens,
        logprobs=logprobs,
        temperature=body.temperature,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        n=body.n,
        min_tokens=body.min_tokens,
        prompt_logprobs=body.prompt_logprobs,
        top_k=0 if body.top_k == -1 else body.top_k,  # vLLM's value for off
        seed=None if body.seed is None else body.seed % (1 << 64),
        stop=texts_of(body.stop),
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logit_bias=_biases(body.logit_bias) if body.logit_bias else None,
        keep_special_tokens=body.skip_special_tokens is False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )
    options = GenerationOptions(sampling)
    _read_structured(body, options)
    return options


def _biases(biases: dict[str, float]) -> dict[int, float]:
    """Return a map from token ids, which JSON has as strings, to numbers."""
    for token_id in biases:
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 10 and int(token_id) < 1 << 32):
            raise InvalidRequest("logit_bias", f"{shown(token_id)} is not a token id")
    return {int(token_id): bias for token_id, bias in biases.items()}


def _read_structured(body: SamplingBody, options: GenerationOptions) -> None:
    """Read `response_format`, vLLM's `structured_outputs`, or its older guided_*: one of them at most."""
    forms: list[tuple[str, pb.StructuredOutput]] = []
    wanted = body.response_format
    if isinstance(wanted, ObjectForm):
        forms.append(("response_format", pb.StructuredOutput(json_object=True)))
    elif isinstance(wanted, SchemaForm):
        forms.append(("response_format", _form("json", wanted.json_schema.schema)))
    if (outputs := body.structured_outputs) is not None:
        given = [_form(kind, value) for kind in KINDS if _is_set(value := getattr(outputs, kind))]
        if outputs.disable_any_whitespace:
            given = list(map(_without_whitespace, given))
        forms += [("structured_outputs", form) for form in given]
    for kind, name in GUIDED.items():
        if _is_set(value := getattr(body, name)):
            forms.append((name, _form(kind, value)))
    if len(forms) > 1:
        raise InvalidRequest(forms[1][0], f"cannot be combined with {forms[0][0]}: each sets the form of the output")
    if forms:
        options.names["structured"], form = forms[0]
        options.sampling.structured.CopyFrom(form)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _form(kind: str, value: Any) -> pb.StructuredOutput:
    """Return the form of vLLM's name `kind`; a schema is an object or JSON text."""
    if kind == "choice":
        value = texts_of(value)
    elif isinstance(value, dict):
        value = json.dumps(value)
    return pb.StructuredOutput(**{KINDS[kind]: value})


def _without_whitespace(form: pb.StructuredOutput) -> pb.StructuredOutput:
    if form.json_object:
        return pb.StructuredOutput(json_schema=json.dumps({"type": "object"} | COMPACT))
    if not form.HasField("json_schema"):
        raise InvalidRequest("structured_outputs.disable_any_whitespace", "needs json or json_object")
    try:
        schema = json.loads(form.json_schema)
    except ValueError:
        return form  # its compiler reports errors
    return pb.StructuredOutput(json_schema=json.dumps(schema | COMPACT)) if isinstance(schema, dict) else form
