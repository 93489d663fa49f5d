"""Schemas in the form for llguidance: whitespace, formats, and keys that come twice."""

import json
from typing import Any

import pytest

from cluster.errors import InvalidRequest
from engine.core_types import EngineSequence, SamplingParams, StructuredOutput
from engine.model.detokenizer import load_tokenizer
from engine.model.model_dir import ModelDir
from engine.sampling import grammar
from engine.sampling.grammar import GrammarCompiler, Grammars, forms_of
from engine.sampling.json_schemas import ANY_OBJECT, WHITESPACE
from router.models.grammars.grammar_checker import Function, call_grammar
from tandem.storyteller import STORYTELLER

MODEL = ModelDir.open(STORYTELLER)
TOKENIZER = load_tokenizer(MODEL)
BOUNDED = {"x-guidance": {"whitespace_pattern": WHITESPACE}}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(MODEL)


def schema_of(compiler: GrammarCompiler, schema: Any) -> Any:
    return json.loads(compiler.prepared(StructuredOutput("json_schema", (json.dumps(schema),))).texts[0])


def keeps(compiler: GrammarCompiler, form: StructuredOutput, text: str) -> bool:
    """Whether a whole text keeps to a form."""
    matcher = compiler.compile(compiler.prepared(form))
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def keeps_to_schema(compiler: GrammarCompiler, schema: Any, text: str) -> bool:
    return keeps(compiler, StructuredOutput("json_schema", (json.dumps(schema),)), text)


LAID_OUT = (
    '{"a":[1,2]}',
    '{ "a" : [1, 2] }',
    '{\n    "a": [\n        1,\n        2\n    ]\n}',
    '{\r\n\t"a": [1, 2]\r\n}',
)
ENDLESS = ("{  }", "{\n\n}", "{" + " " * 200 + "}", "{}" + "\n" * 9)


WITH_JSON = {
    "json_object": StructuredOutput("json_object", ()),
    "json_schema": StructuredOutput("json_schema", ('{"type": "object"}',)),
    "true": StructuredOutput("json_schema", ("true",)),
    "grammar": StructuredOutput("grammar", ('start: body // not "%json {}"\nbody: %json {"type": "object"}',)),
}


@pytest.mark.parametrize("form", WITH_JSON.values(), ids=WITH_JSON)
def test_whitespace_is_bounded_by_default(compiler: GrammarCompiler, form: StructuredOutput) -> None:
    assert all(keeps(compiler, form, text) for text in LAID_OUT)
    assert not any(keeps(compiler, form, text) for text in ENDLESS)


@pytest.mark.parametrize("form", WITH_JSON.values(), ids=WITH_JSON)
def test_the_form_for_a_library_that_repeats_whitespace(
    compiler: GrammarCompiler, form: StructuredOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = compiler.prepared(form)
    assert forms_of(prepared) == [prepared]
    monkeypatch.setattr(grammar, "REPEATS_WHITESPACE", True)
    one_space, last = forms_of(prepared)
    assert last == prepared
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}'):
        assert keeps(compiler, one_space, text)
    for text in (*LAID_OUT[1:], *ENDLESS):
        assert not keeps(compiler, one_space, text)
    forced = StructuredOutput("grammar", (call_grammar([Function("f", None)], single=True),))
    for whole in (StructuredOutput("regex", ("a",)), forced):
        assert forms_of(whole) == [whole]


@pytest.mark.parametrize(("begun", "fits"), [('{"a": ', True), ('{\n  "a": ', True), ("{\n  1", False)])
def test_an_output_that_began_elsewhere_goes_on(
    compiler: GrammarCompiler, begun: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "REPEATS_WHITESPACE", True)
    form = compiler.prepared(WITH_JSON["json_schema"])
    tokens = TOKENIZER.encode(begun, add_special_tokens=False).ids
    sampling = SamplingParams(max_tokens=99, structured=form)
    moved = EngineSequence(
        "r", [5, *tokens], 1 + len(tokens), b"", 0, 0, sampling=sampling, num_emitted_before=len(tokens)
    )
    grammars = Grammars(MODEL)
    for text in ("1", ', "b"'):
        masks = grammars.masks([moved])
        assert [failure.field for failure in masks.failures.values()] == ([] if fits else [form.field])
        moved.token_ids += TOKENIZER.encode(text, add_special_tokens=False).ids


