"""Loading the hand-written grammar, and the small value types its templates read.

Templates mention a character as ``{h}``, ``{h.he}`` or ``{h.a}``; keeping pronouns and articles on the value
itself is what keeps them consistent from the first sentence of a story to the last follow-up question.
"""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


def load(name: str) -> dict[str, Any]:
    """One file of the grammar, from the ``corpus`` folder beside this module."""
    path = Path(__file__).parent / "corpus" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


_WORDS = load("words")
_THINGS: dict[str, list[str]] = _WORDS["things"]
VILLAGES: list[str] = _WORDS["villages"]
CATEGORY = {noun: category for category, nouns in _THINGS.items() for noun in nouns}
SOUND_VERBS = {"bell": "rang", "drum": "beat", "whistle": "blew", "horn": "blew", "trumpet": "blew"}
# Objects without a use of their own are many, so their category comes up more often.
_CATEGORIES = (*_THINGS, "charm", "charm", "charm", "light", "sound", "food")

_ONSETS = (
    "b",
    "br",
    "c",
    "cl",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "qu",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
_VOWELS = ("a", "e", "i", "o", "u", "oo", "ee")
_CODAS = ("b", "d", "l", "m", "mp", "n", "nd", "r", "rn", "sh", "x", "zz")
_SOUNDS_OTHERWISE = {"hourglass": "an", "honest": "an", "unicorn": "a", "unicycle": "a", "ukulele": "a"}


def with_article(phrase: str) -> str:
    """``phrase`` behind "a" or "an"."""
    first = phrase.split()[0].lower()
    article = _SOUNDS_OTHERWISE.get(first, "an" if first[0] in "aeiou" else "a")
    return f"{article} {phrase}"


def capital(text: str) -> str:
    """``text`` with its first letter (and nothing else) in upper case."""
    return text[:1].upper() + text[1:]


def invented_word(rng: random.Random) -> str:
    """Return a word in no list: requests that use one teach the model to copy whatever a reader asks for."""
    middle = rng.choice(_VOWELS) + rng.choice(_CODAS)
    tail = rng.choice(("", "", "le", "y", "er", "in", "a"))
    return rng.choice(_ONSETS) + middle + tail


@dataclass(frozen=True)
class Person:
    """A character; formats as the name alone."""

    name: str
    kind: str
    trait: str
    she: bool

    def __str__(self) -> str:
        return self.name

    @property
    def he(self) -> str:
        return "she" if self.she else "he"

    @property
    def him(self) -> str:
        return "her" if self.she else "him"

    @property
    def his(self) -> str:
        return "her" if self.she else "his"

    @property
    def himself(self) -> str:
        return "herself" if self.she else "himself"

    @property
    def a(self) -> str:
        return with_article(f"{self.trait} {self.kind}")

    @property
    def a_kind(self) -> str:
        return with_article(self.kind)


@dataclass(frozen=True)
class Thing:
    """An object; ``a`` introduces it with its adjective, ``the`` refers back to it without."""

    noun: str
    adjective: str = ""

    @property
    def category(self) -> str:
        return CATEGORY.get(self.noun, "charm")

    @property
    def full(self) -> str:
        return f"{self.adjective} {self.noun}".strip()

    @property
    def a(self) -> str:
        return with_article(self.full)

    @property
    def the(self) -> str:
        return f"the {self.noun}"

    @property
    def sounded(self) -> str:
        return SOUND_VERBS.get(self.noun, "played")


@dataclass(frozen=True)
class Place:
    """Somewhere: ``at`` with its own preposition, ``to`` for walking there, ``the`` on its own."""

    at: str

    @property
    def the(self) -> str:
        return "the " + self.at.split(" the ", 1)[1]

    @property
    def to(self) -> str:
        return f"to {self.the}"


def pick_person(rng: random.Random, *, avoid: tuple[Person, ...] = (), invent: float = 0.0) -> Person:
    """Return a random character sharing neither name nor kind with those in ``avoid``."""
    she_folk, he_folk = _WORDS["she_folk"], _WORDS["he_folk"]
    names, kinds = {p.name for p in avoid}, {p.kind for p in avoid}
    while True:
        kind = rng.choice(_WORDS["animals"]) if rng.random() < 0.62 else rng.choice(_WORDS["folk"] + she_folk + he_folk)
        she = kind in she_folk or (kind not in he_folk and rng.random() < 0.5)
        name = rng.choice(_WORDS["she_names" if she else "he_names"])
        person = Person(name, kind, rng.choice(_WORDS["traits"]), she)
        if rng.random() < invent:
            person = replace(person, kind=invented_word(rng))
        if rng.random() < invent:
            person = replace(person, name=capital(invented_word(rng)))
        if person.name not in names and person.kind not in kinds:
            return person


def pick_thing(rng: random.Random, *, invent: float = 0.0) -> Thing:
    """Return a random object, a third of the time with an adjective."""
    category = rng.choice(_CATEGORIES)
    noun = invented_word(rng) if rng.random() < invent else rng.choice(_THINGS[category])
    return Thing(noun, rng.choice(_WORDS["adjectives"]) if rng.random() < 0.33 else "")


def pick_place(rng: random.Random, *, avoid: tuple[Place, ...] = (), invent: float = 0.0) -> Place:
    """Return a random place not in ``avoid``."""
    while True:
        at = rng.choice(_WORDS["places"])
        if rng.random() < invent:
            at = f"in the {invented_word(rng)}"
        if at not in {place.at for place in avoid}:
            return Place(at)
