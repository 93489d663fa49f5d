"""Plan of a request's output: how it is parsed, and the grammar that forces a call. Pure."""

import json
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import InvalidRequest
from engine.sampling.structured_output import FIELD
from protos import inference_pb2 as pb
from router.models.grammars.grammar_checker import CLOSE, Function, ReasoningMarks, after_reasoning, call_grammar
from router.models.output.output_format import OutputFormat, OutputParser

AUTO_CHOICES = ("", "auto")
NO_CALLS = "none"
ANY_CALL = "required"


def forces_call(tool_choice: str) -> bool:
    """Return whether an output can be nothing but tool calls."""
    return tool_choice not in (*AUTO_CHOICES, NO_CALLS)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """Plan for one request's output."""

    format: OutputFormat
    is_parsed: bool = False
    """Whether the client wants the output in parts."""
    parses_calls: bool = False
    is_forced: bool = False
    """Whether the output can be nothing but tool calls."""
    begun: str = ""
    """Text of the answer that the prompt has already, up to where the output begins."""
    tools: tuple[str, ...] = ()
    """The request's tools, as JSON."""
    parsers: list[OutputParser] = field(default_factory=list)
    """Parsers of choices that were made."""

    def parser(self) -> OutputParser | None:
        """Return a parser for one choice; None where the output is text, or is not parsed."""
        if not self.is_parsed:
            return None
        parser = self.format.parser(self.parses_calls, self.begun, self.tools, self.is_forced)
        if parser is not None:
            self.parsers.append(parser)
        return parser

    @property
    def num_reasoning(self) -> int:
        """Tokens within reasoning of all choices, as far as they were parsed."""
        return sum(parser.num_reasoning for parser in self.parsers)


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """End of a chat's prompt."""

    generation_prompt: str = ""
    """Text that the template adds for a new answer."""
    begun_answer: str = ""
    """Text that the prompt has of an answer that goes on."""


def plan_output(
    request: pb.GenerateRequest, format_: OutputFormat, end: PromptEnd, marks: ReasoningMarks
) -> tuple[OutputPlan, pb.Sampling]:
    """Return the plan, and the request's options with what the plan needs.

    Raises InvalidRequest for a choice of tools that means nothing.
    """
    sampling = pb.Sampling()
    sampling.CopyFrom(request.sampling)
    if not (request.messages or request.tools or request.tool_choice or request.parse_output):
        return OutputPlan(format_), sampling
    if continues := request.continue_final_message:
        begins = format_.is_in_reasoning(end.begun_answer)
    else:
        begins = format_.opens_reasoning(end.generation_prompt)
    is_forced = forces_call(request.tool_choice)
    parses_calls = bool(request.tools) and request.tool_choice != NO_CALLS
    if is_forced:
        _force_call(request, sampling, marks)
    elif parses_calls and request.single_tool_call and format_.calls == "hermes":
        sampling.stop.append(CLOSE)  # nothing follows the first call
    may_begin = not continues and marks.closing not in end.generation_prompt
    may_reason = format_.has_reasoning and (begins or may_begin)
    if request.messages and sampling.HasField("structured") and may_reason and marks.closing:
        sampling.structured.CopyFrom(after_reasoning(sampling.structured, marks, begins))
    begun = end.begun_answer if continues else format_.reasoning_marks[0] if begins else ""
    plan = OutputPlan(format_, request.parse_output, parses_calls, is_forced, begun, tuple(request.tools))
    if request.parse_output and format_.keeps_special_tokens:
        sampling.keep_special_tokens = True
    return plan, sampling


def _force_call(request: pb.GenerateRequest, sampling: pb.Sampling, marks: ReasoningMarks) -> None:
    """Hold the output to calls of the chosen tools."""
    if sampling.HasField("structured"):
        raise InvalidRequest("tool_choice", f"cannot be combined with {FIELD}: each sets the form of the output")
    functions = [_function(tool, number) for number, tool in enumerate(request.tools)]
    any_call = request.tool_choice == ANY_CALL
    wanted = [function for function in functions if any_call or function.name == request.tool_choice]
    if not wanted:
        raise InvalidRequest("tool_choice", f"{request.tool_choice!r} is not among the tools")
    sampling.structured.grammar = call_grammar(wanted, request.single_tool_call or not any_call, marks.added_tokens)


def _function(text: str, number: int) -> Function:
    field = f"tools[{number}]"
    try:
        tool: Any = json.loads(text)
        function = tool["function"]
        name, parameters = function["name"], function.get("parameters")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise InvalidRequest(field, "must be a JSON object with function.name for a call of it to be forced") from None
    if not isinstance(name, str) or not isinstance(parameters, dict | None):
        raise InvalidRequest(field, "function.name must be a string, and function.parameters an object")
    kinds = "object" if parameters is None else parameters.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        message = "must be object: arguments of a call that is forced have names"
        raise InvalidRequest(f"{field}.function.parameters.type", message)
    return Function(name, None if parameters is None else parameters | {"type": "object"})
