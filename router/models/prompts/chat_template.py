"""Chat templates: rendering of messages, tools and the template's own variables, with their limits."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequest
from engine.media import NUMBER
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.models.prompts.client_texts import ClientTexts
from router.validation import MEDIA_KINDS

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 262_144
MAX_VARIABLES_CHARS = 16_384
MAX_PROMPTS_KEPT = 256
PROBES = (("user",), ("user", "assistant", "user"), ("system", "user"))
"""Roles of chats that show what a template writes."""
PROBED = "hello"
"""Text of chats that show which content a template reads."""
NO_PLACEHOLDERS: Mapping[str, str] = {}
AS_THEY_ARE = ClientTexts(None)
"""Texts in which nothing is hidden."""
CONTINUES = "continue_final_message"
NO_REASONING = "none"
"""Effort that switches reasoning off, where a template knows how."""
log = logging.getLogger(__name__)
WITH_TOOLS = "tool_use"
"""Name of the template for requests with tools, where a model has several."""
_NAMES_TOOLS = re.compile(r"\btools\b")


class ChatTemplate:
    """A model's own template, a program that turns messages into text."""

    def __init__(self, source: str, special_tokens: dict[str, str], source_with_tools: str | None = None) -> None:
        """Compile the template; `source_with_tools` is another one for requests with tools, if the model has it."""
        # Rendering is transformers' own; importing only this part keeps torch out of the router.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        self._source = source
        self._source_with_tools = source_with_tools or source
        self._special_tokens = special_tokens
        self._takes_tools = _NAMES_TOOLS.search(self._source_with_tools) is not None
        self._generation_prompts: dict[str, str] = {}
        """Text after the last message, by the variables that may change it; at most MAX_PROMPTS_KEPT."""
        self._reads: dict[tuple[str, str, str], bool] = {}
        """Whether a source reads the parts of a kind in messages of a role."""

    @classmethod
    def of(cls, model_dir: ModelDir) -> "ChatTemplate | None":
        """Read chat_template.jinja or tokenizer_config.json; None when the model has no template."""
        config = model_dir.read_json("tokenizer_config.json")
        source, with_tools = config.get("chat_template"), None
        if (file := model_dir.path / "chat_template.jinja").exists():
            source = file.read_text()
        if isinstance(source, list):  # several templates by name
            named = {entry["name"]: entry["template"] for entry in source}
            source, with_tools = named.get("default"), named.get(WITH_TOOLS)
        return cls(source, _special_tokens(config), with_tools) if source else None

    @property
    def text(self) -> str:
        """The template's source, of both where there are two."""
        return self._source if self._source_with_tools is self._source else self._source + self._source_with_tools

    def render(
        self,
        request: pb.GenerateRequest,
        texts: ClientTexts = AS_THEY_ARE,
        placeholders: Mapping[str, str] = NO_PLACEHOLDERS,
    ) -> str:
        """Render a request's messages up to where the assistant's answer begins, with what `texts` makes of them.

        `placeholders`: texts that stand for one medium of each kind, for templates that read no parts. Raises
        InvalidRequest for invalid tools or variables, and when the template refuses.
        """
        tools = _read_tools(request.tools)
        if tools and not self._takes_tools:
            raise InvalidRequest("tools", "the model's chat template does not support tools")
        source = self._source_with_tools if tools else self._source
        variables = self._variables(request)
        chat = [_message(message, source) for message in request.messages]
        if request.continue_final_message and request.messages[-1].tool_calls:
            raise InvalidRequest(CONTINUES, "the last message calls tools and has no text to continue")
        if request.continue_final_message and isinstance(chat[-1]["content"], list):
            raise InvalidRequest(
                CONTINUES, "the last message has pictures, sounds or videos, after which nothing goes on"
            )
        chat, tools, variables = texts.hide(chat, tools, variables)
        self._shape(chat, source, placeholders)
        adds_prompt = not (request.continue_final_message or request.no_generation_prompt)
        continues = request.continue_final_message
        try:
            try:
                return self._rendered(chat, tools, source, adds_prompt, variables, continues)
            except Exception:  # many templates read arguments of calls as objects only
                if not _wrap_texts(chat):
                    raise
                return self._rendered(chat, tools, source, adds_prompt, variables, continues)
        except ValueError as error:
            if continues:
                reason = "the model's chat template changes the end of the last message, so it cannot go on"
                raise InvalidRequest(CONTINUES, reason) from error
            raise _refused(error) from error
        except Exception as error:  # a template is a program and may raise anything
            raise _refused(error) from error

    def begun_answer(self, request: pb.GenerateRequest, opening: str, texts: ClientTexts = AS_THEY_ARE) -> str:
        """Return what a prompt that continues its last message has of the answer: all after the answer's header.

        `opening` is the mark before reasoning, which no header has. Raises InvalidRequest for invalid variables.
        """
        source, variables = self._source_with_tools if request.tools else self._source, self._variables(request)
        (last,), variables = texts.hide([_message(request.messages[-1], source)], variables)
        user, text = {"role": "user", "content": "a"}, str(last["content"])
        self._shape([user, last], source, NO_PLACEHOLDERS)
        try:
            before = self._rendered([user], [], source, False, variables)
            whole = self._rendered([user, last], [], source, False, variables, continues=True)
        except Exception:  # a template may refuse this chat; the text itself is all that is known then
            log.debug("the chat template refuses a chat of two messages", exc_info=True)
            return text
        answer = _beyond(before, whole)
        header = self.generation_prompt(request)
        header = header.partition(opening)[0] if opening else header
        return _beyond(header, answer)

    def generation_prompt(self, request: pb.GenerateRequest) -> str:
        """Return what the template adds for the answer to a user's message, with the request's variables.

        Raises InvalidRequest for invalid variables.
        """
        variables = self._variables(request)
        key = json.dumps([bool(request.tools), variables], sort_keys=True)
        known = self._generation_prompts.get(key)
        if known is None:
            known = self._generation_prompt(variables, bool(request.tools))
            if len(self._generation_prompts) >= MAX_PROMPTS_KEPT:
                self._generation_prompts.clear()
            self._generation_prompts[key] = known
        return known

    def shown(self) -> str:
        """Return what the template writes around some small chats without tools, those that it takes."""
        texts = []
        for roles in PROBES:
            chat: list[dict[str, Any]] = [{"role": role, "content": "a"} for role in roles]
            self._shape(chat, self._source, NO_PLACEHOLDERS)
            try:
                texts.append(self._rendered(chat, [], self._source, True, {}))
            except Exception:  # many templates refuse some of these
                log.debug("the chat template refuses a chat of %s", ", ".join(roles), exc_info=True)
        media = self._probed("user", [_written_part(kind) for kind in MEDIA_KINDS], self._source)
        texts.append("" if _PART in media else media)
        return "\n".join(texts)

    def _shape(self, chat: list[dict[str, Any]], source: str, placeholders: Mapping[str, str]) -> None:
        """Give each message's content the form that the template reads: parts, or one text with placeholders."""
        reads_strings = self._reads_strings(source)
        before: Counter[str] = Counter()
        for message in chat:
            content = message["content"]
            if isinstance(content, str):
                if content and not reads_strings:
                    message["content"] = [_written_part("text", content)]
                continue
            role = message["role"]
            if not all(self._reads_parts(source, role, part["type"]) for part in content if part["type"] != "text"):
                text = _with_placeholders(content, placeholders, before)
                message["content"] = text if reads_strings else [_written_part("text", text)]

    def _reads_strings(self, source: str) -> bool:
        """Return whether the template reads a content that is a text; some read lists of parts only."""
        return self._known((source, "user", ""), lambda: self._finds_out_strings(source))

    def _finds_out_strings(self, source: str) -> bool:
        as_part = self._probed("user", [_written_part("text", PROBED)], source)
        return PROBED in self._probed("user", PROBED, source) or PROBED not in as_part or _PART in as_part

    def _reads_parts(self, source: str, role: str, kind: str) -> bool:
        """Return whether the template reads parts of this kind in messages of a role."""
        role = role if role in _ROLES else "user"
        return self._known((source, role, kind), lambda: self._finds_out_parts(source, role, kind))

    def _finds_out_parts(self, source: str, role: str, kind: str) -> bool:
        text = _written_part("text", PROBED)
        without, has = (self._probed(role, parts, source) for parts in ([text], [_written_part(kind), text]))
        return PROBED in has and without != has and _PART not in has

    def _known(self, key: tuple[str, str, str], find_out: Callable[[], bool]) -> bool:
        known = self._reads.get(key)
        if known is None:
            known = self._reads[key] = find_out()
        return known

    def _probed(self, role: str, content: Any, source: str) -> str:
        """Return a small chat with a message of this content and role; empty where the template refuses it."""
        message, user = {"role": role, "content": content}, {"role": "user", "content": "a"}
        chat: list[dict[str, Any]] = [message] if role == "user" else [user, message]
        if role in ("system", "developer"):
            chat = [message, user]
        elif role == "tool":
            function = {"name": "f", "arguments": {}}
            call = {"id": "c", "type": "function", "function": function}
            chat = [user, {"role": "assistant", "content": "", "tool_calls": [call]}, message | {"tool_call_id": "c"}]
        try:
            return self._rendered(chat, [], source, False, {})
        except Exception:
            log.debug("the chat template refuses a content of a %s", role, exc_info=True)
            return ""

    def _generation_prompt(self, variables: dict[str, Any], has_tools: bool) -> str:
        source = self._source_with_tools if has_tools else self._source
        chat: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        self._shape(chat, source, NO_PLACEHOLDERS)
        try:
            before, whole = (self._rendered(chat, [], source, adds, variables) for adds in (False, True))
        except Exception:  # a template may refuse this chat, and then says nothing about reasoning
            log.debug("the chat template refuses a chat of one message", exc_info=True)
            return ""
        return whole.removeprefix(before)

    def _rendered(
        self,
        chat: list[dict[str, Any]],
        tools: list[Any],
        source: str,
        adds_prompt: bool,
        variables: dict[str, Any],
        continues: bool = False,
    ) -> str:
        rendered, _ = self._render(
            conversations=[chat],
            tools=tools or None,
            chat_template=source,
            add_generation_prompt=adds_prompt,
            continue_final_message=continues,
            **self._special_tokens,
            **variables,
        )
        text: str = rendered[0]
        return text

    def _variables(self, request: pb.GenerateRequest) -> dict[str, Any]:
        """Return the template's variables: those of the effort to reason, and the request's own."""
        variables = self._read_variables(request.chat_template_kwargs)
        effort = request.reasoning_effort
        if not effort:
            return variables
        off = {"enable_thinking": False, "thinking": False} if effort == NO_REASONING else {}
        return {"reasoning_effort": effort, **off, **variables}

    def _read_variables(self, text: str) -> dict[str, Any]:
        if not text:
            return {}
        field = "chat_template_kwargs"
        if len(text) > MAX_VARIABLES_CHARS:
            raise InvalidRequest(field, f"at most {MAX_VARIABLES_CHARS} characters, not {len(text)}")
        variables = _object(text, field)
        for name in variables:
            if name in _OURS or name in self._special_tokens:
                raise InvalidRequest(field, f"{name!r} cannot be set by a request")
        return variables


