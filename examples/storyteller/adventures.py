"""More plots: the ones that leave the house. See ``plots.py`` for how templates are written.

The rescue and the feast turn on what the object is good for, so they take ``{trouble}``, ``{deed}`` and ``{praise}``
from tables keyed by the object's category.
"""

from __future__ import annotations

from plots import FRIENDS, HAS, LESSON, OPENING, Plot

# category -> (what goes wrong, how the object puts it right)
RESCUES: dict[str, tuple[str, str]] = {
    "light": (
        (
            "One [moonless|foggy] night {g}, {g.a}, lost {g.his} way {p.at}. It was so dark that {g.he}"
            " could not see {g.his} own feet."
        ),
        (
            '{h} heard {g} calling. {h.he} lit {o.the} and held it up high. "Walk towards the light!"'
            " called {h}. Step by step {g} followed the glow, until {g.he} was safe."
        ),
    ),
    "sound": (
        "One day a thick [white|grey] mist came down, and {g}, {g.a}, was lost {p.at}.",
        (
            "{h} took {o.the} and {o.sounded} it as loudly as {h.he} could. Far away {g} heard it and"
            " [turned around|began to run], and the sound led {g.him} all the way home."
        ),
    ),
    "reach": (
        "One [wet|windy] day {g}, {g.a}, slipped {p.at} and fell into a deep [hole|ditch|pit].",
        (
            '{h} lay down at the edge and let down {o.the}. "Hold on tight!" said {h}. {h.he} pulled and'
            " pulled, and out came {g}, [covered in mud|shaking all over]."
        ),
    ),
    "warm": (
        (
            "One [night|evening] the snow came early, and {g}, {g.a}, was caught in it {p.at},"
            " [shivering|too cold to walk]."
        ),
        (
            "{h} ran through the snow with {o.the} and put it around {g}'s shoulders. Little by little {g}"
            " stopped shivering."
        ),
    ),
    "brew": (
        "That winter {g}, {g.a}, fell ill {p.at}, and nothing could make {g.him} warm.",
        (
            "{h} carried {o.the} through the [rain|snow] and made something hot [with mint|with honey|with"
            " ginger]. {g} drank it slowly, and the colour came back to {g.his} face."
        ),
    ),
    "water": (
        "One dry summer a spark set fire to the hay {p.at}, where {g}, {g.a}, was asleep.",
        (
            "{h} filled {o.the} at the stream and ran. Again and again {h.he} threw water on the flames,"
            " until the fire was out and {g} was safe."
        ),
    ),
    "carry": (
        (
            "{g}, {g.a}, had picked apples {p.at} all day, and now a storm was coming and {g.he} could not"
            " carry them home."
        ),
        (
            "{h} came running with {o.the}. Together they filled it to the top, again and again, and the"
            " last apple was indoors before the first drop fell."
        ),
    ),
    "guide": (
        "One evening {g}, {g.a}, was lost {p.at}. It was getting dark, and every path looked the same.",
        (
            '{h} took out {o.the} and studied it carefully. "This way," said {h}. They turned left and'
            " right and left again, and just before dark they were home."
        ),
    ),
    "tool": (
        "One night a storm broke the roof of the little house {p.at} where {g}, {g.a}, lived.",
        (
            "{h} came with {o.the} and worked [all day|until the moon came up], and {g} handed up the"
            " boards. By morning the roof was as good as new."
        ),
    ),
    "open": (
        "One day {g}, {g.a}, was trapped {p.at} behind a heavy door that would not open.",
        (
            '"Wait!" called {h}, and {h.he} tried {o.the}. It turned once, it turned twice, and then the'
            " door swung open and {g} ran out into the sun."
        ),
    ),
    "food": (
        "One cold day {h} met {g}, {g.a}, {p.at}. {g} had not eaten for two days and growled at everyone.",
        (
            '{h} sat down and cut {o.the} in two. "Half for you," said {h}, "and half for me." {g} ate'
            " every crumb, and then, for the first time, {g.he} smiled."
        ),
    ),
    "charm": (
        "One day {h} found {g}, {g.a}, crying {p.at}. Everyone had forgotten {g.his} birthday.",
        (
            '{h} thought for a moment. Then {h.he} put {o.the} into {g}\'s hands. "Happy birthday," said'
            " {h}. {g} looked at it and began to [smile|laugh], and soon they were [dancing|singing]"
            " together."
        ),
    ),
}

