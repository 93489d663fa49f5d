"""Tool calls and JSON answers: made-up tools, what people ask of them, their calls, results and answers."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from chats import Message, ask, conversation, small_talk
from tales import pick_cast
from words import capital, invented_word, load, with_article

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_CORPUS = load("calls")
_VALUES: dict[str, list[str]] = _CORPUS["values"]
_KEYS: dict[str, list[str]] = _CORPUS["keys"]
_CHOICES: dict[str, list[str]] = _CORPUS["choices"]
_MADE_UP: dict[str, list[str]] = _CORPUS["made_up"]
_TOOLS: list[dict[str, Any]] = _CORPUS["tools"]
_WEIGHTS = [entry.get("weight", 1) for entry in _TOOLS]
_JSON: dict[str, list[str]] = _CORPUS["json"]
_SHAPES: dict[str, list[str]] = _CORPUS["shapes"]
_PHRASES = load("phrases")
_WORDS = load("words")
_VALUES["animal"] = _WORDS["animals"][:50] + _WORDS["folk"][:12]
_VALUES["person"] = _WORDS["she_names"] + _WORDS["he_names"]

# A kind of value in brackets is a list of such values.
_TYPES = {"small": "integer", "count": "integer", "large": "integer", "decimal": "number", "flag": "boolean"}
_COPIED = ("city", "animal", "place", "person", "food", "word", "title", "job", "country")


class Word(str):
    """A value in a sentence; ``a`` puts an article in front."""

    @property
    def a(self) -> str:
        return with_article(self)


def value_of(rng: random.Random, kind: str) -> Any:
    """Return a random value of a kind; some are words in no list, so that the model learns to copy."""
    if kind.startswith("["):
        return [value_of(rng, kind[1:-1]) for _ in range(rng.choice((1, 2, 2, 3)))]
    if kind in _CHOICES and kind not in _VALUES:
        return rng.choice(_CHOICES[kind])
    if kind == "small":
        return rng.randint(1, rng.choice((9, 20, 99)))
    if kind == "count":
        return rng.randint(0, rng.choice((9, 9, 20, 99, 999)))
    if kind == "large":
        return rng.randint(1, rng.choice((99, 999, 2030, 9999)))
    if kind == "decimal":
        return rng.randint(1, rng.choice((9, 99, 999))) / 10
    if kind == "flag":
        return rng.random() < 0.6
    if kind == "date":
        return f"20{rng.randint(20, 30)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if kind == "time":
        return f"{rng.randint(0, 23):02}:{rng.choice((0, 0, 15, 30, 45)):02}"
    if kind == "email":
        return f"{rng.choice(_VALUES['person']).lower()}@{invented_word(rng)}.org"
    if kind == "number":
        return rng.randint(1, 99)
    if kind == "invented" or (kind in _COPIED and rng.random() < 0.06):
        word = invented_word(rng) + rng.choice(("", "", invented_word(rng)))
        return capital(word) if kind in ("city", "person", "country", "title") else word
    return rng.choice(_VALUES[kind])


def listed_words() -> set[str]:
    """Return the words of the values that people name most, which calls copy from sentences."""
    kinds = ("city", "animal", "person", "place", "food", "color", "word", "language", "day")
    return {word for kind in kinds for value in _VALUES[kind] for word in value.split()}


@dataclass(frozen=True)
class Key:
    """A key of an object: its name, and the kind of its value or its own keys."""

    name: str
    kind: str
    nested: tuple[Key, ...] = ()
    choices: tuple[str, ...] = ()
    required: bool = True

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the value."""
        if self.nested:
            return schema_of(self.nested)
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        if self.kind.startswith("["):
            return {"type": "array", "items": {"type": _TYPES.get(self.kind[1:-1], "string")}}
        return {"type": _TYPES.get(self.kind, "string")}

    def value(self, rng: random.Random) -> Any:
        """Return a random value; of choices usually the first."""
        if self.nested:
            return {key.name: key.value(rng) for key in self.nested}
        if self.choices:
            return self.choices[0] if rng.random() < 0.8 else rng.choice(self.choices)
        return value_of(rng, self.kind)