def _beyond(known: str, text: str) -> str:
    """Return a text from where it differs from a known one."""
    pairs = enumerate(zip(known, text, strict=False))
    return text[next((place for place, (one, other) in pairs if one != other), min(len(known), len(text))) :]


def _refused(error: Exception) -> InvalidRequest:
    return InvalidRequest("messages", f"the model's chat template refuses them: {error}")


_OURS = frozenset(
    (
        "messages",
        "conversations",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    )
)
"""Variable names reserved by the renderer."""


def check_chat_fields(request: pb.GenerateRequest) -> None:
    """Check fields that only a chat template uses.

    Raises InvalidRequest where the prompt is no chat, or has no tools to choose from.
    """
    if not request.tools:
        for field in ("tool_choice", "single_tool_call"):
            if getattr(request, field) not in ("", False, "none", "auto"):
                raise InvalidRequest(field, "needs tools")
    if request.messages:
        if request.stream_tool_calls and not request.parse_output:
            raise InvalidRequest("stream_tool_calls", "needs parse_output")
        return
    for field in (
        "stream_tool_calls",
        "tools",
        "chat_template_kwargs",
        "parse_output",
        "reasoning_effort",
        CONTINUES,
        "no_generation_prompt",
    ):
        if getattr(request, field):
            raise InvalidRequest(field, "needs messages")