# category -> what the guests say of the object at the feast
PRAISE: dict[str, str] = {
    "light": "When the sun went down, {o.the} lit the whole feast with a [golden|warm] light.",
    "sound": "When the talk grew dull, {h} {o.sounded} {o.the}, and everyone began to dance.",
    "reach": "They hung a hundred little flags on {o.the}, and it was the prettiest thing there.",
    "warm": "When the night grew cold, the little ones slept under {o.the}.",
    "brew": "Everyone was thirsty, and {o.the} was filled again and again.",
    "water": "The cook had no water, so {o.the} saved the soup.",
    "carry": "There was nothing to bring the bread in, so {o.the} went round and round the table.",
    "guide": "When three guests got lost, {o.the} brought them safely to the table.",
    "tool": "The long table broke in the middle, and with {o.the} it was mended in no time.",
    "open": "The cellar door was locked, and {o.the} was the only thing that fitted.",
    "food": "{o.the} was shared out, and everyone agreed that nothing had ever tasted so good.",
    "charm": "They put {o.the} in the middle of the table, and everyone who saw it smiled.",
}

ADVENTURES: tuple[Plot, ...] = (
    Plot(
        "rescue",
        (
            (OPENING, HAS, ("", "The others [laughed at it|said it was useless], but {h} did not care.")),
            (
                ("{trouble}",),
                ("", '"Help!" cried {g}. "Is anybody there?"', "Nobody knew what to do."),
                ("{deed}",),
            ),
            (
                (
                    (
                        '"Thank you," said {g}. "Without you and your {o.noun} I do not know what I would'
                        ' have done."'
                    ),
                    '"You are the kindest {h.kind} I know," said {g}.',
                    "",
                ),
                FRIENDS,
                LESSON,
            ),
        ),
        ("{h.a_kind} who saves {g.a_kind} with {o.a}", "{h.a} who helps a friend {p.at}"),
        "{g} the {g.kind} was in trouble {p.at}. {h} the {h.kind} came with {o.a} and helped, and they"
        " became friends.",
        ("even a small thing can be a great help", "a good heart is the best help of all"),
        ("helping others", "friendship", "kindness"),
        "{h} helped {g} the {g.kind}, with the help of {o.the}.",
    ),
    Plot(
        "feast",
        (
            (
                OPENING,
                (
                    "One autumn there was to be a great feast {p.at}, and everyone had to bring something.",
                    "Every year there was a feast {p.at}, and every guest brought a gift.",
                ),
            ),
            (
                (
                    '{h} had nothing but {o.a}. "They will laugh at me," {h.he} thought.',
                    "{h} looked in every cupboard, but all {h.he} could find was {o.a}.",
                ),
                (
                    (
                        'On the way {h.he} met {g.a} called {g}. "I want to go home," said {h}. "My gift is'
                        ' too small." "Nonsense," said {g}. "Come with me."'
                    ),
                    (
                        "At the gate {h} wanted to turn back, but {g.a} called {g} took {h.him} by the"
                        ' hand. "No gift is too small," said {g}.'
                    ),
                ),
                ("{praise}",),
            ),
            (
                (
                    '"Three cheers for {h}!" cried {g}, and {h} turned quite red.',
                    '"What would we have done without {h}?" said {g}, and everyone clapped.',
                ),
                FRIENDS + LESSON,
            ),
        ),
        ("a feast {p.at}", "{h.a_kind} who brings {o.a} to a feast"),
        "{h} the {h.kind} was ashamed to bring only {o.a} to the feast {p.at}. {g} the {g.kind} brought"
        " {h.him} along, and it turned out to be just what was needed.",
        ("no gift is too small", "what you have is enough when you share it"),
        ("sharing", "generosity", "being yourself"),
        "{g} the {g.kind} told {h} not to turn back.",
    ),
    Plot(
        "journey",
        (
            (
                OPENING,
                (
                    "More than anything {h.he} wanted to go {p.to}, but it was far away.",
                    "All {h.his} life {h.he} had dreamed of going {p.to}.",
                ),
                (
                    "So one morning {h} packed {o.a} and set out.",
                    "One day {h.he} took {o.a} and closed the door behind {h.him}.",
                ),
            ),
            (
                (
                    (
                        "On the first day it rained. On the second day the wind blew. On the third day"
                        " {h.he} met {g.a} called {g}."
                    ),
                    (
                        "The first hill was steep and the second was steeper. At the top of the third sat"
                        " {g.a} called {g}."
                    ),
                ),
                (
                    (
                        '"Turn back," said {g}. "It is too far." "It is not too far," said {h}, "if I take'
                        ' one step and then another."'
                    ),
                    (
                        '"Nobody has ever walked so far," said {g}. "Then come with me," said {h}, "and we'
                        ' will be the first."'
                    ),
                ),
                (
                    (
                        "So {g} came too. They shared their bread, and when they were tired they looked at"
                        " {o.the} and told stories."
                    ),
                    "{g} carried {o.the}, {h} sang, and the road did not seem so long.",
                ),
            ),
            (
                (
                    (
                        "And one evening there it was, {p.the}, [golden in the last light|more beautiful"
                        " than they had ever dreamed]."
                    ),
                    "At last they stood {p.at}, and neither of them could say a word.",
                ),
                LESSON + FRIENDS,
            ),
        ),
        (
            "{h.a_kind} who goes on a journey {p.to}",
            "a long journey {p.to}",
            "{h.a_kind} who travels {p.to} with {o.a}",
        ),
        "{h} the {h.kind} set out {p.to} with {o.a}. On the way {h.he} met {g} the {g.kind}, and they got"
        " there together.",
        ("a long road is made of small steps", "every road is shorter with a friend"),
        ("not giving up", "patience", "adventure"),
        "{g} the {g.kind} walked with {h}.",
    ),
    Plot(
        "race",
        (
            (
                OPENING,
                (
                    (
                        "{g}, {g.a}, lived close by and [never stopped boasting|thought {g.he} was the"
                        " fastest of all]."
                    ),
                ),
            ),
            (
                (
                    '"Let us race {p.to}," said {g}, "and the winner shall have {o.a}."',
                    "One day there was to be a race {p.to}, and the prize was {o.a}.",
                ),
                (
                    "Off they went. {g} ran like the wind, and soon {h} could not see {g.him} any more.",
                    "One, two, three! {g} was gone in a flash, and {h} was left behind.",
                ),
                (
                    (
                        "But {g} was so sure of winning that {g.he} [lay down for a nap|stopped to pick"
                        " berries|stopped to admire {g.himself} in a puddle]."
                    ),
                    "But halfway there {g} took a short cut and got stuck in the [mud|brambles].",
                ),
                (
                    (
                        "{h} did not stop. {h.he} went on and on, one foot after the other, and was the"
                        " first to arrive {p.at}."
                    ),
                    "{h} came past, slow and steady, and never stopped until {h.he} was {p.at}.",
                ),
            ),
            (
                (
                    '{h} won {o.the}, and {g} said, "You ran a good race."',
                    '"Well done," said {g}, a little out of breath. "{o.the} is yours."',
                ),
                LESSON + FRIENDS,
            ),
        ),
        ("a race between {h.a_kind} and {g.a_kind}", "{h.a_kind} who wins {o.a} in a race"),
        "{h} the {h.kind} raced against {g} the {g.kind}. {g} was faster, but {h} never stopped, and so {h}"
        " won {o.a}.",
        ("slow and steady is fast enough", "those who boast should look where they are going"),
        ("patience", "not giving up", "pride"),
        "Nobody helped {h}. {h.he} won the race alone.",
    ),
    Plot(
        "wish",
        (
            (
                OPENING,
                (
                    (
                        'One night, {p.at}, {h.he} found {o.a}. It was warm to the touch, and it spoke. "I'
                        ' can grant one wish," it said.'
                    ),
                    (
                        'One evening {h.he} picked up {o.a} {p.at}. "Make a wish," it whispered, "but only'
                        ' one."'
                    ),
                ),
            ),
            (
                (
                    (
                        "{h} thought of [gold|a castle|a golden crown]. {h.he} thought of [cakes|a hundred"
                        " cakes|a white horse]."
                    ),
                    '"I could be rich," thought {h}. "I could be [famous|a king|as strong as ten bears]."',
                ),
                (
                    "Just then {h.he} saw {g.a} called {g}, who sat all alone and coughed in the cold.",
                    (
                        "But on the way home {h.he} met {g.a} called {g}, who could not [walk|see|sing] any"
                        " more."
                    ),
                ),
                (
                    '{h} did not think any longer. "I wish that {g} was well again," said {h}.',
                    '{h} held {o.the} tightly. "Please help {g}," {h.he} said. "That is my wish."',
                ),
            ),
            (
                (
                    (
                        "{o.the} shone once, like a star, and {g} [jumped up|began to laugh], as well as"
                        " could be."
                    ),
                    "There was a flash of [blue|green|silver] light, and {g} was well.",
                ),
                FRIENDS,
                LESSON,
            ),
        ),
        (
            "{o.a} that grants wishes",
            "{h.a_kind} who gets one wish",
            "{h.a_kind} and {o.a} that can grant a wish",
        ),
        "{h} the {h.kind} found {o.a} that could grant one wish. {h.he} used it to make {g} the {g.kind}"
        " well again.",
        ("the best wish is a wish for somebody else", "a friend is worth more than gold"),
        ("kindness", "generosity", "friendship"),
        "{h} helped {g} the {g.kind} with a wish.",
    ),
)