def test_the_clients_own_whitespace_stays(compiler: GrammarCompiler) -> None:
    for options in ({"whitespace_flexible": False}, {"whitespace_pattern": " *"}):
        assert schema_of(compiler, {"x-guidance": options}) == {"x-guidance": options}
    forced = StructuredOutput("grammar", (call_grammar([Function("f", None)], single=True),))
    assert compiler.prepared(forced).texts[0].count("whitespace_flexible") == 1
    assert "whitespace_pattern" not in compiler.prepared(forced).texts[0]


def test_percent_json_within_a_text_is_text(compiler: GrammarCompiler) -> None:
    for text in (r'start: "%json {}" /%json \{"format": 1\}/', 'start: "a" // %json {}', "start: %json {broken"):
        assert compiler.prepared(StructuredOutput("grammar", (text,))).texts[0] == text


def test_an_unknown_format_is_an_annotation(compiler: GrammarCompiler) -> None:
    for name in ("password", "binary", "uri-reference", "int32"):
        assert keeps_to_schema(compiler, {"type": "string", "format": name}, '"anything"')
    nested = {"properties": {"format": {"items": {"format": "password"}}}, "enum": [{"format": "password"}]}
    prepared = schema_of(compiler, nested)
    assert prepared["properties"] == {"format": {"items": {}}}
    assert prepared["enum"] == nested["enum"], "a value, no schema"
    assert not keeps_to_schema(compiler, {"type": "string", "format": "date"}, '"anything"')
    assert keeps_to_schema(compiler, {"type": "string", "format": "date"}, '"2024-02-29"')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {"minimum": 5}}, "required": ["a"]},
            ['{"a": 5}', '{"a": 6, "b": 1}'],
            ['{"a": 4}', '{"a": 5, "a": 6}'],
        ),
        (
            {
                "patternProperties": {"^[ab]$": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
            ['{"a": 1, "b": 2}'],
            ['{"a": 1, "b": "x"}', '{"a": 1}'],
        ),
        (
            {"properties": {"a1": {}}, "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
            ['{"a1": 1, "a2": 2}', '{"a2": 2}', "{}"],
            ['{"a1": "x"}', '{"b": 1}'],
        ),
    ],
    ids=["one name", "required names", "more names"],
)
def test_a_name_in_both_properties_and_patterns(
    compiler: GrammarCompiler, schema: Any, good: list[str], bad: list[str]
) -> None:
    schema = schema | {"type": "object"}
    assert all(keeps_to_schema(compiler, schema, text) for text in good)
    assert not any(keeps_to_schema(compiler, schema, text) for text in bad)
    for text in good:  # wherever another key may begin, some token goes on with it
        form = StructuredOutput("json_schema", (json.dumps(schema),))
        matcher = compiler.compile(compiler.prepared(form))
        for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
            assert compiler.masks([matcher]).any()
            assert not matcher.is_error()
            matcher.consume_token(token_id)


OPEN = {"type": "object", "minProperties": 2}


@pytest.mark.parametrize(
    "schema",
    [
        OPEN,
        OPEN | {"patternProperties": {"^x": {}}, "additionalProperties": False},
        {"items": OPEN},
        {"anyOf": [{}, OPEN]},
    ],
)
def test_a_least_number_of_keys_that_could_be_doubled_is_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="minProperties 2 cannot be kept to") as caught:
        schema_of(compiler, schema)
    assert caught.value.field == "sampling.structured.json_schema"
    with pytest.raises(InvalidRequest, match="minProperties 2"):
        compiler.prepared(StructuredOutput("grammar", (f"start: %json {json.dumps(schema)}",)))


def test_a_least_number_of_keys_that_holds_is_kept(compiler: GrammarCompiler) -> None:
    closed = OPEN | {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "additionalProperties": False}
    assert keeps_to_schema(compiler, closed, '{"a": 1, "b": 1}')
    assert not keeps_to_schema(compiler, closed, '{"a": 1}')
    assert keeps_to_schema(compiler, OPEN | {"required": ["a"]}, '{"a": 1, "z": 1}')
    assert keeps_to_schema(compiler, OPEN | {"minProperties": 1}, '{"z": 1}')
    assert not keeps_to_schema(compiler, OPEN | {"minProperties": 1}, "{}")


def test_what_is_no_json_is_left_to_the_compiler(compiler: GrammarCompiler) -> None:
    for text in ("{'a'}", '{"minimum": NaN}', '{"const": "\\ud800"}', "[" * 5000):
        form = StructuredOutput("json_schema", (text,))
        assert compiler.prepared(form) == form
    assert json.loads(ANY_OBJECT) == {"type": "object"} | BOUNDED
