"""What a request wants of its output: forced calls, grammars behind reasoning, and parts of messages."""

import json
from typing import Any

import llguidance
import llguidance.hf
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from protos import inference_pb2 as pb
from router.models.grammars.grammar_checker import CLOSE, ReasoningMarks, after_reasoning
from router.models.output.output_format import NONE, OutputFormat
from router.models.output.output_plan import OutputPlan, PromptEnd, plan_output
from router.request_path.parsed_stream import OutputParts
from support.refusals import refusal_of
from tandem.storyteller import STORYTELLER

PLAIN, THINKING = OutputFormat("hermes", NONE), OutputFormat("hermes", "qwen3")
VOCABULARY = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
ADDED = {token.content: token_id for token_id, token in VOCABULARY.get_added_tokens_decoder().items()}
MARKS = ReasoningMarks("<think>", "</think>", ADDED)
TOOL = json.dumps({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})
USER = pb.ChatMessage(role="user", content="hello")


def plan(
    form: OutputFormat = PLAIN, before: str = "", sampling: pb.Sampling | None = None, **options: Any
) -> tuple[OutputPlan, pb.Sampling]:
    request = pb.GenerateRequest(messages=[USER], parse_output=True, sampling=sampling, **options)
    return plan_output(request, form, PromptEnd(before), MARKS if form is THINKING else ReasoningMarks("", ""))


def test_what_a_choice_of_tools_means() -> None:
    made, sampling = plan(tools=[TOOL])
    assert (made.parses_calls, made.is_forced, sampling) == (True, False, pb.Sampling())
    made, _ = plan(tools=[TOOL], tool_choice="none")
    assert not made.parses_calls
    _, sampling = plan(tools=[TOOL], single_tool_call=True)
    assert list(sampling.stop) == [CLOSE]
    made, sampling = plan(tools=[TOOL, TOOL], tool_choice="required")
    assert made.is_forced
    assert sampling.structured.grammar.startswith('start: call ("\\n" call)*\ncall: call_0 | call_1\n')
    for options in ({"tool_choice": "f"}, {"tool_choice": "required", "single_tool_call": True}):
        _, sampling = plan(tools=[TOOL], **options)
        assert sampling.structured.grammar.startswith("start: call\n")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("tool_choice", {"tools": [TOOL], "tool_choice": "g"}),
        (
            "tool_choice",
            {"tools": [TOOL], "tool_choice": "f", "sampling": pb.Sampling(structured=pb.StructuredOutput(regex="a"))},
        ),
        ("tools[0]", {"tools": ["{}"], "tool_choice": "required"}),
        ("tools[0].function.name", {"tools": ['{"function": {"name": "a b"}}'], "tool_choice": "required"}),
        (
            "sampling.structured.grammar",
            {"form": THINKING, "sampling": pb.Sampling(structured=pb.StructuredOutput(grammar="start: /a/"))},
        ),
    ],
)
def test_a_plan_that_means_nothing_names_its_field(field: str, options: dict[str, Any]) -> None:
    with refusal_of(field):
        plan(**options)


def test_special_tokens_are_kept_where_a_form_needs_them() -> None:
    harmony = OutputFormat("openai", "openai_gptoss")
    assert plan(harmony)[1].keep_special_tokens
    assert not plan(THINKING)[1].keep_special_tokens
    unparsed = pb.GenerateRequest(messages=[USER])
    assert not plan_output(unparsed, harmony, PromptEnd(), ReasoningMarks("", ""))[1].keep_special_tokens


TOKENIZER = llguidance.hf.from_tokenizer(PreTrainedTokenizerFast(tokenizer_file=str(STORYTELLER / "tokenizer.json")))
FORMS = [
    (pb.StructuredOutput(json_schema='{"type": "object", "properties": {"a": {"type": "null"}}}'), '{"a": null}'),
    (pb.StructuredOutput(json_object=True), "{}"),
    (pb.StructuredOutput(regex="[a/b]\\/c"), "//c"),
    (pb.StructuredOutput(choice=['yes "', "no"]), 'yes "'),
]


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.get_error()
    return matcher.try_consume_tokens(ids := TOKENIZER.tokenize_str(text)) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("form", "text"), FORMS)
