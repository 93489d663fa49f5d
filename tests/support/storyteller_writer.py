"""The demo model, written with by hand: forced calls, JSON answers and free calls."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llguidance.numpy
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from router.models.grammars.grammar_checker import Function, call_grammar
from tandem.storyteller import STORYTELLER

LIMIT = 64
"""Tokens within which a forced answer must end."""
OPEN, CLOSE = "<tool_call>", "</tool_call>"
Message = dict[str, Any]


def schema(**properties: Any) -> dict[str, Any]:
    """The schema of an object whose keys are all required; a value is a schema or the name of a type."""
    entries = {key: {"type": value} if isinstance(value, str) else value for key, value in properties.items()}
    return {"type": "object", "properties": entries, "required": list(entries)}


def function(name: str, about: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI's API takes it."""
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


WEATHER = function("get_weather", "Get the weather in a city.", schema(city="string") | {"additionalProperties": False})
ADD = function("add", "Add two numbers.", schema(a="integer", b="integer"))
STORIES = function("search_stories", "Search the stories.", schema(animal="string", place="string"))
NAME, AGE = {"title": "Name", "type": "string"}, {"title": "Age", "type": "integer"}
PERSON = {"title": "Person", **schema(name=NAME, age=AGE)}


@dataclass(frozen=True)
class Answer:
    """Text of an answer, and whether it ended by itself."""

    text: str
    ended: bool
    tokens: int


class Writer:
    """The model, with or without a grammar."""

    def __init__(self) -> None:
        self._model = LlamaForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32).eval()
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(STORYTELLER)
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
