"""Conversations: requests for stories, follow-up turns about them, and small talk."""

from __future__ import annotations

import random

from tales import Cast, Story, pick_cast, pick_plot, poem, prose, render, sequel, summary, tell
from words import capital

Message = tuple[str, str]
Turn = tuple[str, str]

REQUESTS = (
    "Tell me a story about {}.",
    "Tell me a story about {}.",
    "Tell me a story about {}.",
    "Can you tell me a story about {}?",
    "Please tell me a story about {}.",
    "Tell me a short story about {}.",
    "Write a short story about {}.",
    "Write a story about {}.",
    "I would like to hear a story about {}.",
    "Make up a bedtime story about {}.",
    "A story about {}, please.",
    "Tell me about {}.",
    "tell me a story about {}",
)
TOPICS = (
    ("{h.a_kind} and {o.a}", 34),
    ("{h.a} and {o.a}", 8),
    ("{h.a_kind} and {o.a} {p.at}", 12),
    ("{h.a_kind} {p.at}", 10),
    ("{h.a} {p.at}", 3),
    ("{h.a_kind}", 6),
    ("{h.a}", 3),
    ("{o.a}", 5),
    ("{o.a} and {h.a_kind}", 3),
    ("{h.a_kind} and {g.a_kind}", 8),
    ("{h.a_kind}, {g.a_kind} and {o.a}", 4),
    ("{h.a_kind} called {h}", 4),
    ("{h.a_kind} named {h} and {o.a}", 5),
    ("{h.a_kind} named {h} and {g.a_kind} named {g}", 3),
)
ANYTHING = (
    "Tell me a story.",
    "Tell me a story!",
    "Can you tell me a story?",
    "I would like a story, please.",
    "Tell me a bedtime story.",
    "Write a story.",
    "Surprise me.",
    "Tell me something nice.",
)
BRIEFLY = (
    "Tell me a very short story about {}.",
    "In two sentences, tell me a story about {}.",
    "Tell me a tiny story about {}.",
)
VERSE = (
    "Write a poem about {}.",
    "Tell me a poem about {}.",
    "Write a short poem about {}.",
    "Can you make a rhyme about {}?",
)

NEXT = (
    "What happened next?",
    "What happened next?",
    "And then?",
    "Tell me more.",
    "What happened after that?",
    "Go on.",
    "Please continue.",
    "Then what happened?",
    "what happened next?",
)
SHORTER = (
    "Make it shorter.",
    "Make it shorter.",
    "Can you make it shorter?",
    "Shorter, please.",
    "Tell it in two sentences.",
    "Summarize the story.",
    "Can you sum it up?",
)
AGAIN = ("Tell it again.", "Tell me the same story again.", "Again!")
ANOTHER = (
    "Tell me another one.",
    "Tell me another story.",
    "Another one, please!",
    "One more story, please.",
)

HELLO = (
    "Hello!",
    "Hi!",
    "Hello",
    "Hi",
    "Hi there!",
    "Good morning!",
    "Good evening.",
    "Hey",
    "hello, who are you?",
)
WELCOME = (
    "Hello! {} What shall it be about?",
    "Good to see you! {} What would you like to hear about?",
    "Hello, friend. {} Give me somebody and something, and I will begin.",
)
SELF = ("I am the storyteller.", "I tell small stories.", "I know many stories.")
WHO = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "What can you do?",
    "What do you do?",
    "Can you help me?",
)
THANKS = (
    "Thank you.",
    "Thank you!",
    "Thanks!",
    "That was lovely.",
    "I liked that.",
    "Good night.",
    "Goodbye!",
    "Nice!",
)
OFF_TOPIC = (
    "What is the capital of France?|What is two plus two?|Write a Python function that sorts a list.|What"
    " is the weather like today?|Explain how a computer works.|Who is the president?|How do I bake"
    " bread?|Translate this into German.|What is the meaning of life?|Give me a list of ten ideas.|How far"
    " away is the moon?|What time is it?|Explain quantum physics in simple terms.|Write an email to my"
    " boss.|Why is the sky blue?|What is machine learning?|Help me with my homework.|Who won the game?|Can"
    " you write some code?|Test|How does the internet work?|What should I eat tonight?|Describe a"
    " distributed system.|Count to ten."
).split("|")
SORRY = (
    "I know nothing about that, but I do know a story.",
    "That is too hard for a storyteller. But listen.",
    "I only know stories. Here is one.",
    "I cannot say, but it reminds me of a story.",
)


