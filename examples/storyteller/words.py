"""Vocabulary of the story grammar, and the small value types the templates read.

Templates mention a character as ``{h}``, ``{h.he}`` or ``{h.a}``; keeping pronouns and articles on the value
itself is what keeps them consistent from the first sentence of a story to the last follow-up question.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

SHE_NAMES = (
    "Juniper Clover Hazel Maple Poppy Tansy Marigold Ivy Fern Willow Primrose Saffron Olive Mabel Tilly"
    " Posy Etta Nell Ada Isla Luna Rosie Bess Minna Opal Pearl Wanda Greta Dora Lucy Alice Ruby Nina Ella"
    " Mira Sofia"
).split()
HE_NAMES = (
    "Pip Moss Alder Rowan Thistle Barley Bracken Tobin Finn Jasper Otis Basil Burdock Cob Hob Digby Ned"
    " Wilf Arlo Gus Milo Oscar Rufus Bram Toby Reed Tom Jack Leo Max Hugo Felix Sam Ben Theo Ravi"
).split()

ANIMALS = (
    "fox owl hare badger hedgehog mouse otter mole crow wren robin heron toad frog squirrel weasel bear"
    " wolf deer goat sheep pony donkey cow pig hen goose duck swan cat dog rabbit beetle bee snail spider"
    " moth cricket ant turtle tortoise seal lion tiger elephant monkey penguin panda parrot raven rat horse"
    " kitten puppy bat lizard camel zebra giraffe sparrow eagle snake fish crab octopus whale butterfly"
    " dinosaur bunny chicken lamb"
).split()
FOLK = (
    "dragon giant troll goblin wizard knight baker miller sailor shepherd tailor clockmaker gardener"
    " painter postman teacher child robot ghost unicorn pirate farmer fairy doctor captain detective"
    " astronaut scientist engineer programmer elf dwarf monster alien snowman scarecrow cook musician poet"
).split()
SHE_FOLK = ("girl", "princess", "queen", "witch", "woman", "grandmother")
HE_FOLK = ("boy", "prince", "king", "fisherman", "man", "grandfather")

TRAITS = (
    "small little young old clever shy brave curious gentle merry quiet proud lazy patient stubborn"
    " cheerful kind lonely hopeful forgetful grumpy sleepy careful"
).split()

# What a thing is good for decides how it can save the day, so that endings follow from beginnings.
THINGS: dict[str, tuple[str, ...]] = {
    "light": ("lantern", "candle", "lamp", "torch"),
    "sound": ("bell", "drum", "flute", "whistle", "horn", "fiddle", "trumpet", "harp"),
    "reach": ("rope", "ladder", "fishing rod", "net", "walking stick"),
    "warm": ("blanket", "cloak", "coat", "shawl", "quilt", "scarf"),
    "brew": ("kettle", "teapot", "cup", "soup pot"),
    "water": ("bucket", "jug", "watering can"),
    "carry": ("basket", "sack", "cart", "wheelbarrow", "wagon"),
    "guide": ("map", "compass", "telescope", "book"),
    "tool": ("hammer", "saw", "spade", "axe"),
    "open": ("key",),
    "food": (
        "pie",
        "loaf of bread",
        "cake",
        "jar of honey",
        "apple",
        "pumpkin",
        "cheese",
        "cookie",
        "sandwich",
        "carrot",
    ),
    "charm": tuple(
        "pebble button shell feather ring mirror kite doll ball hat clock letter flower crown coin box"
        " spoon umbrella teacup acorn marble stone sword boat balloon violin pencil rose treasure star egg"
        " broom wand rocket bicycle guitar camera computer radio puzzle magnet train car pillow painting"
        " diamond".split()
    ),
}
CATEGORY = {noun: category for category, nouns in THINGS.items() for noun in nouns}
SOUND_VERBS = {"bell": "rang", "drum": "beat", "whistle": "blew", "horn": "blew", "trumpet": "blew"}
THING_ADJECTIVES = (
    "red blue green golden silver tiny old wooden rusty magic shiny little big strange beautiful yellow"
).split()

PLACES = (
    "in the old mill|by the river|in the pine forest|on the hill|at the harbour|in the village square|under"
    " the great oak|in the walled garden|by the lighthouse|on the island|in the mountains|in the castle|in"
    " the cave|at the market|on the moor|in the orchard|in the library|by the frozen lake|in the desert|in"
    " the city|on the moon|in the meadow|on the farm|at the railway station|in the tower|by the sea|in the"
    " bakery|in the valley|by the stone bridge|in the deep wood|in the snow|at the edge of the marsh|by the"
    " waterfall|in the jungle|in the village|on the beach|in the forest|in the garden|at the school|in the"
    " old house|by the pond|in the hollow tree|on the windy cliff|in the barn|at the crossroads|in the"
    " kitchen|in the museum|in the attic|in the park|in the town|in the clouds|at the bottom of the sea|in"
    " the rain|at the hospital"
).split("|")

VILLAGES = (
    "Thistledown Mossbrook Hollowmere Applewick Fernhollow Otterford Greywater Larkhill Bramblegate "
    "Willowend Stonebridge Foxley Honeywell Marshlight Underhill Eastmere Rookwood"
).split()

_ONSETS = "b br c cl d dr f fl g gr h j k l m n p pl qu r s sn st t tr v w z".split()
_VOWELS = "a e i o u oo ee".split()
_CODAS = "b d l m mp n nd r rn sh x zz".split()
_SOUNDS_OTHERWISE = {
    "hourglass": "an",
    "unicorn": "a",
    "unicycle": "a",
    "ukulele": "a",
    "one": "a",
    "honest": "an",
}


def with_article(phrase: str) -> str:
    """``phrase`` behind "a" or "an"."""
    first = phrase.split()[0].lower()
    article = _SOUNDS_OTHERWISE.get(first, "an" if first[0] in "aeiou" else "a")
    return f"{article} {phrase}"


def capital(text: str) -> str:
    """``text`` with its first letter (and nothing else) in upper case."""
    return text[:1].upper() + text[1:]


def invented_word(rng: random.Random) -> str:
    """A word in no list: requests that use one teach the model to copy whatever a reader asks for."""
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
    """A random character sharing neither name nor kind with those in ``avoid``."""
    names, kinds = {p.name for p in avoid}, {p.kind for p in avoid}
    while True:
        kind = rng.choice(ANIMALS) if rng.random() < 0.62 else rng.choice((*FOLK, *SHE_FOLK, *HE_FOLK))
        she = kind in SHE_FOLK or (kind not in HE_FOLK and rng.random() < 0.5)
        name = rng.choice(SHE_NAMES if she else HE_NAMES)
        person = Person(name, kind, rng.choice(TRAITS), she)
        if rng.random() < invent:
            person = replace(person, kind=invented_word(rng))
        if rng.random() < invent:
            person = replace(person, name=capital(invented_word(rng)))
        if person.name not in names and person.kind not in kinds:
            return person


def pick_thing(rng: random.Random, *, invent: float = 0.0) -> Thing:
    """A random object, a third of the time with an adjective."""
    category = rng.choice((*THINGS, "charm", "charm", "charm", "light", "sound", "food"))
    noun = invented_word(rng) if rng.random() < invent else rng.choice(THINGS[category])
    return Thing(noun, rng.choice(THING_ADJECTIVES) if rng.random() < 0.33 else "")


def pick_place(rng: random.Random, *, avoid: tuple[Place, ...] = (), invent: float = 0.0) -> Place:
    """A random place not in ``avoid``."""
    while True:
        at = rng.choice(PLACES)
        if rng.random() < invent:
            at = f"in the {invented_word(rng)}"
        if at not in {place.at for place in avoid}:
            return Place(at)