def schema_of(keys: tuple[Key, ...]) -> dict[str, Any]:
    """Return the JSON schema of an object."""
    required = [key.name for key in keys if key.required]
    return {"type": "object", "properties": {key.name: key.schema() for key in keys}, "required": required}


@dataclass(frozen=True)
class Tool:
    """A function that may be called, and how people ask for it."""

    name: str
    about: str
    keys: tuple[Key, ...]
    slots: tuple[str, ...]
    """Names of the first keys in the texts of ``entry``; none for a tool that is made up."""
    entry: dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One use of a tool: what a person says, and the call that follows."""

    tool: Tool
    text: str
    arguments: dict[str, Any]
    slots: dict[str, Any]


def signature(function: dict[str, Any]) -> str:
    """Return the line that stands for a function, as the chat template makes it."""
    about = function.get("description") or ""
    return f"{function['name']}({_fields(function.get('parameters') or {})})" + (f": {about}" if about else "")


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    pairs = schema.get("properties", {}).items()
    return ", ".join(f"{key}{'' if key in required else '?'}: {_type(value)}" for key, value in pairs)


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in schema["enum"])
    if "properties" in schema:
        return "{" + _fields(schema) + "}"
    return f"[{_type(schema['items'])}]" if "items" in schema else schema["type"]


def function_of(tool: Tool) -> dict[str, Any]:
    """Return a tool as OpenAI's API describes it, without the outer object."""
    return {"name": tool.name, "description": tool.about, "parameters": schema_of(tool.keys)}


def listing(tools: list[Tool]) -> str:
    """Return the turn that tells of the tools."""
    return "\n".join(["Tools:", *(signature(function_of(tool)) for tool in tools)])


