"""Turning plots into stories, sequels and rhymes about one fixed cast."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from adventures import ADVENTURES, PRAISE, RESCUES
from plots import PLOTS, Beat, Plot
from words import Person, Place, Thing, capital, pick_person, pick_place, pick_thing

ALL_PLOTS: tuple[Plot, ...] = PLOTS + ADVENTURES
# The rescue has a version for every kind of object, so it is told more often than the others.
PLOT_WEIGHTS = [3 if plot.name == "rescue" else 1 for plot in ALL_PLOTS]
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START = re.compile(r'(^"?|[.!?] "?)([a-z])')


@dataclass(frozen=True)
class Cast:
    """Who and what a story is about: hero, guest, object, place of action, home."""

    h: Person
    g: Person
    o: Thing
    p: Place
    q: Place


@dataclass(frozen=True)
class Story:
    """A finished story, and what later turns of a conversation need to know about it."""

    cast: Cast
    plot: Plot
    moral: str
    text: str


def render(rng: random.Random, template: str, cast: Cast, **more: object) -> str:
    """Settle the ``[a|b]`` choices of ``template`` and fill in the cast."""
    settled = _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), template)
    return settled.format(h=cast.h, g=cast.g, o=cast.o, p=cast.p, q=cast.q, **more)


def prose(rng: random.Random, template: str, cast: Cast, **more: object) -> str:
    """``render``, with a capital wherever a sentence begins: templates need not care which slot comes first."""
    text = render(rng, template, cast, **more)
    return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)


def _paragraph(rng: random.Random, beats: tuple[Beat, ...], cast: Cast, extra: dict[str, str]) -> str:
    sentences = (prose(rng, rng.choice(beat), cast, **extra) for beat in beats)
    return " ".join(sentence for sentence in sentences if sentence)


def pick_cast(rng: random.Random, *, invent: float = 0.0) -> Cast:
    """A random cast; ``invent`` is the chance of each part being named by a made-up word."""
    hero = pick_person(rng, invent=invent)
    place = pick_place(rng, invent=invent)
    return Cast(
        h=hero,
        g=pick_person(rng, avoid=(hero,), invent=invent / 2),
        o=pick_thing(rng, invent=invent),
        p=place,
        q=pick_place(rng, avoid=(place,), invent=invent / 2),
    )


def pick_plot(rng: random.Random) -> Plot:
    """A random plot."""
    return rng.choices(ALL_PLOTS, PLOT_WEIGHTS)[0]


def tell(rng: random.Random, cast: Cast, plot: Plot) -> Story:
    """The story of ``plot`` happening to ``cast``."""
    moral = rng.choice(plot.morals)
    trouble, deed = RESCUES[cast.o.category]
    extra = {
        "moral": moral,
        "trouble": render(rng, trouble, cast),
        "deed": render(rng, deed, cast),
        "praise": render(rng, PRAISE[cast.o.category], cast),
    }
    text = "\n\n".join(_paragraph(rng, beats, cast, extra) for beats in plot.body)
    return Story(cast, plot, moral, text)


def summary(rng: random.Random, story: Story) -> str:
    """The story in two or three sentences, for "Make it shorter."."""
    text = prose(rng, story.plot.summary, story.cast)
    if rng.random() < 0.5:
        text += f" {capital(story.moral)}."
    return text


_SEQUEL_STARTS: Beat = (
    "The next [morning|day], {g} came to visit {h} {q.at}.",
    "A [week|month] later, {h} and {g} met again {q.at}.",
    "The next [spring|summer|autumn], {g} knocked at {h}'s door.",
)
# Each sequel is an event, what came of it, and an end; ``k`` is a newcomer and ``r`` a new place.
_SEQUELS: tuple[tuple[Beat, ...], ...] = (
    (
        (
            '"I have an idea," said {g}. "Let us go {r.to} and take {o.the} with us."',
            '"Have you ever been {r.at}?" asked {g}. "Never," said {h}. "Then let us go today!"',
        ),
        (
            (
                "They walked all [morning|day], and on the way they met {k.a} called {k}, who asked to come"
                " along."
            ),
            "The road was long, but they sang and [told jokes|counted clouds], and soon they were there.",
        ),
        (
            (
                "They ate their bread {r.at} and watched the sun go down, and {h} thought that it was the"
                " best day of all."
            ),
            "In the evening they came home with [muddy feet|sore feet|wet coats] and happy hearts.",
        ),
    ),
    (
        (
            "They were drinking tea when there was a [knock|tap] at the window. It was {k.a} called {k}.",
            "Just then {k.a} called {k} came running down the path.",
        ),
        (
            '"Please," said {k}, "I have heard about you and {o.the}. Will you tell me the story?"',
            '"Help!" said {k}. "My [little brother|little sister] is lost {r.at}, and it is getting dark."',
        ),
        (
            (
                "{h} and {g} looked at each other and smiled. They [took {k} by the hand|put on their"
                " coats] and did what they could, and that night there were three friends at the table."
            ),
            "So they helped {k}, just as they had helped each other, and {k} never forgot it.",
        ),
    ),
    (
        (
            (
                '"Look what I have made," said {g}, and {g.he} gave {h} [a pie|a scarf|a song|a picture|a'
                " small boat]."
            ),
            (
                '"Today is a special day," said {g}. "It is [your birthday|the first day of spring|the day'
                ' we met]."'
            ),
        ),
        (
            "{h} was so surprised that {h.he} [dropped {h.his} cup|sat down on the cat|could not speak].",
            '"Nobody has ever done that for me," said {h}, and {h.he} had to wipe {h.his} eyes.',
        ),
        (
            "They put {o.the} on the table, lit a fire and talked until the stars came out.",
            "Then they danced around {o.the}, and the neighbours came and danced too.",
        ),
    ),
    (
        (
            "That night {h} could not sleep. {h.he} kept thinking of {o.the}.",
            "There was a great storm that night, and the wind shook the windows.",
        ),
        (
            (
                '{h.he} went and woke {g}. "Are you awake?" asked {h}. "I am now," said {g}, and they both'
                " laughed."
            ),
            '"Are you afraid?" asked {g}. "Not when you are here," said {h}.',
        ),
        (
            "They sat together by the fire until the morning came, pink and quiet.",
            (
                "In the end they both fell asleep in their chairs, and in the morning the sky was clear and"
                " blue."
            ),
        ),
    ),
)


def sequel(rng: random.Random, story: Story) -> str:
    """What happened next: the same two friends, and perhaps somebody new."""
    cast = story.cast
    extra = {
        "k": pick_person(rng, avoid=(cast.h, cast.g)),
        "r": pick_place(rng, avoid=(cast.p, cast.q)),
    }
    event, outcome, end = rng.choice(_SEQUELS)
    beats = (_SEQUEL_STARTS, event, outcome, end)
    return " ".join(prose(rng, rng.choice(beat), cast, **extra) for beat in beats)


_COUPLETS = (
    ("{h.a} went out with {o.a} one night,", "When the moon on the water was round and white."),
    ("{h} was {h.a} with nothing to do,", "Who looked at {o.the} and the sky so blue."),
    ("The {h.kind} took {o.the} and walked for a while,", "And came back again with a song and a smile."),
    ('"Where are you going?" the little birds said.', '"Over the hill with {o.the}," {h.he} said.'),
    ("The wind on the hill blew over the town,", "And {o.the} went up and {o.the} came down."),
    ("The {h.kind} sat down by the side of the sea,", "With {o.the} and a cake and a cup of tea."),
    ("So if you are lonely and far from the shore,", "Remember the {h.kind} who knocked at your door."),
    ("The stars came out and the night was long,", "And the {h.kind} and {o.the} were part of the song."),
)


def poem(rng: random.Random, cast: Cast) -> str:
    """Two or three couplets; slots sit inside the lines so that the rhymes hold for any cast."""
    first = rng.choice(_COUPLETS[:3])
    rest = rng.sample(_COUPLETS[3:], rng.choice((1, 2)))
    return "\n".join(prose(rng, line, cast) for couplet in (first, *rest) for line in couplet)
