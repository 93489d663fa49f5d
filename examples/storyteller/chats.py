"""Conversations: requests for stories, follow-up turns about them, and small talk."""

from __future__ import annotations

import random

from tales import Cast, Story, pick_cast, pick_plot, poem, prose, render, sequel, summary, tell
from words import capital, load

Message = tuple[str, str]
Turn = tuple[str, str]

_PHRASES = load("phrases")
_ASK: dict[str, list[str]] = _PHRASES["ask"]
_FOLLOW_UP: dict[str, list[str]] = _PHRASES["follow_up"]
_SMALL_TALK: dict[str, list[str]] = _PHRASES["small_talk"]
_SYSTEM_PROMPTS: list[str] = _PHRASES["system"]["prompts"]
_TOPICS, _TOPIC_WEIGHTS = zip(*_PHRASES["ask"]["topics"], strict=True)


def ask(rng: random.Random, cast: Cast) -> tuple[str, Story]:
    """Return a request for a story, and a story that keeps to it."""
    plot = pick_plot(rng)
    roll = rng.random()
    if roll < 0.06:
        return rng.choice(_ASK["anything"]), tell(rng, cast, plot)
    if roll < 0.17:
        topic = render(rng, rng.choice(plot.asks), cast)
    elif roll < 0.21:
        topic = rng.choice(plot.themes)
    else:
        topic = render(rng, rng.choices(_TOPICS, _TOPIC_WEIGHTS)[0], cast)
    return rng.choice(_ASK["story"]).format(topic), tell(rng, cast, plot)


def _questions(rng: random.Random, story: Story) -> list[Turn]:
    """Questions whose answers are all in ``story``."""
    cast = story.cast
    pairs = [
        ("Who was {h}?", "{h} was {h.a} who lived {q.at}."),
        ("What was the {h.kind} called?", "The {h.kind} was called {h}."),
        ("What was the name of the {h.kind}?", "The {h.kind} was called {h}."),
        ("Who was {g}?", "{g} was {g.a}."),
        ("What was the {g.kind} called?", "The {g.kind} was called {g}."),
        ("Where did {h} live?", "{h} lived {q.at}."),
        ("Where did it happen?", "It happened {p.at}."),
        ("What is the moral of the story?", capital(story.moral) + "."),
        ("What did {h} learn?", "{h} learned that " + story.moral + "."),
        ("Who helped {h}?", story.plot.helper),
    ]
    return [(prose(rng, question, cast), prose(rng, answer, cast)) for question, answer in pairs]


def follow_up(rng: random.Random, story: Story) -> tuple[Turn, Story]:
    """One more turn after ``story``, and the story that is then being talked about."""
    roll = rng.random()
    if roll < 0.40:
        return (rng.choice(_FOLLOW_UP["next"]), sequel(rng, story)), story
    if roll < 0.54:
        return (rng.choice(_FOLLOW_UP["shorter"]), summary(rng, story)), story
    if roll < 0.76:
        return rng.choice(_questions(rng, story)), story
    if roll < 0.79:
        return (rng.choice(_FOLLOW_UP["again"]), story.text), story
    if roll < 0.85:
        another = tell(rng, pick_cast(rng), pick_plot(rng))
        return (rng.choice(_FOLLOW_UP["another"]), another.text), another
    if roll < 0.90:
        reply = (
            f"You are welcome. {rng.choice(('Sleep well', 'Come back soon', 'Good night'))}, and think of"
            f" {story.cast.h}."
        )
        return (rng.choice(_FOLLOW_UP["thanks"]), reply), story
    request, another = ask(rng, pick_cast(rng, invent=0.06))
    return (request, another.text), another


def small_talk(rng: random.Random) -> tuple[Turn, Story]:
    """Return a turn that asks for no story, answered in character; some answers tell one anyway."""
    cast = pick_cast(rng)
    story = tell(rng, cast, pick_plot(rng))
    roll = rng.random()
    if roll < 0.35:
        reply = rng.choice(_SMALL_TALK["welcome"]).format(rng.choice(_SMALL_TALK["self"]))
        return (rng.choice(_SMALL_TALK["hello"]), reply), story
    if roll < 0.6:
        topic = render(rng, "{h.a_kind} and {o.a}", cast)
        reply = f"{rng.choice(_SMALL_TALK['self'])} Ask me for one about {topic}, or about anything you like."
        return (rng.choice(_SMALL_TALK["who"]), reply), story
    return (rng.choice(_SMALL_TALK["off_topic"]), f"{rng.choice(_SMALL_TALK['sorry'])} {story.text}"), story


def _first_turn(rng: random.Random) -> tuple[Turn, Story]:
    roll = rng.random()
    cast = pick_cast(rng, invent=0.08)
    if roll < 0.07:
        return small_talk(rng)
    if roll < 0.12:
        story = tell(rng, cast, pick_plot(rng))
        topic = f"{cast.h.a_kind} and {cast.o.a}"
        return (rng.choice(_ASK["briefly"]).format(topic), summary(rng, story)), story
    if roll < 0.16:
        story = tell(rng, cast, pick_plot(rng))
        return (rng.choice(_ASK["verse"]).format(f"{cast.h.a_kind} and {cast.o.a}"), poem(rng, cast)), story
    request, story = ask(rng, cast)
    return (request, story.text), story


def conversation(rng: random.Random) -> tuple[Message, ...]:
    """Return a chat of one to four turns, sometimes behind a short system prompt."""
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append(("system", rng.choice(_SYSTEM_PROMPTS)))
    turn, story = _first_turn(rng)
    if turn[0] in _SMALL_TALK["hello"] + _SMALL_TALK["who"]:
        messages += [("user", turn[0]), ("assistant", turn[1])]
        request, story = ask(rng, pick_cast(rng))
        turn = (request, story.text)
    messages += [("user", turn[0]), ("assistant", turn[1])]
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        turn, story = follow_up(rng, story)
        messages += [("user", turn[0]), ("assistant", turn[1])]
    return tuple(messages)