def written(name: str, arguments: dict[str, Any]) -> str:
    """Return a call in the form of Hermes and Qwen."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{call}\n{CLOSE}"


def _key_name(rng: random.Random, kind: str) -> str:
    if rng.random() < 0.06:
        return "_".join(invented_word(rng) for _ in range(rng.choice((1, 1, 2))))
    return rng.choice(_KEYS[kind.strip("[]")])


def _free_keys(rng: random.Random, count: int, *, nest: float) -> tuple[Key, ...]:
    keys: dict[str, Key] = {}
    while len(keys) < count:
        kind = rng.choice(list(_KEYS))
        roll = rng.random()
        if roll < nest:
            name = rng.choice((*_SHAPES, invented_word(rng)))
            keys[name] = Key(name, "", _free_keys(rng, rng.choice((1, 2)), nest=0))
        elif roll < nest + 0.1 and kind not in ("flag", "sentence"):
            name = _key_name(rng, kind) + "s"
            keys[name] = Key(name, f"[{kind}]")
        elif roll < nest + 0.2:
            name = rng.choice(list(_CHOICES))
            keys[name] = Key(name, "", choices=_shuffled(rng, _CHOICES[name]))
        else:
            name = _key_name(rng, kind)
            keys[name] = Key(name, kind)
    return tuple(keys.values())


def _shuffled(rng: random.Random, choices: list[str]) -> tuple[str, ...]:
    return tuple(rng.sample(choices, len(choices)))


def _made_up_name(rng: random.Random) -> tuple[str, str]:
    """Return the name and description of a tool."""
    if rng.random() < 0.12:
        name = "_".join(invented_word(rng) for _ in range(rng.choice((1, 2))))
        return name, rng.choice(("", f"{capital(invented_word(rng))} something."))
    verb, noun = rng.choice(_MADE_UP["verbs"]), rng.choice(_MADE_UP["nouns"])
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", verb + capital(noun)))
    return name, rng.choice((f"{capital(verb)} {with_article(noun)}.", "")).replace("_", " ")


def pick_tool(rng: random.Random, *, invent: float = 0.0) -> Tool:
    """Return a random tool, one in three made up; ``invent`` makes more of them so, and more of the names."""
    if rng.random() < 0.25 + invent / 2:
        name, about = _made_up_name(rng)
        return Tool(name, about, _free_keys(rng, rng.choice((0, 1, 1, 2, 2, 3)), nest=0.06), (), {})
    entry = rng.choices(_TOOLS, _WEIGHTS)[0]
    column = rng.randrange(100)
    keys = []
    for slot in entry["slots"].values():
        kind, _, names = slot.partition("=")
        listed = names.split("|") if names else _KEYS[kind]
        keys.append(Key(listed[column % len(listed)], kind))
    if len({key.name for key in keys}) < len(keys) or rng.random() < 0.06 + invent / 2:
        keys = [Key(f"{invented_word(rng)}{number}", key.kind) for number, key in enumerate(keys)]
    roll = rng.random()
    if roll < 0.22:
        name = rng.choice([name for name in _CHOICES if name not in {key.name for key in keys}])
        keys.append(Key(name, "", choices=_shuffled(rng, _CHOICES[name]), required=roll < 0.12))
    elif roll < 0.28 and "limit" not in {key.name for key in keys}:
        keys.append(Key("limit", "small", required=False))
    name, about = rng.choice(entry["names"]), rng.choice(entry["about"])
    if rng.random() < 0.1 + invent:
        name, _ = _made_up_name(rng)
    return Tool(name, about, tuple(keys), tuple(entry["slots"]), entry)


def pick_tools(rng: random.Random, count: int, *, invent: float = 0.0) -> list[Tool]:
    """Return random tools, so many at most: no two have the same name."""
    return list({tool.name: tool for tool in (pick_tool(rng, invent=invent) for _ in range(count))}.values())


def _pairs(rng: random.Random, arguments: dict[str, Any]) -> str:
    """Return keys and values as a person writes them."""
    between = rng.choice((" ", " ", "=", ": ", " = ", " is "))
    spaced = rng.random() < 0.5
    texts = [f"{key.replace('_', ' ') if spaced else key}{between}{_spoken(value)}" for key, value in arguments.items()]
    return _joined(rng, texts)


def _joined(rng: random.Random, texts: list[str]) -> str:
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])}{rng.choice((' and ', ', '))}{texts[-1]}"


def _spoken(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " and ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_spoken(each)}" for key, each in value.items())
    return str(value)


def use(rng: random.Random, tool: Tool, before: Asked | None = None) -> Asked:
    """Return one use of a tool; with ``before`` it may be asked for in few words."""
    if not tool.entry:
        return _made_up_use(rng, tool)
    arguments = {key.name: key.value(rng) for key in tool.keys if key.required}
    slots: dict[str, Any] = {
        slot: value if isinstance(value := arguments[key.name], int) else Word(value)
        for slot, key in zip(tool.slots, tool.keys, strict=False)
    }
    asks = tool.entry["asks"]
    if before is not None and before.tool is tool and "again" in tool.entry and rng.random() < 0.6:
        asks = tool.entry["again"]
        kept = [slot for slot in tool.slots if not any(f"{{{slot}" in text for text in asks)]
        for slot, key in zip(tool.slots, tool.keys, strict=False):
            if slot in kept:
                slots[slot], arguments[key.name] = before.slots[slot], before.arguments[key.name]
    text = rng.choice(asks).format(**slots)
    extra = tool.keys[len(tool.slots) :]
    if extra and rng.random() < 0.4:
        (key,) = extra
        arguments[key.name] = rng.choice(key.choices) if key.choices else key.value(rng)
        text += rng.choice((" {k}: {v}", " ({k} {v})", " Use {v}.", " With {k} {v}.", " In {v}, please.")).format(
            k=key.name, v=arguments[key.name]
        )
    if rng.random() < 0.05:
        text = text.lower() if all(_spoken(value).islower() for value in arguments.values()) else text
    return Asked(tool, text, arguments, slots)


def _made_up_use(rng: random.Random, tool: Tool) -> Asked:
    arguments = {key.name: key.value(rng) for key in tool.keys}
    about = (tool.about or tool.name.replace("_", " ")).rstrip(".")
    text = rng.choice(_MADE_UP["asks"] if arguments else _MADE_UP["bare_asks"]).format(
        About=capital(about),
        about=about[:1].lower() + about[1:],
        name=tool.name,
        pairs=_pairs(rng, arguments),
        values=_joined(rng, [_spoken(value) for value in arguments.values()]),
    )
    return Asked(tool, text, arguments, {})


def _result(rng: random.Random, asked: Asked) -> tuple[str, str]:
    """Return the result of a call, plain or as JSON, and the sentence that answers with it."""
    entry = asked.tool.entry or _MADE_UP
    kinds = {kind: value_of(rng, kind) for kind in (*_VALUES, "small", "count", "large", "decimal", "date", "time")}
    kinds |= {"number": value_of(rng, "count"), "invented": value_of(rng, "invented")}
    result = rng.choice(entry["results"]).format(**kinds)
    answers = entry["answers"] if asked.slots else _MADE_UP["answers"]
    answer = rng.choice(answers).format(r=result, name=asked.tool.name, **asked.slots)
    shown: object = int(result) if result.isdigit() and result == str(int(result)) else result
    roll = rng.random()
    if roll < 0.15:
        result = json.dumps({rng.choice(("result", "answer", "value", asked.tool.name)): shown})
    elif roll < 0.25:
        result = json.dumps(asked.arguments | {"result": shown}, ensure_ascii=False)
    return result, answer if answer.endswith((".", "!")) else f"{answer}."


def _turns(rng: random.Random, uses: list[Asked], role: str = "assistant") -> list[Message]:
    """Return the messages of calls: what was asked, the calls and, usually, results and answers."""
    calls = "\n".join(written(asked.tool.name, asked.arguments) for asked in uses)
    messages = [("ask", " ".join(asked.text for asked in uses)), (role, calls)]
    if rng.random() < 0.75:
        results = [_result(rng, asked) for asked in uses]
        messages += [("tool", result) for result, _ in results]
        messages.append(("assistant", " ".join(answer for _, answer in results)))
    return messages


def _any_prompt(rng: random.Random) -> str:
    """Return a prompt that asks for no call and no JSON."""
    roll = rng.random()
    if roll < 0.7:
        return ask(rng, pick_cast(rng, invent=0.05))[0]
    return small_talk(rng)[0][0] if roll < 0.9 else str(value_of(rng, "sentence"))


def _forced_call(rng: random.Random, tools: list[Tool]) -> list[Message]:
    """Return a call that nothing in the prompt asks for: a client forced it."""
    tool = rng.choice(tools)
    asked = Asked(tool, _any_prompt(rng), {key.name: key.value(rng) for key in tool.keys if key.required}, {})
    return _turns(rng, [asked], "forced")


def call_chat(rng: random.Random) -> tuple[Message, ...]:
    """Return a chat with tools: calls, mostly, and stories and small talk that need none."""
    tools = pick_tools(rng, rng.choice((1, 1, 2, 2, 2, 3, 4)))
    messages: list[Message] = [("tools", listing(tools))]
    if rng.random() < 0.3:
        messages.append(("system", rng.choice(_PHRASES["system"]["prompts"])))
    roll = rng.random()
    if roll < 0.16:
        request, story = ask(rng, pick_cast(rng, invent=0.08))
        messages += [("user", request), ("assistant", story.text)]
    elif roll < 0.20:
        request, reply = small_talk(rng)[0]
        messages += [("user", request), ("assistant", reply)]
    elif roll < 0.32:
        messages += _forced_call(rng, tools)
    if roll >= 0.32 or rng.random() < 0.2:
        first = use(rng, rng.choice(tools))
        uses = [first] if rng.random() < 0.9 else [first, use(rng, first.tool, first)]
        messages += _turns(rng, uses)
        if messages[-1][0] == "assistant" and rng.random() < 0.35 and OPEN not in messages[-1][1]:
            again = first.tool if rng.random() < 0.6 else rng.choice(tools)
            messages += _turns(rng, [use(rng, again, uses[-1])])
        elif messages[-1][0] == "assistant" and rng.random() < 0.1:
            request, story = ask(rng, pick_cast(rng))
            messages += [("user", request), ("assistant", story.text)]
    return tuple(messages)


def _shape(rng: random.Random) -> tuple[str, tuple[Key, ...]]:
    """Return what an object is, and some of its keys."""
    if rng.random() < 0.4:
        thing = rng.choice((*_MADE_UP["nouns"], invented_word(rng)))
        return thing, _free_keys(rng, rng.choice((1, 2, 2, 3, 4)), nest=0.1)
    thing, listed = rng.choice(list(_SHAPES.items()))
    pairs = [entry.split("=") for entry in listed]
    kept = sorted(rng.sample(range(len(pairs)), rng.randint(1, min(4, len(pairs)))))
    keys = [Key(pairs[at][0], pairs[at][1]) for at in kept]
    if rng.random() < 0.1:
        keys.append(Key(rng.choice(list(_SHAPES)), "", _free_keys(rng, 2, nest=0)))
    return thing, tuple({key.name: key for key in keys}.values())


def json_chat(rng: random.Random) -> tuple[Message, ...]:
    """Return a chat whose last answer is a short JSON object; a third of them were asked for something else."""
    thing, keys = _shape(rng)
    answer = {key.name: key.value(rng) for key in keys}
    messages: list[Message] = []
    roll = rng.random()
    if roll < 0.35:
        if rng.random() < 0.4:
            messages.append(("system", rng.choice(_PHRASES["system"]["prompts"])))
        if rng.random() < 0.15:
            messages += conversation(rng)[-2:]
        return (*messages, ("ask", _any_prompt(rng)), ("forced", json.dumps(answer, ensure_ascii=False)))
    if rng.random() < 0.4:
        messages.append(("system", rng.choice(_JSON["system"])))
    names = [key.name for key in keys]
    text = rng.choice(_JSON["facts"] if roll < 0.65 else _JSON["asks"])
    with_thing = with_article(thing)
    text = text.format(
        a_thing=with_thing, A_thing=capital(with_thing), keys=_joined(rng, names), facts=_pairs(rng, answer).rstrip(".")
    )
    plain = "JSON" in text or any("JSON" in text for _, text in messages)
    return (*messages, ("ask", text), ("assistant" if plain else "forced", json.dumps(answer, ensure_ascii=False)))


def _repetition(rng: random.Random) -> tuple[Message, ...]:
    """Return the same few values again and again, each time in another form."""
    kinds = rng.choices((*_COPIED, "invented", "invented", "small", "count"), k=rng.randint(3, 7))
    values = [value_of(rng, kind) for kind in kinds]
    texts = [str(value) for value in values]
    forms = [
        ", ".join(texts),
        " ".join(texts),
        " and ".join(texts),
        json.dumps(values, ensure_ascii=False),
        json.dumps(texts, ensure_ascii=False),
        "".join(f"\n{text}" for text in texts).strip(),
        " ".join(f'"{text}"' for text in texts),
    ]
    between = rng.choice((": ", "\n", ". ", " = "))
    first, *others = rng.choices(forms, k=rng.choice((2, 3, 3, 4)))
    return (("given", first), ("text", "".join(between + other for other in others)))


def _statements(rng: random.Random) -> tuple[Message, ...]:
    """Return keys with values, as JSON and otherwise, and then some of the values by their keys."""
    keys = _free_keys(rng, rng.choice((2, 3, 4)), nest=0)
    answer = {key.name: key.value(rng) for key in keys}
    forms = [_pairs(rng, answer), json.dumps(answer, ensure_ascii=False), _pairs(rng, answer)]
    asked = [f"{key}? {_spoken(answer[key])}" for key in rng.sample(list(answer), len(answer))]
    first, second = rng.sample(forms, 2)
    return (("given", first), ("text", f"\n{second}\n{' '.join(asked[: rng.randint(0, 3)])}".rstrip("\n")))


def call_drill(rng: random.Random) -> tuple[Message, ...]:
    """Return a few lines that copy names and values into JSON."""
    roll = rng.random()
    if roll < 0.1:
        return _repetition(rng)
    if roll < 0.3:
        return _statements(rng)
    tools = pick_tools(rng, rng.choice((1, 2, 2, 3)), invent=0.1)
    asked = use(rng, rng.choice(tools))
    chat = [("tools", listing(tools)), ("ask", asked.text), ("assistant", written(asked.tool.name, asked.arguments))]
    if rng.random() < 0.25:
        result, answer = _result(rng, asked)
        chat += [("tool", result), ("assistant", answer)]
    return tuple(chat)
