"""Long prompts: a village whose people, homes and belongings fill a page, and questions about them.

The serving system this model demonstrates shares the cache of a common prompt between requests; these
documents are what such a prompt looks like, and they teach the model to stay sensible a thousand tokens in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from chats import Message, Turn, ask, follow_up
from tales import Cast, Story, pick_cast, pick_plot, prose, render, tell
from words import VILLAGES, Person, Place, Thing, load, pick_person, pick_place, pick_thing

_VILLAGE: dict[str, list[str]] = load("phrases")["village"]


@dataclass(frozen=True)
class Resident:
    """Villager, with a home and a thing of their own."""

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
    """Return the system prompt: the storyteller, the village, its people, and earlier stories."""
    blank = pick_cast(rng)
    customs = rng.sample(_VILLAGE["customs"], 2)
    opening = [f"You are the storyteller of the village of {village}.", rng.choice(_VILLAGE["style"])]
    about = [prose(rng, line, blank, v=village) for line in (rng.choice(_VILLAGE["about"]), *customs)]
    people = []
    for resident in residents:
        cast = Cast(h=resident.h, g=blank.g, o=resident.o, p=blank.p, q=resident.q)
        lines = (rng.choice(_VILLAGE["resident"]), rng.choice(_VILLAGE["habit"]))
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
    request = rng.choice(("Tell me a story about {}.", "Can you tell me a story about {}?", "Tell me about {}."))
    return (request.format(render(rng, topic, cast)), story.text), story


def village_chat(rng: random.Random) -> tuple[Message, ...]:
    """Return a page of village lore as the system prompt, then one to four turns."""
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