def ask(rng: random.Random, cast: Cast) -> tuple[str, Story]:
    """A request for a story, and a story that keeps to it."""
    plot = pick_plot(rng)
    roll = rng.random()
    if roll < 0.06:
        return rng.choice(ANYTHING), tell(rng, cast, plot)
    if roll < 0.17:
        topic = render(rng, rng.choice(plot.asks), cast)
    elif roll < 0.21:
        topic = rng.choice(plot.themes)
    else:
        topics, weights = zip(*TOPICS, strict=True)
        topic = render(rng, rng.choices(topics, weights)[0], cast)
    return rng.choice(REQUESTS).format(topic), tell(rng, cast, plot)


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
        return (rng.choice(NEXT), sequel(rng, story)), story
    if roll < 0.54:
        return (rng.choice(SHORTER), summary(rng, story)), story
    if roll < 0.76:
        return rng.choice(_questions(rng, story)), story
    if roll < 0.79:
        return (rng.choice(AGAIN), story.text), story
    if roll < 0.85:
        another = tell(rng, pick_cast(rng), pick_plot(rng))
        return (rng.choice(ANOTHER), another.text), another
    if roll < 0.90:
        reply = (
            f"You are welcome. {rng.choice(('Sleep well', 'Come back soon', 'Good night'))}, and think of"
            f" {story.cast.h}."
        )
        return (rng.choice(THANKS), reply), story
    request, another = ask(rng, pick_cast(rng, invent=0.06))
    return (request, another.text), another


def small_talk(rng: random.Random) -> tuple[Turn, Story]:
    """A turn that asks for no story, answered in character; some answers tell one anyway."""
    cast = pick_cast(rng)
    story = tell(rng, cast, pick_plot(rng))
    roll = rng.random()
    if roll < 0.35:
        reply = rng.choice(WELCOME).format(rng.choice(SELF))
        return (rng.choice(HELLO), reply), story
    if roll < 0.6:
        reply = (
            f"{rng.choice(SELF)} Ask me for one about {cast.h.a_kind} and {cast.o.a}, or about anything you"
            " like."
        )
        return (rng.choice(WHO), reply), story
    return (rng.choice(OFF_TOPIC), f"{rng.choice(SORRY)} {story.text}"), story


def _first_turn(rng: random.Random) -> tuple[Turn, Story]:
    roll = rng.random()
    cast = pick_cast(rng, invent=0.08)
    if roll < 0.07:
        return small_talk(rng)
    if roll < 0.12:
        story = tell(rng, cast, pick_plot(rng))
        topic = f"{cast.h.a_kind} and {cast.o.a}"
        return (rng.choice(BRIEFLY).format(topic), summary(rng, story)), story
    if roll < 0.16:
        story = tell(rng, cast, pick_plot(rng))
        return (rng.choice(VERSE).format(f"{cast.h.a_kind} and {cast.o.a}"), poem(rng, cast)), story
    request, story = ask(rng, cast)
    return (request, story.text), story


SYSTEM_PROMPTS = (
    "You are a storyteller.",
    "You are a helpful assistant.",
    "You tell short stories for children.",
    "You are the storyteller.",
    "You are a kind storyteller. Keep your stories short.",
    "You are a helpful storyteller.",
    "Answer every request with a small story.",
    "You are a friendly assistant who loves stories.",
)


def conversation(rng: random.Random) -> tuple[Message, ...]:
    """A chat of one to four turns, sometimes behind a short system prompt."""
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append(("system", rng.choice(SYSTEM_PROMPTS)))
    turn, story = _first_turn(rng)
    if turn[0] in HELLO or turn[0] in WHO:
        messages += [("user", turn[0]), ("assistant", turn[1])]
        request, story = ask(rng, pick_cast(rng))
        turn = (request, story.text)
    messages += [("user", turn[0]), ("assistant", turn[1])]
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        turn, story = follow_up(rng, story)
        messages += [("user", turn[0]), ("assistant", turn[1])]
    return tuple(messages)
