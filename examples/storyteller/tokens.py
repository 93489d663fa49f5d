"""Conversion of documents to token ids: the byte-level tokenizer, its chat template, and packed training rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from grammar import Document, long_documents, short_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [BEGIN, END, PAD, *(f"<|{role}|>" for role in ROLES)]

# One line per construct, whitespace control everywhere: the rendered prompt holds no stray newline. A prompt
# followed by its reply is a prefix of the next turn's prompt, so a server can reuse the whole cache.
CHAT_TEMPLATE = "\n".join(
    (
        "{{- bos_token -}}",
        "{%- for message in messages -%}",
        "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}",
        "{{- raise_exception('unknown role: ' + message['role']) -}}",
        "{%- endif -%}",
        "{%- set content = message['content'] -%}",
        "{%- if content is not string -%}",
        "{%- set content = content | map(attribute='text') | join -%}",
        "{%- endif -%}",
        "{{- '<|' + message['role'] + '|>' + (content | trim) + eos_token -}}",
        "{%- endfor -%}",
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}",
    )
)


def train_tokenizer(vocab_size: int, seed: int) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer over bytes: it knows all bytes, and every text survives a round trip."""
    sample: Iterable[Document] = itertools.chain(
        itertools.islice(short_documents(seed), 6000), itertools.islice(long_documents(seed), 500)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for document in sample for _, text in document), trainer)
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


def encode(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[int]:
    """Return the ids of ``document``, exactly as the chat template would render it."""
    parts = [BEGIN]
    for role, text in document:
        parts.append(f"{text}{END}" if role == "text" else f"<|{role}|>{text}{END}")
    ids: list[int] = tokenizer.encode("".join(parts), add_special_tokens=False)
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
