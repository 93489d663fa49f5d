"""Long prompts: a village whose people, homes and belongings fill a page, and questions about them.

The serving system this model demonstrates shares the cache of a common prompt between requests; these documents
are what such a prompt looks like, and they teach the model to stay sensible a thousand tokens in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from chats import Message, Turn, ask, follow_up
from tales import Cast, Story, pick_cast, pick_plot, prose, render, tell
from words import VILLAGES, Person, Place, Thing, pick_person, pick_place, pick_thing

_RESIDENT = (
    "{h} the {h.kind} lives {q.at}. {h.he} is {h.trait}, and {h.he} keeps {o.a}.",
    "{h} is {h.a} who lives {q.at} and owns {o.a}.",
    "{q.at} lives {h}, {h.a}. {h.he} is proud of {h.his} {o.noun}.",
    "{h}, {h.a}, lives {q.at} with {h.his} {o.noun}.",
)
_HABIT = (
    "On market days {h.he} sells [apples|eggs|ribbons|buttons|warm bread].",
    (
        "{h.he} gets up [before the sun|when everyone else goes to bed], and {h.he} [sings while {h.he}"
        " works|never hurries]."
    ),
    "Children like to visit {h.him}, because {h.he} [tells good jokes|bakes little cakes|is never cross].",
    "{h.he} is [a little afraid of thunder|very fond of soup|never seen without a hat].",
    "",
)
_VILLAGE = (
    (
        "{v} lies between the hills and the river. It has [one street|two streets|one square] and"
        " [seven|nine|forty] chimneys, and everyone knows everyone."
    ),
    "{v} is a small village. In summer it smells of hay, and in winter the snow lies up to the windows.",
    "There is a well in the middle of {v}, and every evening people meet there to talk.",
)
_CUSTOM = (
    (
        "On the first day of [spring|autumn] the whole village [dances in the square|walks to the river"
        " with lanterns]."
    ),
    "Nobody in {v} locks the door.",
    "When the bell rings three times, everyone comes to help.",
    "It is the custom in {v} to begin every story with a cup of tea.",
    "Strangers are always given [soup|bread and honey] and a place by the fire.",
)
_STYLE = (
    "You know everyone who lives there, and you tell short stories about them.",
    "Answer with short, kind stories.",
    "Children come to you every evening to hear a story.",
    "Use what you know about the village when you tell a story.",
)


@dataclass(frozen=True)
class Resident:
    """Somebody who lives in the village, and where, and with what."""

    h: Person
    q: Place
    o: Thing


def _residents(rng: random.Random, count: int) -> list[Resident]:
    people: list[Person] = []
    homes: list[Place] = []
    things: list[Thing] = []
    while len(people) < count:
        people.append(pick_person(rng, avoid=tuple(people)))
        homes.append(pick_place(rng, avoid=tuple(homes)))
        thing = pick_thing(rng)
        while thing.noun in {other.noun for other in things}:
            thing = pick_thing(rng)
        things.append(thing)
    return [Resident(*each) for each in zip(people, homes, things, strict=True)]


def _cast(rng: random.Random, residents: list[Resident]) -> Cast:
    hero, guest = rng.sample(residents, 2)
    return Cast(h=hero.h, g=guest.h, o=hero.o, p=pick_place(rng, avoid=(hero.q,)), q=hero.q)


def _page(rng: random.Random, village: str, residents: list[Resident], stories: int) -> str:
    """The system prompt: who the storyteller is, the village, its people, and stories told before."""
    blank = pick_cast(rng)
    customs = rng.sample(_CUSTOM, 2)
    opening = [f"You are the storyteller of the village of {village}.", rng.choice(_STYLE)]
    about = [prose(rng, line, blank, v=village) for line in (rng.choice(_VILLAGE), *customs)]
    people = []
    for resident in residents:
        cast = Cast(h=resident.h, g=blank.g, o=resident.o, p=blank.p, q=resident.q)
        lines = (rng.choice(_RESIDENT), rng.choice(_HABIT))
        people.append(" ".join(prose(rng, line, cast) for line in lines).strip())
    parts = [" ".join(opening), " ".join(about), rng.choice(("\n", " ")).join(people)]
    if stories:
        parts.append("Here are some of the stories you have told before.")
        parts += [tell(rng, _cast(rng, residents), pick_plot(rng)).text for _ in range(stories)]
    return "\n\n".join(parts)


def _question(rng: random.Random, residents: list[Resident]) -> Turn:
    someone = rng.choice(residents)
    cast = Cast(h=someone.h, g=someone.h, o=someone.o, p=someone.q, q=someone.q)
    question, answer = rng.choice(
        (
            ("Who lives {q.at}?", "{h} the {h.kind} lives {q.at}."),
            ("Where does {h} live?", "{h} the {h.kind} lives {q.at}."),
            ("Who is {h}?", "{h} is {h.a} who lives {q.at}."),
            ("Who has {o.a}?", "{h} the {h.kind} has {o.a}."),
            ("What does {h} own?", "{h} the {h.kind} owns {o.a}."),
        )
    )
    return render(rng, question, cast), render(rng, answer, cast)


def _village_story(rng: random.Random, residents: list[Resident]) -> tuple[Turn, Story]:
    cast = _cast(rng, residents)
    plot = pick_plot(rng)
    topic = rng.choice(
        (
            "{h}",
            "{h} the {h.kind}",
            "{h} and {g}",
            "{h} and {g}",
            "{h} and {h.his} {o.noun}",
            "the {h.kind}",
        )
    )
    story = tell(rng, cast, plot)
    request = rng.choice(
        ("Tell me a story about {}.", "Can you tell me a story about {}?", "Tell me about {}.")
    )
    return (request.format(render(rng, topic, cast)), story.text), story


def village_chat(rng: random.Random) -> tuple[Message, ...]:
    """A page of village lore as the system prompt, then one to four turns."""
    village = rng.choice(VILLAGES)
    residents = _residents(rng, rng.randint(3, 11))
    system = _page(rng, village, residents, rng.choice((0, 1, 1, 2, 2, 3, 4)))
    messages: list[Message] = [("system", system)]
    for _ in range(rng.choice((0, 1, 1, 2, 2))):
        question, answer = _question(rng, residents)
        messages += [("user", question), ("assistant", answer)]
    if rng.random() < 0.6:
        turn, story = _village_story(rng, residents)
    else:
        request, story = ask(rng, pick_cast(rng, invent=0.05))
        turn = (request, story.text)
    messages += [("user", turn[0]), ("assistant", turn[1])]
    for _ in range(rng.choice((0, 1, 1))):
        turn, story = follow_up(rng, story)
        messages += [("user", turn[0]), ("assistant", turn[1])]
    return tuple(messages)
