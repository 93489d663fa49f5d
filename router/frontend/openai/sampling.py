"""Sampling options common to both endpoints, from OpenAI's and vLLM's names to ours.

Pure.

Limits are checked for every request in `router/validation.py`; here only types are.
"""

import json
from dataclasses import dataclass, field

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.body.fields import INT32, Fields, must_be_one_of

KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
"""Kinds of structured output: vLLM's names, and ours."""
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""llguidance's option, within a schema, for JSON without whitespace."""


@dataclass(slots=True)
class GenerationOptions:
    """Requested options besides the prompt."""

    sampling: pb.Sampling
    names: dict[str, str] = field(default_factory=dict)
    """Client's names of fields that we call otherwise."""


def read_sampling(fields: Fields, most_tokens: tuple[str, ...], default_max_tokens: int | None) -> GenerationOptions:
    """Read the options.

    Raises InvalidRequest.

    `most_tokens` are the accepted names of max_tokens, the preferred one first.
    """
    options = GenerationOptions(pb.Sampling())
    _read_max_tokens(fields, options, most_tokens, default_max_tokens)
    sampling = options.sampling
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if (number := fields.number(name)) is not None:
            setattr(sampling, name, number)
    for name in ("n", "min_tokens", "prompt_logprobs"):
        if (count := fields.integer(name, -INT32, INT32 - 1)) is not None:
            setattr(sampling, name, count)
    if (top_k := fields.integer("top_k", -INT32, INT32 - 1)) is not None:
        sampling.top_k = 0 if top_k == -1 else top_k  # vLLM's value for off
    if (seed := fields.integer("seed")) is not None:
        sampling.seed = seed % (1 << 64)
    sampling.stop.extend(fields.strings("stop"))
    sampling.stop_token_ids.extend(fields.token_ids("stop_token_ids"))
    sampling.ignore_eos = fields.boolean("ignore_eos")
    for token_id, bias in fields.biases("logit_bias").items():
        sampling.logit_bias[token_id] = bias
    sampling.keep_special_tokens = not fields.boolean("skip_special_tokens", default=True)
    sampling.include_stop_str_in_output = fields.boolean("include_stop_str_in_output")
    _read_structured(fields, options)
    return options


def _read_max_tokens(
    fields: Fields, options: GenerationOptions, most_tokens: tuple[str, ...], default_max_tokens: int | None
) -> None:
    limits = {name: fields.integer(name, -INT32, INT32 - 1) for name in most_tokens}
    values = {value for value in limits.values() if value is not None}
    if len(values) > 1:
        raise fields.refuse(most_tokens[0], f"differs from {most_tokens[1]}: set one of them")
    value = values.pop() if values else default_max_tokens
    if value is not None:
        options.sampling.max_tokens = value
    options.names["max_tokens"] = next((name for name in most_tokens if limits[name] is not None), most_tokens[0])


def _read_structured(fields: Fields, options: GenerationOptions) -> None:
    """Read `response_format`, vLLM's `structured_outputs`, or its older guided_*: one of them at most."""
    named_forms: list[tuple[str, pb.StructuredOutput | None]] = []
    if (wanted := fields.nested("response_format")) is not None:
        named_forms.append(("response_format", _response_format(wanted)))
    if (wanted := fields.nested("structured_outputs")) is not None:
        named_forms += [("structured_outputs", form) for form in _structured_outputs(wanted)]
    for theirs, ours in KINDS.items():
        if fields.given(name := f"guided_{theirs}"):
            named_forms.append((name, _form(fields, name, ours)))
    forms = [(name, form) for name, form in named_forms if form is not None]
    if len(forms) > 1:
        raise InvalidRequest(forms[1][0], f"cannot be combined with {forms[0][0]}: each sets the form of the output")
    if forms:
        name, form = forms[0]
        options.sampling.structured.CopyFrom(form)
        options.names["structured"] = name


def _response_format(fields: Fields) -> pb.StructuredOutput | None:
    kind = must_be_one_of(fields, "type", ("text", "json_object", "json_schema"))
    form: pb.StructuredOutput | None = None
    if kind == "json_object":
        form = pb.StructuredOutput(json_object=True)
    elif kind == "json_schema":
        schema = fields.required("json_schema")
        for informative in ("name", "description", "strict"):  # the schema is enforced in any case
            schema.take(informative)
        form = _form(schema, "schema", "json_schema")
        if form is None:
            raise schema.refuse("schema", "is missing")
        schema.finish()
    fields.finish()
    return form


def _structured_outputs(fields: Fields) -> list[pb.StructuredOutput | None]:
    forms = [_form(fields, theirs, ours) for theirs, ours in KINDS.items()]
    if fields.boolean("disable_any_whitespace"):
        forms = [form and _without_whitespace(form, fields) for form in forms]
    fields.finish()
    return forms


def _without_whitespace(form: pb.StructuredOutput, fields: Fields) -> pb.StructuredOutput:
    if form.json_object:
        return pb.StructuredOutput(json_schema=json.dumps({"type": "object"} | COMPACT))
    if not form.HasField("json_schema"):
        raise fields.refuse("disable_any_whitespace", "needs json or json_object")
    try:
        schema = json.loads(form.json_schema)
    except ValueError:
        return form  # its compiler reports errors
    return pb.StructuredOutput(json_schema=json.dumps(schema | COMPACT)) if isinstance(schema, dict) else form


def _form(fields: Fields, name: str, kind: str) -> pb.StructuredOutput | None:
    """Return the field `name` as our `kind`; None where it is absent."""
    if not fields.given(name):
        return None
    if kind == "json_object":
        return pb.StructuredOutput(json_object=True) if fields.boolean(name) else None
    if kind == "choice":
        return pb.StructuredOutput(choice=fields.strings(name))
    if kind == "json_schema":
        return pb.StructuredOutput(json_schema=_schema(fields, name))
    return pb.StructuredOutput(**{kind: fields.text(name)})  # type: ignore[arg-type]  # regex and grammar are strings


def _schema(fields: Fields, name: str) -> str:
    """Return a schema given as an object or as JSON text."""
    return fields.text(name) if isinstance(fields.peek(name), str) else json.dumps(fields.schema(name))
