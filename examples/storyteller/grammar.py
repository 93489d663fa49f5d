"""The corpus: drills, stories, conversations, calls and long village prompts, endless and in a fixed order per seed.

``python examples/storyteller/grammar.py --count 5`` prints a few documents to look at.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

from calls import call_chat, call_drill, json_chat
from chats import Message, conversation
from lore import village_chat
from tales import pick_cast, pick_plot, prose, tell
from words import load

# A document is a conversation, or one message with the role "text": a story with no chat around it. Other roles:
# "tools" is a system message that lists them, "ask" a user's that nobody can predict, "given" such a beginning of a
# text, and "forced" an assistant's answer that only a client's grammar begins so.
Document = tuple[Message, ...]


def drills(seed: int) -> Iterator[Document]:
    """Return documents of a few lines, which teach the model to repeat earlier text."""
    rng = random.Random(f"drills {seed}")
    templates: list[str] = load("drills")["drills"]
    while True:
        yield (("text", prose(rng, rng.choice(templates), pick_cast(rng, invent=0.1))),)


def short_documents(seed: int) -> Iterator[Document]:
    """Plain stories and conversations, a few hundred tokens each."""
    rng = random.Random(f"short {seed}")
    while True:
        if rng.random() < 0.22:
            yield (("text", tell(rng, pick_cast(rng, invent=0.03), pick_plot(rng)).text),)
        else:
            yield conversation(rng)


def long_documents(seed: int) -> Iterator[Document]:
    """Conversations behind a long system prompt, up to about a thousand tokens each."""
    rng = random.Random(f"long {seed}")
    while True:
        yield village_chat(rng)


def call_drills(seed: int) -> Iterator[Document]:
    """Return documents of a few lines, which teach the model to copy names and values into JSON."""
    rng = random.Random(f"call drills {seed}")
    while True:
        yield call_drill(rng)


def call_documents(seed: int) -> Iterator[Document]:
    """Conversations with tools, and answers in JSON, a hundred tokens each."""
    rng = random.Random(f"calls {seed}")
    while True:
        yield call_chat(rng) if rng.random() < 0.7 else json_chat(rng)


def main() -> None:
    """Print documents of every kind."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for stream in (kind(args.seed) for kind in (drills, call_drills, short_documents, call_documents, long_documents)):
        for _ in range(args.count):
            print("\n".join(f"<{role}> {text}" for role, text in next(stream)), end="\n\n----\n\n")


if __name__ == "__main__":
    main()
