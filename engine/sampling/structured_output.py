"""Structured-output fields of a request, read and limited.

`engine/sampling/grammar.py` gives them meaning.
"""

from cluster.errors import InvalidRequest
from engine.core_types import StructuredOutput
from protos import inference_pb2 as pb

FIELD = "sampling.structured"
MAX_CHARS = 65_536
MAX_CHOICES = 1024


def read_structured(sampling: pb.Sampling) -> StructuredOutput | None:
    """Return the requested form.

    Raises InvalidRequest unless exactly one form is set, within its limits.
    """
    if not sampling.HasField("structured"):
        return None
    message = sampling.structured
    forms: list[StructuredOutput] = []
    if message.HasField("json_schema"):
        forms.append(StructuredOutput("json_schema", (message.json_schema,)))
    if message.json_object:
        forms.append(StructuredOutput("json_object", ()))
    if message.HasField("regex"):
        forms.append(StructuredOutput("regex", (message.regex,)))
    if message.HasField("grammar"):
        forms.append(StructuredOutput("grammar", (message.grammar,)))
    if message.choice:
        forms.append(StructuredOutput("choice", tuple(message.choice)))
    if len(forms) != 1:
        what = f"{' and '.join(one.kind for one in forms)} were given" if forms else "none was given"
        raise InvalidRequest(
            FIELD, f"must have exactly one of json_schema, json_object, regex, grammar, choice; {what}"
        )
    _check_size(forms[0])
    return forms[0]


def _check_size(structured: StructuredOutput) -> None:
    if len(structured.texts) > MAX_CHOICES:
        raise InvalidRequest(structured.field, f"at most {MAX_CHOICES} choices, not {len(structured.texts)}")
    if (chars := sum(map(len, structured.texts))) > MAX_CHARS:
        raise InvalidRequest(structured.field, f"at most {MAX_CHARS} characters, not {chars}")
    if not all(structured.texts):
        raise InvalidRequest(structured.field, "must not be empty")