def test_a_form_holds_after_reasoning(form: pb.StructuredOutput, text: str) -> None:
    begun = after_reasoning(form, MARKS, begun=True).grammar
    assert accepts(begun, f"Hm <b> {{\n</think>\n\n{text}")
    assert not accepts(begun, text)
    assert not accepts(begun, f"Hm</think>x{text}")
    free = after_reasoning(form, MARKS, begun=False).grammar
    assert accepts(free, f"<think>Hm</think>{text}")
    assert accepts(free, text)
    assert not accepts(free, f"Hm{text}")


def test_a_forced_call_holds_after_reasoning() -> None:
    _, sampling = plan(THINKING, "<think>\n", tools=[TOOL], tool_choice="f")
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert accepts(sampling.structured.grammar, f"Hm</think>\n{call}")
    assert not accepts(sampling.structured.grammar, call)
    _, sampling = plan(THINKING, "<think>\n\n</think>\n\n", tools=[TOOL], tool_choice="f")
    assert accepts(sampling.structured.grammar, call)
    assert not accepts(sampling.structured.grammar, f"<think>Hm</think>\n{call}")


def test_reasoning_may_end_with_a_special_token() -> None:
    token_id = PreTrainedTokenizerFast(tokenizer_file=str(STORYTELLER / "tokenizer.json")).convert_tokens_to_ids(
        "<|user|>"
    )
    marks = ReasoningMarks("<|user|>", "<|user|>", {"<|user|>": token_id})
    grammar = after_reasoning(pb.StructuredOutput(choice=["yes"]), marks, begun=True).grammar
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    ids = [*TOKENIZER.tokenize_str("Hm"), token_id, *TOKENIZER.tokenize_str("yes")]
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_messages_get_their_parts() -> None:
    made, _ = plan(THINKING, "<think>", tools=[TOOL])
    parts = OutputParts(made)
    finish = pb.Finish(reason=pb.FINISH_REASON_STOP)
    messages = [
        pb.GenerateResponse(token_ids=[1, 2], text="Hm"),
        pb.GenerateResponse(token_ids=[3], text="</think>Yes <tool_call>"),
        pb.GenerateResponse(token_ids=[4], text='{"name": "f"}</tool_call>', finish=finish),
        pb.GenerateResponse(index=1, token_ids=[5], text="So", finish=finish),
    ]
    for message in messages:
        parts.add_to(message)
    reasoning, text = pb.OutputPart(reasoning="Hm"), pb.OutputPart(text="Yes")
    call = pb.OutputPart(tool_call=pb.ToolCall(name="f", arguments="{}"))
    assert [list(message.parts) for message in messages] == [
        [reasoning],
        [text],
        [call],
        [pb.OutputPart(reasoning="So")],
    ]
    assert [message.finish.usage.reasoning_tokens for message in messages[2:]] == [3, 1]


def test_marks_that_are_added_tokens_are_generated_as_such() -> None:
    """As Qwen's are: a grammar of their text would match no token."""
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(mark, normalized=False) for mark in ("<tool_call>", "</tool_call>", "<think>", "</think>")]
    )
    added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    guided = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=2)
    request = pb.GenerateRequest(messages=[USER], parse_output=True, tools=[TOOL], tool_choice="f")
    marks = ReasoningMarks("<think>", "</think>", added)
    for before, text in [
        ("<think>\n", 'Hm</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("</think>", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ]:
        _, sampling = plan_output(request, THINKING, PromptEnd(before), marks)
        matcher = llguidance.LLMatcher(guided, sampling.structured.grammar, log_level=0)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert added["<tool_call>"] in ids
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()
