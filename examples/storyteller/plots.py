"""The hand-written half of the grammar: plots, and what each kind of object is good for.

A plot is a list of paragraphs, a paragraph a list of beats, a beat a tuple of templates of which one is told.
``[a|b]`` inside a template is a further choice. ``h`` is the hero, ``g`` the guest or helper, ``o`` the object,
``p`` the place where things happen and ``q`` the hero's home.
"""

from __future__ import annotations

from dataclasses import dataclass

Beat = tuple[str, ...]

OPENING: Beat = (
    "Once upon a time there was {h.a} called {h}, who lived {q.at}.",
    "Once upon a time, {q.at}, there lived {h.a} [called|named] {h}.",
    "Once there was {h.a} [called|named] {h}. {h.he} lived {q.at}.",
    "Long ago, {q.at}, there lived {h.a} called {h}.",
    "{h} was {h.a} who lived {q.at}.",
    "Everyone {q.at} knew {h}, {h.a} with a [warm heart|loud laugh|soft voice|long scarf].",
)

HAS: Beat = (
    "{h.he} had {o.a}, and {h.he} took [good care of it|it everywhere].",
    (
        "The thing {h.he} loved best was {o.a} that {h.his} [grandmother|grandfather|mother|uncle] had"
        " given {h.him}."
    ),
    "{h.he} owned very little, only {o.a} and a [warm bed|small stove|three-legged stool].",
    "By {h.his} door {h.he} kept {o.a}, and {h.he} was very proud of it.",
)

FRIENDS: Beat = (
    "From that day on, {h} and {g} were the best of friends.",
    "And {h} and {g} have been friends ever since.",
    "After that, {g} came to visit {h} every [Sunday|evening|spring], and they were never lonely again.",
    "{h} and {g} walked home together under the [stars|moon], and they [sang|laughed] all the way.",
)

LESSON: Beat = (
    "And that is how {h} learned that {moral}.",
    "So {h} learned that {moral}.",
    '"Now I know that {moral}," said {h}.',
)

COMFORT = '"[Do not worry|Never mind|Cheer up]," said {g}. '


@dataclass(frozen=True)
class Plot:
    """One shape of story, with what a request, a summary and a lesson about it sound like."""

    name: str
    body: tuple[tuple[Beat, ...], ...]
    asks: tuple[str, ...]
    summary: str
    morals: tuple[str, ...]
    themes: tuple[str, ...]
    helper: str = "{g} the {g.kind} helped {h}."


