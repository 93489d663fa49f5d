"""Turning plots into stories, sequels and rhymes about one fixed cast."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from words import Person, Place, Thing, capital, load, pick_person, pick_place, pick_thing

Beat = list[str]

_PLOTS = load("plots")
_SHARED: dict[str, Beat] = _PLOTS["shared"]
_EXTRAS = load("extras")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START = re.compile(r'(^"?|[.!?] "?)([a-z])')


@dataclass(frozen=True)
class Plot:
    """One shape of story, with what a request, a summary and a lesson about it sound like."""

    name: str
    body: list[list[Beat]]
    asks: list[str]
    themes: list[str]
    morals: list[str]
    summary: str
    helper: str


def _beat(given: str | Beat) -> Beat:
    """Return the templates of a beat, which may be given by the names of shared ones."""
    return [line for name in given.split("+") for line in _SHARED[name]] if isinstance(given, str) else given


def _plot(entry: dict[str, Any]) -> Plot:
    body = [[_beat(beat) for beat in paragraph] for paragraph in entry.pop("body")]
    return Plot(body=body, **entry)


ALL_PLOTS = [_plot(entry) for entry in _PLOTS["plots"] + load("adventures")["plots"]]
# The rescue has a version for every kind of object, so it is told more often than the others.
PLOT_WEIGHTS = [3 if plot.name == "rescue" else 1 for plot in ALL_PLOTS]


@dataclass(frozen=True)
class Cast:
    """Cast of a story: hero, guest, object, place of action, home."""

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
    """``render``, with a capital where a sentence begins: templates need not care what slot comes first."""
    text = render(rng, template, cast, **more)
    return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)


def _paragraph(rng: random.Random, beats: list[Beat], cast: Cast, extra: dict[str, str]) -> str:
    sentences = (prose(rng, rng.choice(beat), cast, **extra) for beat in beats)
    return " ".join(sentence for sentence in sentences if sentence)


def pick_cast(rng: random.Random, *, invent: float = 0.0) -> Cast:
    """Return a random cast; ``invent`` is the chance of each part being named by a made-up word."""
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
    """Return a random plot."""
    return rng.choices(ALL_PLOTS, PLOT_WEIGHTS)[0]


def tell(rng: random.Random, cast: Cast, plot: Plot) -> Story:
    """Return the story of ``plot`` happening to ``cast``."""
    moral = rng.choice(plot.morals)
    uses: dict[str, str] = _EXTRAS["uses"][cast.o.category]
    extra = {use: prose(rng, template, cast) for use, template in uses.items()} | {"moral": moral}
    text = "\n\n".join(_paragraph(rng, beats, cast, extra) for beats in plot.body)
    return Story(cast, plot, moral, text)


def summary(rng: random.Random, story: Story) -> str:
    """Return the story in two or three sentences, for "Make it shorter."."""
    text = prose(rng, story.plot.summary, story.cast)
    if rng.random() < 0.5:
        text += f" {capital(story.moral)}."
    return text


def sequel(rng: random.Random, story: Story) -> str:
    """Return a sequel: the same two friends, and perhaps a new character."""
    cast = story.cast
    extra = {
        "k": pick_person(rng, avoid=(cast.h, cast.g)),
        "r": pick_place(rng, avoid=(cast.p, cast.q)),
    }
    sequels = _EXTRAS["sequels"]
    beats: list[Beat] = [sequels["starts"], *rng.choice(sequels["bodies"])]
    return " ".join(prose(rng, rng.choice(beat), cast, **extra) for beat in beats)


def poem(rng: random.Random, cast: Cast) -> str:
    """Two or three couplets; slots sit inside the lines so that the rhymes hold for any cast."""
    rhymes = _EXTRAS["rhymes"]
    couplets = [rng.choice(rhymes["first"]), *rng.sample(rhymes["rest"], rng.choice((1, 2)))]
    return "\n".join(prose(rng, line, cast) for couplet in couplets for line in couplet)
