"""Measure the model's tool calls and JSON answers: that forced ones end, and that free ones are right.

python examples/storyteller/evaluate_calls.py [--model tandem/storyteller/model] [--drawn 100]
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance.numpy
import numpy as np
import torch
from calls import CLOSE, OPEN, Asked, function_of, pick_tools, use
from chats import ask
from llguidance import LLMatcher, LLTokenizer
from rich.console import Console
from tales import pick_cast
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from router.models.grammars.forced_calls import Function, call_grammar
from tandem.storyteller import STORYTELLER

MODEL = STORYTELLER
LIMIT = 64
"""Tokens within which a forced answer must end."""
SEED = 1_000_000
"""Seed of the drawn cases: none of the corpus."""
WAYS = ((0.0, 0), (0.7, 1), (0.7, 2), (0.7, 3))
"""Temperature and seed."""
Message = dict[str, Any]


def schema(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object whose keys are all required; a value is a schema or the name of a type."""
    entries = {key: {"type": value} if isinstance(value, str) else value for key, value in properties.items()}
    return {"type": "object", "properties": entries, "required": list(entries)}


def function(name: str, about: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as OpenAI's API takes it."""
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


CITY = schema(city="string") | {"additionalProperties": False}
WEATHER = function("get_weather", "Get the weather in a city.", CITY)
ADD = function("add", "Add two numbers.", schema(a="integer", b="integer"))
STORIES = function("search_stories", "Search the stories.", schema(animal="string", place="string"))
LOCATION = function(
    "get_current_weather",
    "Get the current weather in a given location",
    schema(
        location={"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
        unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
    )
    | {"required": ["location"]},
)
EMAIL = function("send_email", "Send an email to a recipient.", schema(to="string", subject="string", body="string"))
ORDER = function("get_delivery_date", "Get the delivery date for an order.", schema(order_id="integer"))
NAME, AGE = {"title": "Name", "type": "string"}, {"title": "Age", "type": "integer"}
PERSON = {"title": "Person", **schema(name=NAME, age=AGE)}
SAVE = function("Person", "", PERSON)
UNKNOWN = function("frobnicate", "Frobnicates.", schema(zork="string", quux="number", blips="boolean"))

SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "event": schema(name="string", date="string", participants={"type": "array", "items": {"type": "string"}}),
    "nested": schema(user=schema(name="string", address=schema(city="string", zip="string")), ok="boolean"),
    "enum": schema(sentiment={"enum": ["positive", "negative"]}, score="number"),
    "strings": schema(tags={"type": "array", "items": {"type": "string"}}),
    "optional": schema(name="string", nick={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    "unknown": schema(flurb="string", count_of_things="integer", xyz="number"),
    "story": schema(title="string", hero="string", moral="string"),
    "steps": schema(
        steps={"type": "array", "items": schema(explanation="string", output="string")}, final_answer="string"
    ),
    "any object": {"type": "object"},
}
PROMPTS = (
    "Give me a person as JSON.",
    "Alice and Bob are going to a science fair on Friday.",
    "Tell me a story about a fox and a lantern.",
    "Hello!",
)

# A prompt, the tools, and what is to be called with what.
FREE: tuple[tuple[str, Sequence[dict[str, Any]], str, dict[str, Any]], ...] = (
    ("What is the weather in Paris?", [WEATHER], "get_weather", {"city": "Paris"}),
    ("What is the weather like in Boston today?", [LOCATION], "get_current_weather", {"location": "Boston"}),
    ("How is the weather in Reykjavik?", [WEATHER, ADD], "get_weather", {"city": "Reykjavik"}),
    ("Can you check the weather in Ottawa for me?", [ADD, WEATHER], "get_weather", {"city": "Ottawa"}),
    ("Will it rain in Marseille?", [WEATHER, STORIES, ADD], "get_weather", {"city": "Marseille"}),
    ("Add 3 and 5", [ADD], "add", {"a": 3, "b": 5}),
    ("Add 3 and 5.", [WEATHER, ADD], "add", {"a": 3, "b": 5}),
    ("What is 17 plus 42?", [ADD, STORIES], "add", {"a": 17, "b": 42}),
    ("What's 120 + 8?", [ADD], "add", {"a": 120, "b": 8}),
    ("Find a story about a fox in the forest", [STORIES], "search_stories", {"animal": "fox", "place": "forest"}),
    (
        "Find a story about an owl in the library.",
        [STORIES, WEATHER],
        "search_stories",
        {"animal": "owl", "place": "library"},
    ),
    (
        "Is there a story about a bear in the castle?",
        [ADD, STORIES],
        "search_stories",
        {"animal": "bear", "place": "castle"},
    ),
    ("Where is my order 4711?", [ORDER], "get_delivery_date", {"order_id": 4711}),
    ("When will order 982 arrive?", [WEATHER, ORDER], "get_delivery_date", {"order_id": 982}),
    ("Ada is 36 years old.", [SAVE], "Person", {"name": "Ada", "age": 36}),
)
TOLD: tuple[tuple[str, Sequence[dict[str, Any]], str, dict[str, Any], str, str], ...] = (
    ("What is the weather in Paris?", [WEATHER], "get_weather", {"city": "Paris"}, "12 degrees and rainy", "12"),
    ("What is the weather in Oslo?", [WEATHER, ADD], "get_weather", {"city": "Oslo"}, "sunny", "sunny"),
    ("Add 3 and 5.", [ADD], "add", {"a": 3, "b": 5}, "8", "8"),
    ("What is 17 plus 42?", [ADD, STORIES], "add", {"a": 17, "b": 42}, "59", "59"),
    ("Where is order 4711?", [ORDER], "get_delivery_date", {"order_id": 4711}, '{"result": "Friday"}', "Friday"),
    (
        "Find a story about a fox in the forest.",
        [STORIES],
        "search_stories",
        {"animal": "fox", "place": "forest"},
        "The Lost Key",
        "The Lost Key",
    ),
)


@dataclass(frozen=True)
class Answer:
    """Text of an answer, and whether it ended by itself."""

    text: str
    ended: bool
    tokens: int


class Writer:
    """The model, with or without a grammar."""

    def __init__(self, path: Path) -> None:
        """Load a model directory."""
        self._model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        self._end = self._tokenizer.eos_token_id
        self._grammar_tokens = LLTokenizer(self._tokenizer.backend_tokenizer.to_str(), eos_token=self._end)

    def prompt(self, messages: list[Message], tools: Sequence[dict[str, Any]] | None = None) -> str:
        """Return a chat as the model reads it."""
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True
        )
        return text

    def grammar(self, tools: Sequence[dict[str, Any]], single: bool = True) -> str:
        """Return the grammar of a forced call, as the router makes it."""
        functions = [Function(tool["function"]["name"], tool["function"].get("parameters")) for tool in tools]
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        marks = {token.content: number for number, token in added.items()}
        return json.dumps({"grammars": [{"lark_grammar": call_grammar(functions, single, marks)}]})

    @torch.inference_mode()
    def write(
        self, prompt: str, grammar: str | None = None, temperature: float = 0.0, seed: int = 0, limit: int = LIMIT
    ) -> Answer:
        """Return what the model writes after a prompt, within the limit."""
        matcher = LLMatcher(self._grammar_tokens, grammar) if grammar is not None else None
        chance = torch.Generator().manual_seed(seed)
        new = torch.tensor([self._tokenizer.encode(prompt, add_special_tokens=False)])
        cache, written = None, list[int]()
        while len(written) < limit:
            output = self._model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = output.past_key_values, output.logits[0, -1]
            if matcher is not None:
                logits = logits.masked_fill(~self._allowed(matcher, len(logits)), -torch.inf)
            if temperature:
                token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=chance))
            else:
                token = int(logits.argmax())
            written.append(token)
            if token == self._end:
                break
            if matcher is not None:
                assert matcher.consume_token(token), matcher.get_error()
            new = torch.tensor([[token]])
        ended = written[-1] == self._end
        return Answer(self._tokenizer.decode(written, skip_special_tokens=True), ended, len(written))

    @staticmethod
    def _allowed(matcher: LLMatcher, size: int) -> torch.Tensor:
        bits = np.zeros((1, -(-size // 32)), np.int32)
        llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
        return torch.from_numpy(np.unpackbits(bits.view(np.uint8), bitorder="little")[:size].astype(bool))


def calls_in(text: str) -> list[tuple[str, Any]]:
    """Return the names and arguments of an answer's calls; none unless all of them are JSON."""
    try:
        made = [json.loads(call) for call in re.findall(f"{OPEN}\n(.*?)\n{CLOSE}", text, re.DOTALL)]
        return [(call["name"], call["arguments"]) for call in made]
    except (ValueError, KeyError, TypeError):
        return []


def said(content: str) -> list[Message]:
    """Return a chat of one message."""
    return [{"role": "user", "content": content}]


class Count:
    """Count of cases that went well, with those that did not."""

    def __init__(self, name: str, console: Console, verbose: bool) -> None:
        """Begin a count."""
        self._name, self._console, self._verbose = name, console, verbose
        self.good = self.all = 0

    def add(self, good: bool, case: str, text: str) -> None:
        """Count a case."""
        self.good, self.all = self.good + good, self.all + 1
        if not good and self._verbose:
            self._console.print(f"  {self._name}: {case!r}: {text!r}", markup=False, highlight=False)

    def show(self) -> None:
        """Print the count."""
        self._console.print(f"{self._name}: {self.good} of {self.all}", highlight=False)


def drawn(count: int) -> Iterator[tuple[list[dict[str, Any]], Asked]]:
    """Yield tools with a use of one of them, of a seed that is not the corpus's."""
    rng = random.Random(SEED)
    for _ in range(count):
        tools = pick_tools(rng, rng.choice((1, 1, 2, 3)))
        asked = use(rng, rng.choice(tools))
        yield [{"type": "function", "function": function_of(tool)} for tool in tools], asked


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def forced(writer: Writer, count: Count, number: int) -> None:
    """Count forced calls that end and parse within the limit, whatever was said."""
    cases: list[tuple[str, Sequence[dict[str, Any]]]] = [
        (prompt, tools) for asked, tools, *_ in FREE for prompt in (asked, "Tell me a story about a fox.", "Hello!")
    ]
    cases += [("Frobnicate.", [UNKNOWN]), ("Write to Tom.", [EMAIL]), ("Hi", [UNKNOWN]), ("Tell me more.", [EMAIL])]
    cases += [(asked.text, tools) for tools, asked in drawn(number)]
    for at, (prompt, tools) in enumerate(cases):
        for temperature, seed in WAYS:
            text = writer.prompt(said(prompt), tools)
            answer = writer.write(text, writer.grammar(tools, at % 2 == 0), temperature, seed)
            count.add(answer.ended and len(calls_in(answer.text)) >= 1, prompt, answer.text)


def formats(writer: Writer, count: Count) -> None:
    """Count JSON answers that end and parse within the limit."""
    for name, wanted in SCHEMAS.items():
        for prompt in PROMPTS:
            for temperature, seed in WAYS:
                grammar = LLMatcher.grammar_from_json_schema(json.dumps(wanted))
                answer = writer.write(writer.prompt(said(prompt)), grammar, temperature, seed)
                count.add(answer.ended and is_json(answer.text), f"{name}, {prompt}", answer.text)


def free(writer: Writer, right: Count, copied: Count, cases: Sequence[tuple[str, Any, str, dict[str, Any]]]) -> None:
    """Count free calls of the right tool, and those whose arguments are what the prompt says."""
    for prompt, tools, name, arguments in cases:
        answer = writer.write(writer.prompt(said(prompt), tools), limit=2 * LIMIT)
        made = calls_in(answer.text)
        good = [called for called, _ in made] == [name] and isinstance(made[0][1], dict)
        right.add(good, prompt, answer.text)
        copied.add(good and arguments.items() <= made[0][1].items(), prompt, answer.text)


def stories(writer: Writer, count: Count, number: int) -> None:
    """Count requests for a story that get one, though there are tools."""
    rng = random.Random(SEED)
    for tools, _ in drawn(number):
        prompt, _ = ask(rng, pick_cast(rng))
        answer = writer.write(writer.prompt(said(prompt), tools), limit=12)
        count.add(OPEN not in answer.text and not answer.text.startswith("{"), prompt, answer.text)


def told(writer: Writer, count: Count) -> None:
    """Count answers after a tool's result that contain it."""
    for prompt, tools, name, arguments, result, needed in TOLD:
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [*said(prompt), {"role": "assistant", "content": "", "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": "1", "content": result})
        answer = writer.write(writer.prompt(messages, tools))
        count.add(answer.ended and needed in answer.text and OPEN not in answer.text, prompt, answer.text)


def drawn_free(number: int) -> list[tuple[str, Any, str, dict[str, Any]]]:
    """Return drawn cases, with the arguments that their prompts mention."""
    cases = []
    for tools, asked in drawn(number):
        known = {key: value for key, value in asked.arguments.items() if str(value).lower() in asked.text.lower()}
        cases.append((asked.text, tools, asked.tool.name, known))
    return cases


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description="Measure the storyteller's calls and JSON answers.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument(
        "--drawn", type=int, default=100, help="number of cases, drawn from the corpus's grammar with another seed"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--verbose", action="store_true", help="print what went wrong")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    writer = Writer(args.model)
    names = (
        f"forced calls that end and parse within {LIMIT} tokens",
        f"JSON answers that do, of {len(SCHEMAS)} schemas",
        "free calls of the right tool, by hand",
        "  with the prompt's arguments",
        "free calls of the right tool, drawn",
        "  with the prompt's arguments",
        "stories told though there are tools",
        "answers that tell a tool's result",
    )
    counts = [Count(name, console, args.verbose) for name in names]
    free(writer, counts[2], counts[3], FREE)
    free(writer, counts[4], counts[5], drawn_free(args.drawn))
    told(writer, counts[7])
    stories(writer, counts[6], args.drawn)
    formats(writer, counts[1])
    forced(writer, counts[0], args.drawn // 4)
    for count in counts:
        count.show()


if __name__ == "__main__":
    main()