def chars_of(request: pb.GenerateRequest) -> int:
    """Estimate the number of characters that a template makes of the messages and tools."""
    calls = sum(len(call.name) + len(call.arguments) for message in request.messages for call in message.tool_calls)
    texts = sum(len(message.content) + len(message.reasoning) for message in request.messages)
    parts = sum(len(part.text) for message in request.messages if message.parts for part in message.parts)
    return calls + texts + parts + sum(map(len, request.tools))


def _read_tools(texts: Sequence[str]) -> list[dict[str, Any]]:
    if len(texts) > MAX_TOOLS:
        raise InvalidRequest("tools", f"at most {MAX_TOOLS} tools, not {len(texts)}")
    if (chars := sum(map(len, texts))) > MAX_TOOLS_CHARS:
        raise InvalidRequest("tools", f"at most {MAX_TOOLS_CHARS} characters together, not {chars}")
    return [_object(text, f"tools[{number}]") for number, text in enumerate(texts)]


def _message(message: pb.ChatMessage, source: str) -> dict[str, Any]:
    """Return a message as templates expect it, without unset fields, since templates test for their presence."""
    role = "system" if message.role == "developer" and "developer" not in source else message.role
    seen: dict[str, Any] = {"role": role, "content": _content(message) if message.parts else message.content}
    if message.name:
        seen["name"] = message.name
    if message.tool_call_id:
        seen["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        seen["reasoning_content"] = message.reasoning
    if message.tool_calls:
        seen["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return seen


def _content(message: pb.ChatMessage) -> str | list[dict[str, str]]:
    """Return a message's parts as templates expect them; their joined text where all of them are texts."""
    if all(part.WhichOneof("part") == "text" for part in message.parts):
        return "".join(part.text for part in message.parts)
    return [
        _written_part("text", part.text) if part.WhichOneof("part") == "text" else _written_part(part.media.kind)
        for part in message.parts
    ]


def _written_part(kind: str, text: str = "") -> dict[str, str]:
    return {"type": kind, "text": text} if kind == "text" else {"type": kind}


_ROLES = ("system", "developer", "user", "assistant", "tool")
_PART = "'type'"
"""Text of a part that a template writes as it is, because it reads no parts."""


def _with_placeholders(
    parts: Sequence[Mapping[str, str]], placeholders: Mapping[str, str], before: Counter[str]
) -> str:
    """Return the parts as one text: a line for each placeholder that the texts do not have yet, then the texts.

    `before` counts the media of earlier messages by kind, and then those of this one, too.
    """
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    wanted: Counter[str] = Counter()
    for part in parts:
        if (kind := part["type"]) != "text":
            before[kind] += 1
            wanted[placeholders[kind].replace(NUMBER, str(before[kind]))] += 1
    missing = [place for place, number in wanted.items() for _ in range(number - text.count(place))]
    return "\n".join([*missing, text])


def _arguments(text: str) -> dict[str, Any] | str:
    """Return a call's arguments as an object, or as text where they are none: a model may have been cut off."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _wrap_texts(chat: Sequence[dict[str, Any]]) -> bool:
    """Make objects of arguments that are texts; return whether there were any."""
    functions = [call["function"] for message in chat for call in message.get("tool_calls", ())]
    texts = [function for function in functions if isinstance(function["arguments"], str)]
    for function in texts:
        function["arguments"] = {"arguments": function["arguments"]}
    return bool(texts)


def _object(text: str, field: str) -> dict[str, Any]:
    """Parse the JSON object in `text`.

    Raises InvalidRequest.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return special tokens that templates may name, given as strings or as objects with `content`."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
