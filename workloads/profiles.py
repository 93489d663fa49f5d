"""Synthetic requests: typical uses of language models, by lengths and shared prefixes."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from workloads.request import MAX_HASH_ID, BadSetup, TraceRequest, shown

HASH_TOKENS = 16
LONGEST = 8.0
"""Longest length as a multiple of the median, where the lognormal's tail is cut."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths in tokens."""

    median: float
    sigma: float = 0.6

    def draw(self, seeds: random.Random, scale: float) -> int:
        drawn = self.median * min(LONGEST, math.exp(seeds.gauss(0.0, self.sigma)))
        return max(1, round(drawn * scale))


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of work: conversations whose turns come in random order.

    The prompt of turn k: a system prompt that several conversations share, a document of this conversation, k - 1 times
    a question and its answer, and a question.
    """

    name: str
    about: str
    question: Lengths
    answer: Lengths
    system_prompts: int = 1
    """Number of different system prompts."""
    system_tokens: int = 0
    document: Lengths | None = None
    turns: float = 1.0
    """Mean number of turns of a conversation; each may be the last."""
    conversations: int = 32
    """Number of concurrent conversations."""
    priority: int = 0


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("short-chat", "short questions, few turns", Lengths(60), Lengths(150), 4, 300, turns=3.0),
        Profile(
            "long-context-qa",
            "a few questions on each long document",
            Lengths(40),
            Lengths(120),
            1,
            96,
            Lengths(8000),
            turns=2.5,
            conversations=16,
        ),
        Profile(
            "tool-calling",
            "an agent: many tools described, many turns, little said",
            Lengths(250, 0.9),
            Lengths(40),
            3,
            2496,
            turns=8.0,
        ),
        Profile(
            "offline-batch",
            "one instruction, many texts, no user waits",
            Lengths(20, 0.1),
            Lengths(300),
            1,
            400,
            Lengths(1200),
            priority=-1,
        ),
    )
}


def profile_named(name: str) -> Profile:
    """Return a profile.

    Raises BadSetup.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise BadSetup("profile", f"{shown(name)} is not known; known are {', '.join(PROFILES)}") from None


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Yield arrival times of a Poisson process without end."""
    _check_rate(rate)
    seeds, at_s = random.Random(seed), 0.0
    while True:
        at_s += seeds.expovariate(rate)
        yield at_s


def evenly(rate: float) -> Iterator[float]:
    """Yield arrival times with equal gaps, without end."""
    _check_rate(rate)
    return (number / rate for number in itertools.count())


def requests_of(
    profile: Profile, arrivals: Iterator[float], seed: int = 0, scale: float = 1.0, context: int = 1 << 20
) -> Iterator[TraceRequest]:
    """Yield one request per arrival; the same seed gives the same.

    All lengths are multiplied by `scale`. Prompt and answer have at most `context` tokens: a longer conversation ends,
    and a longer document is cut.
    """
    if not 0 < scale < math.inf:
        raise BadSetup("scale", f"{scale} is not above 0")
    if context < 4 * HASH_TOKENS:
        raise BadSetup("context", f"{context} tokens are less than {4 * HASH_TOKENS}")
    return _requests(profile, arrivals, seed, scale, context)


def _check_rate(rate: float) -> None:
    if not 0 < rate < math.inf:
        raise BadSetup("rate", f"{rate} is not above 0")


def _requests(
    profile: Profile, arrivals: Iterator[float], seed: int, scale: float, context: int
) -> Iterator[TraceRequest]:
    seeds, talks = random.Random(seed), _Conversations(profile, scale, context)
    for number, at_s in enumerate(arrivals):
        talk = talks.one(seeds)
        question, answer = profile.question.draw(seeds, scale), profile.answer.draw(seeds, scale)
        if talk.tokens + question + answer > context and talk.turn:
            talk = talks.anew(talk, seeds)
        answer = min(answer, context // 2 - 1)
        question = min(question, max(1, context - answer - talk.tokens))
        talk.grow(question, talks)
        yield TraceRequest(
            number=number,
            arrival_s=at_s,
            input_tokens=talk.tokens,
            output_tokens=answer,
            hash_ids=tuple(talk.hash_ids),
            hash_tokens=HASH_TOKENS,
            priority=profile.priority,
            session_id=talk.name,
        )
        talk.grow(answer, talks)
        talk.turn += 1
        if seeds.random() < 1 / profile.turns:
            talks.anew(talk, seeds)


@dataclass(slots=True, eq=False)
class _Conversation:
    """One conversation, up to the prompt of its next turn."""

    place: int
    hash_ids: list[int]
    tokens: int
    name: str
    turn: int = 0

    def grow(self, tokens: int, talks: "_Conversations") -> None:
        self.tokens += tokens
        while len(self.hash_ids) * HASH_TOKENS < self.tokens:
            self.hash_ids.append(talks.new_id())


class _Conversations:
    """Concurrent conversations."""

    def __init__(self, profile: Profile, scale: float, context: int) -> None:
        self._profile, self._scale, self._context = profile, scale, context
        self._ids, self._numbers = itertools.count(), itertools.count()
        system_blocks = round(profile.system_tokens * scale / HASH_TOKENS)
        system_blocks = min(system_blocks, context // 4 // HASH_TOKENS)
        self._systems = [[self.new_id() for _ in range(system_blocks)] for _ in range(profile.system_prompts)]
        self._under_way: list[_Conversation | None] = [None] * profile.conversations

    def new_id(self) -> int:
        return next(self._ids) % MAX_HASH_ID

    def one(self, seeds: random.Random) -> _Conversation:
        """Return the conversation whose turn it is."""
        place = seeds.randrange(len(self._under_way))
        return self._under_way[place] or self._begin(place, seeds)

    def anew(self, talk: _Conversation, seeds: random.Random) -> _Conversation:
        """Replace a conversation by a new one."""
        return self._begin(talk.place, seeds)

    def _begin(self, place: int, seeds: random.Random) -> _Conversation:
        system = seeds.choice(self._systems)
        talk = _Conversation(place, [*system], len(system) * HASH_TOKENS, f"conversation-{next(self._numbers)}")
        if self._profile.document is not None:
            document = self._profile.document.draw(seeds, self._scale)
            talk.grow(min(document, self._context // 2 - talk.tokens), self)
        self._under_way[place] = talk
        return talk
