"""Conversion of documents to token ids: the byte-level tokenizer, its chat template, and packed training rows."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator

from calls import CLOSE, OPEN, listed_words
from grammar import Document, call_documents, call_drills, long_documents, short_documents
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = [BEGIN, END, PAD, *(f"<|{role}|>" for role in ROLES)]
PIECES = 250
"""Tokens made for parts of words; the other tokens are whole words."""
LISTED = 50
"""Weight of words that calls copy from sentences: they are tokens with a space before them and without."""
SPACE = "\u0120"
"""A space in the alphabet of byte-level tokenizers."""
TURN_OF = {"tools": "system", "ask": "user", "forced": "assistant"}
"""Roles in documents that are another role for the model."""
UNLEARNED = {"tools", "tool", "ask", "given"}
"""Roles whose text nobody can predict: only what is copied from it teaches anything."""

# One line per construct, whitespace control everywhere: the rendered prompt holds no stray newline. A prompt
# followed by its reply is a prefix of the next turn's prompt, so a server can reuse the whole cache.
# Tools are one line each, "get_weather(city: string, days?: integer): What it does.", since tokens are few.
CHAT_TEMPLATE = "\n".join(
    (
        "{%- macro fields(schema) -%}",
        "{%- for key, value in schema['properties'].items() -%}",
        "{{- ', ' if not loop.first -}}{{- key + ('' if key in (schema['required'] or []) else '?') + ': ' -}}",
        "{{- type(value) -}}",
        "{%- endfor -%}",
        "{%- endmacro -%}",
        "{%- macro any(schemas) -%}",
        "{%- for each in schemas -%}{{- ' | ' if not loop.first -}}{{- type(each) -}}{%- endfor -%}",
        "{%- endmacro -%}",
        "{%- macro type(schema) -%}",
        "{%- if schema is not mapping -%}any",
        "{%- elif schema['enum'] -%}{{- schema['enum'] | map('tojson') | join(' | ') -}}",
        "{%- elif schema['properties'] is mapping -%}{{- '{' + fields(schema) + '}' -}}",
        "{%- elif schema['items'] is mapping -%}{{- '[' + type(schema['items']) + ']' -}}",
        "{%- elif schema['anyOf'] -%}{{- any(schema['anyOf']) -}}",
        "{%- elif schema['type'] is string -%}{{- schema['type'] -}}",
        "{%- elif schema['type'] -%}{{- schema['type'] | join(' | ') -}}",
        "{%- else -%}any",
        "{%- endif -%}",
        "{%- endmacro -%}",
        "{{- bos_token -}}",
        "{%- if tools -%}",
        "{{- '<|system|>Tools:' -}}",
        "{%- for tool in tools -%}",
        "{%- set function = tool['function'] or tool -%}",
        "{%- set parameters = function['parameters'] -%}",
        "{{- '\\n' + function['name'] + '(' -}}",
        "{%- if parameters is mapping and parameters['properties'] is mapping -%}",
        "{{- fields(parameters) -}}",
        "{%- endif -%}",
        "{{- ')' -}}",
        "{%- if function['description'] -%}{{- ': ' + function['description'] | trim -}}{%- endif -%}",
        "{%- endfor -%}",
        "{{- eos_token -}}",
        "{%- endif -%}",
        "{%- for message in messages -%}",
        "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}",
        "{{- raise_exception('unknown role: ' + message['role']) -}}",
        "{%- endif -%}",
        "{%- set content = message['content'] or '' -%}",
        "{%- if content is not string -%}",
        "{%- set content = content | map(attribute='text') | join -%}",
        "{%- endif -%}",
        "{%- set content = content | trim -%}",
        "{{- '<|' + message['role'] + '|>' + content -}}",
        "{%- for call in message['tool_calls'] or [] -%}",
        "{%- set call = call['function'] or call -%}",
        "{%- set arguments = call['arguments'] -%}",
        "{{- '\\n' if content or not loop.first -}}",
        "{{- '<tool_call>\\n{\"name\": \"' + call['name'] + '\", \"arguments\": ' -}}",
        "{{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' -}}",
        "{%- endfor -%}",
        "{{- eos_token -}}",
        "{%- endfor -%}",
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}",
    )
)


def train_tokenizer(vocab_size: int, seed: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer over bytes: it knows all bytes, and every text survives a round trip.

    Common words are one token each, with a space before them and without. Other words are the same few pieces
    wherever they stand, after a token for the space: to repeat a name is to repeat its tokens. Digits are single.
    """
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    counts = Counter(word for text in _sample(seed) for word, _ in splitter.pre_tokenize_str(text))
    pieces = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL_TOKENS) + 256 + PIECES,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(sorted({word.removeprefix(SPACE) for word in counts}), trainer)
    listed = listed_words()
    learned = json.loads(pieces.to_str())["model"]
    vocab: dict[str, int] = learned["vocab"]
    saved = {
        word: count * (len(pieces.encode(word).ids) - 1) * (LISTED if word.removeprefix(SPACE) in listed else 1)
        for word, count in counts.items()
        if word not in vocab
    }
    for word in sorted(saved, key=lambda word: (-saved[word], word))[: vocab_size - len(vocab) - 2]:
        vocab[word] = len(vocab)
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (OPEN, CLOSE)])
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=SPECIAL_TOKENS[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def _sample(seed: int) -> Iterator[str]:
    """Yield the texts that the tokenizer is made for."""
    documents: Iterable[Document] = itertools.chain(
        itertools.islice(short_documents(seed), 4000),
        itertools.islice(long_documents(seed), 300),
        itertools.islice(call_documents(seed), 12000),
        itertools.islice(call_drills(seed), 3000),
    )
    return (text.replace(OPEN, "").replace(CLOSE, "") for document in documents for _, text in document)


def encode(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[int]:
    """Return the ids of ``document``, exactly as the chat template would render it.

    Ids that are not to be learned are inverted (``~id``): those of UNLEARNED, and the beginning of an answer that a
    client forced, so that the model knows how to go on and does not begin so by itself.
    """
    ids: list[int] = tokenizer.encode(BEGIN, add_special_tokens=False)
    for role, text in document:
        opening = "" if role in ("text", "given") else f"<|{TURN_OF.get(role, role)}|>"
        closing = "" if role == "given" else END
        part: list[int] = tokenizer.encode(f"{opening}{text}{closing}", add_special_tokens=False)
        unlearned = len(part) if role in UNLEARNED else 2 if role == "forced" else 0
        ids += [~token for token in part[:unlearned]] + part[unlearned:]
    return ids


def rows(
    tokenizer: PreTrainedTokenizerFast, first: Iterator[Document], filler: Iterator[Document], length: int
) -> Iterator[list[int]]:
    """Endless training rows of ``length`` ids.

    Every row begins with a whole document, as every prompt will, and is filled up with others, so that all
    positions are trained; what does not fit is cut off.
    """
    for number, document in enumerate(first):
        row = encode(tokenizer, document)
        if number % 20 == 0:
            row = row[1:]  # text completion without a begin token should work too
        while len(row) < length:
            row += encode(tokenizer, next(filler))
        yield row[:length]
