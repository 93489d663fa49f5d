"""What a request may say of the form of its output, and the field that an error names."""

import json
from pathlib import Path

import pytest

from cluster.errors import InvalidRequest
from engine.core_types import RequestFailure, StructuredOutput
from engine.messages.from_engine import Failed
from engine.model.model_dir import ModelDir
from engine.sampling.structured_output import MAX_CHARS, MAX_CHOICES, read_structured
from protos import decode_pb2
from protos import inference_pb2 as pb
from router.validation import resolve_sampling
from support.refusals import refusal_of
from tandem.cli.client.chat import make_structured, parse_logit_bias
from worker.requests.output_stream import OutputStream

GOOD = {
    "json_schema": (pb.StructuredOutput(json_schema="{}"), StructuredOutput("json_schema", ("{}",))),
    "json_object": (pb.StructuredOutput(json_object=True), StructuredOutput("json_object", ())),
    "regex": (pb.StructuredOutput(regex="a+"), StructuredOutput("regex", ("a+",))),
    "grammar": (pb.StructuredOutput(grammar="start: A"), StructuredOutput("grammar", ("start: A",))),
    "choice": (pb.StructuredOutput(choice=["a", "b"]), StructuredOutput("choice", ("a", "b"))),
    "longest": (pb.StructuredOutput(regex="a" * MAX_CHARS), StructuredOutput("regex", ("a" * MAX_CHARS,))),
}
BAD = {
    "none": (pb.StructuredOutput(), "sampling.structured"),
    "no object": (pb.StructuredOutput(json_object=False), "sampling.structured"),
    "two": (pb.StructuredOutput(regex="a", choice=["a"]), "sampling.structured"),
    "two, one empty": (pb.StructuredOutput(json_schema="", json_object=True), "sampling.structured"),
    "empty schema": (pb.StructuredOutput(json_schema=""), "sampling.structured.json_schema"),
    "empty regex": (pb.StructuredOutput(regex=""), "sampling.structured.regex"),
    "empty grammar": (pb.StructuredOutput(grammar=""), "sampling.structured.grammar"),
    "empty choice": (pb.StructuredOutput(choice=["a", ""]), "sampling.structured.choice"),
    "too many choices": (pb.StructuredOutput(choice=["a"] * (MAX_CHOICES + 1)), "sampling.structured.choice"),
    "too long": (pb.StructuredOutput(grammar="a" * (MAX_CHARS + 1)), "sampling.structured.grammar"),
    "too long together": (pb.StructuredOutput(choice=["a" * MAX_CHARS, "b"]), "sampling.structured.choice"),
}


@pytest.mark.parametrize(("message", "expected"), GOOD.values(), ids=GOOD)
def test_one_kind_is_read(message: pb.StructuredOutput, expected: StructuredOutput) -> None:
    assert read_structured(pb.Sampling(structured=message)) == expected


def test_without_it_there_is_none() -> None:
    assert read_structured(pb.Sampling()) is None


@pytest.mark.parametrize(("message", "field"), BAD.values(), ids=BAD)
def test_limits_name_their_field(tmp_path: Path, message: pb.StructuredOutput, field: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "max_position_embeddings": 100}))
    with refusal_of(field):
        resolve_sampling(pb.Sampling(structured=message), 10, ModelDir.open(tmp_path))


def test_a_model_without_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "max_position_embeddings": 100}))
    sampling = pb.Sampling(structured=pb.StructuredOutput(regex="a"))
    with refusal_of("sampling.structured", match="no tokenizer"):
        resolve_sampling(sampling, 10, ModelDir.open(tmp_path))
    (tmp_path / "tokenizer.json").touch()
    assert resolve_sampling(sampling, 10, ModelDir.open(tmp_path)).structured == sampling.structured


def test_a_failed_request_names_its_field() -> None:
    request = decode_pb2.DecodeRequest(prompt_token_ids=[1], sampling=pb.Sampling(max_tokens=3))
    with pytest.raises(InvalidRequest) as caught:
        OutputStream(request, None, "d0", 4).absorb(
            Failed("r", RequestFailure("sampling.structured.regex", "too complex"))
        )
    assert (caught.value.field, caught.value.message) == ("sampling.structured.regex", "too complex")


def test_command_line_options_become_the_message(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "null"}')
    made = make_structured(json_schema=f"@{tmp_path / 'schema.json'}", json_object=None, regex="@a", choice=None)
    assert made == pb.StructuredOutput(json_schema='{"type": "null"}', regex="@a")
    assert make_structured(regex=None) is None
    assert make_structured(regex="") == pb.StructuredOutput(regex=""), "the router refuses it"
    with pytest.raises(InvalidRequest, match="cannot be read"):
        make_structured(grammar=f"@{tmp_path / 'nothing'}")


def test_logit_biases_of_the_command_line() -> None:
    assert parse_logit_bias(["3=-1.5", "7=2"]) == {3: -1.5, 7: 2.0}
    assert parse_logit_bias(None) == {}
    for bad in ("3", "a=1", "3=x", "=1"):
        with refusal_of("sampling.logit_bias"):
            parse_logit_bias([bad])