PLOTS: tuple[Plot, ...] = (
    Plot(
        "lost",
        (
            (OPENING, HAS),
            (
                (
                    "But one [windy|rainy|misty|cold] [morning|evening] {o.the} was gone.",
                    (
                        "Then one [morning|evening] {h} [reached for|looked for] {o.the}, and it was not"
                        " there."
                    ),
                ),
                (
                    (
                        "{h} looked [under the bed|behind the door|in every cupboard] and [in the garden|on"
                        " the roof|down the path], but {h.he} found [nothing|only dust|only leaves]."
                    ),
                    "{h.he} searched all day and asked everyone {h.he} met, but nobody had seen it.",
                ),
                (
                    (
                        'At last, {p.at}, {h.he} met {g.a} called {g}. "Why are you so sad?" asked {g}. '
                        '"I have lost my {o.noun}," said {h}.'
                    ),
                    (
                        "Tired and sad, {h.he} sat down to rest {p.at}. There {g.a} called {g} found"
                        ' {h.him}. "What is the matter?" asked {g}. "My {o.noun} is gone," said {h}.'
                    ),
                ),
                (
                    COMFORT + '"[Four eyes are better than two|We will look together]."',
                    '"Then let us look together," said {g}, "[slowly this time|one step at a time]."',
                ),
            ),
            (
                (
                    (
                        "So they looked [under every leaf|behind every stone|in the long grass], and before"
                        " [dark|supper] they found {o.the}, [safe and dry|a little muddy but whole]."
                    ),
                    (
                        "They walked back along the path, and there, [behind a mossy stone|under a heap of"
                        " leaves|beside a puddle], lay {o.the}."
                    ),
                ),
                ("{h} [danced|laughed|jumped] for joy.", "{h} hugged {g} and could not stop smiling."),
                FRIENDS + LESSON,
            ),
        ),
        ("{h.a_kind} who lost {o.a}", "{h.a} who loses {o.a} {p.at}"),
        "{h} the {h.kind} lost {o.a}. {h.he} met {g} the {g.kind} {p.at}, and together they found it again.",
        (
            "a search is shorter with a friend",
            "it is wise to ask for help",
            "what is lost can be found again",
        ),
        ("friendship", "asking for help", "hope"),
        "{g} the {g.kind} helped {h} to look for {o.the}.",
    ),
    Plot(
        "found",
        (
            (
                OPENING,
                (
                    (
                        "One [bright|quiet|frosty] [morning|afternoon], {h} was walking {p.at} when {h.he}"
                        " saw something [in the grass|on the ground|behind a stone]. It was {o.a}!"
                    ),
                    "One day {h} went {p.to} and found {o.a} lying [in the dust|under a bush|all alone].",
                ),
            ),
            (
                (
                    (
                        '"I could keep it," {h.he} thought. "Nobody would [ever know|see]." But {h.his}'
                        " heart felt heavy."
                    ),
                    (
                        "It was the finest {o.noun} {h.he} had ever seen, and {h.he} wanted very much to"
                        " keep it."
                    ),
                ),
                (
                    (
                        '"Somebody must be missing this," said {h}. So {h.he} went from door to door,'
                        " [asking and asking|knocking politely]."
                    ),
                    "All the same, {h.he} [put up a sign|asked every traveller] and waited.",
                ),
                (
                    (
                        'At the last house sat {g.a} called {g}, [crying quietly|looking very sad]. "My'
                        ' {o.noun}!" cried {g}. "I thought I would never see it again."'
                    ),
                    (
                        'On the third day {g.a} called {g} came by. "That is my {o.noun}," whispered {g}.'
                        ' "It is all I have to remember my [mother|father|brother|sister] by."'
                    ),
                ),
            ),
            (
                (
                    (
                        "{h} gave {o.the} back at once, and {g} made {h.him} [a bowl of hot soup|a cup of"
                        " sweet tea|a plate of pancakes]."
                    ),
                    "{h} put {o.the} into {g}'s hands, and {h.his} heart felt light again.",
                ),
                FRIENDS,
                LESSON,
            ),
        ),
        ("{h.a_kind} who found {o.a}", "{h.a} who finds {o.a} {p.at}"),
        "{h} the {h.kind} found {o.a} {p.at}. It belonged to {g} the {g.kind}, so {h} gave it back and won"
        " a friend.",
        (
            "an honest heart is a light heart",
            "giving something back is better than keeping it",
            "a friend is worth more than any treasure",
        ),
        ("honesty", "doing the right thing", "friendship"),
        "{g} the {g.kind} was the one who had lost {o.the}.",
    ),
    Plot(
        "quarrel",
        (
            (OPENING, ("Next door lived {g.a} called {g}.", "{h.his} neighbour was {g.a} called {g}.")),
            (
                (
                    "One day they were walking {p.at} when they both saw {o.a} at the same time.",
                    "One [sunny|windy] morning, {p.at}, the two of them found {o.a}.",
                ),
                (
                    (
                        '"I saw it first!" said {h}. "No, I did!" said {g}. They pulled and pulled, until'
                        " {o.the} flew out of their hands and [landed in a deep hole|rolled into the"
                        " water|got stuck high in a tree]."
                    ),
                    (
                        '"It is mine!" shouted {h}. "Mine!" shouted {g}. They shouted so loudly that'
                        " neither of them saw {o.the} [roll away down the hill|slip into a crack in the"
                        " rocks]."
                    ),
                ),
                (
                    "Now nobody had it. They [sat down|stood there] and did not say a word.",
                    "{h} tried to get it back alone, and so did {g}, but neither of them could reach it.",
                ),
                (
                    '"I cannot do it without you," said {h} at last. "Nor I without you," said {g}.',
                    (
                        'Then {g} began to laugh. "[How silly we are|What a pair we are]! Shall we try'
                        ' together?"'
                    ),
                ),
            ),
            (
                (
                    (
                        "So {h} held {g} by the [feet|coat|hand], and {g} reached as far as {g.he} could,"
                        " and up came {o.the}."
                    ),
                    "{h} pushed and {g} pulled, and at last they had {o.the} again.",
                ),
                (
                    "Now it stays with {h} one week and with {g} the next.",
                    (
                        "They agreed to share it, and [it was twice as much fun|neither of them minded at"
                        " all]."
                    ),
                ),
                LESSON,
            ),
        ),
        ("two friends who quarrel over {o.a}", "{h.a_kind} and {g.a_kind} who fight over {o.a}"),
        "{h} the {h.kind} and {g} the {g.kind} fought over {o.a} and lost it. Working together they got it"
        " back, and then they shared it.",
        ("sharing is better than winning", "two can do what one cannot"),
        ("sharing", "working together"),
    ),
    Plot(
        "gift",
        (
            (OPENING, HAS),
            (
                (
                    (
                        "One [winter|autumn] evening there was a knock at the door. It was {g.a} called"
                        " {g}, [wet and tired|pale and worried], who had been walking {p.at} all day."
                    ),
                    "One day, {p.at}, {h} met {g.a} called {g}, who was [far from home|all alone].",
                ),
                (
                    '"I have a long way to go," said {g}, "and I have nothing at all."',
                    '"Please," said {g}, "could you spare something for a traveller?"',
                ),
                (
                    '{h} looked at {o.the}. {h.he} loved it, but {g} needed it more. "Take it," said {h}.',
                    "{h} thought for a long time. Then {h.he} smiled and gave {g} {o.the}.",
                ),
                (
                    (
                        "{g} thanked {h.him} and went away, and the house [was very quiet|felt empty] that"
                        " night."
                    ),
                    'The [neighbours|others] laughed at {h}. "You will never see it again," they said.',
                ),
            ),
            (
                (
                    (
                        "But a year later {g} came back {q.to} with {o.the} and [a cart full of apples|a"
                        ' basket of bread|a bag of seeds|a warm new coat]. "You helped me when I had'
                        ' nothing," said {g}.'
                    ),
                    (
                        'In the spring {g} came back, singing. "Here is your {o.noun}," said {g}, "and here'
                        ' is [a cake|a jar of honey|a song|a kitten] to go with it."'
                    ),
                ),
                LESSON,
                FRIENDS,
            ),
        ),
        ("{h.a_kind} who gives away {o.a}", "{h.a} and a stranger who needs {o.a}"),
        "{h} the {h.kind} gave {o.a} to {g}, {g.a} who had nothing. A year later {g} came back to thank"
        " {h.him}.",
        ("kindness always finds its way home", "what we give away comes back to us"),
        ("kindness", "giving", "generosity"),
        "{h} helped {g} the {g.kind}, and later {g} thanked {h.him}.",
    ),
    Plot(
        "mystery",
        (
            (
                OPENING,
                (
                    (
                        "Every night a strange [noise|song|light] came from somewhere {p.at}, and everyone"
                        " was afraid."
                    ),
                    (
                        "Lately there had been a strange [sound|glow|shadow] {p.at}, and nobody dared to go"
                        " near."
                    ),
                ),
            ),
            (
                (
                    (
                        '"It must be a [ghost|monster]," people said, and they [locked their doors|hid'
                        " under their beds]."
                    ),
                    "Some said it was a [ghost|monster]. Others said it was only the wind.",
                ),
                (
                    "{h} was afraid too. But one night {h.he} took {o.a} and went to see.",
                    (
                        '"Someone has to look," said {h}. {h.he} picked up {o.a}, took a deep breath and'
                        " set out."
                    ),
                ),
                (
                    (
                        "{h.his} knees shook and the [wind howled|branches creaked], but {h.he} did not"
                        " turn back."
                    ),
                    'Step by step {h.he} came closer. "Who is there?" {h.he} called.',
                ),
                (
                    (
                        'And there sat {g.a} called {g}, all alone. "Please do not be angry," said {g}. "I'
                        ' only [wanted some company|wanted to see the stars|was singing to the moon]."'
                    ),
                    (
                        'Out of the dark came a small voice. It was {g.a} called {g}. "I am lost," said'
                        ' {g}, "and I was too shy to ask for help."'
                    ),
                ),
            ),
            (
                (
                    "{h} laughed and sat down beside {g.him}, and {h.he} showed {g.him} {o.the}.",
                    '"You can come home with me," said {h}. {g} carried {o.the}, and {h} led the way.',
                ),
                (
                    "In the morning everyone came to meet {g}, and nobody was afraid any more.",
                    "The next day they told the whole story, and everyone [laughed|felt a little foolish].",
                ),
                LESSON,
            ),
        ),
        ("a strange noise {p.at}", "{h.a_kind} and a mystery {p.at}"),
        "Everyone was afraid of something strange {p.at}. {h} the {h.kind} took {o.a} and went to look, and"
        " found only {g}, {g.a} who needed a friend.",
        ("being brave means going even when you are afraid", "things are less frightening up close"),
        ("courage", "being brave", "fear"),
        "Nobody helped {h} at first, but {h.he} was brave and found {g} the {g.kind}.",
    ),
)
