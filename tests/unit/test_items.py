"""Pictures in prompts: names of their blocks, and engines that share caches of them."""

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core_types import StepBudget
from engine.messages.from_engine import Rejected
from kvcache.block_keys import block_keys, root_key
from kvcache.items import Item, begun_items, items_fault
from support.checked_core import Refusal
from support.core_engine import Engine, generate, lend
from support.core_pair import Pair

ROOT = root_key(b"model", "")
CAT, DOG = b"c" * 16, b"d" * 16
NUM_TRIALS = int(os.environ.get("TANDEM_TRIALS", 300))

identifiers = st.sampled_from([CAT, DOG])


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[Item]]:
    """Tokens and items; all tokens of an item are 1."""
    tokens: list[int] = []
    items: list[Item] = []
    for identifier in draw(st.lists(identifiers, max_size=3)):
        tokens += draw(st.lists(st.integers(0, 2), max_size=5))
        items.append(Item(identifier, len(tokens), draw(st.integers(1, 9))))
        tokens += [1] * items[-1].length
    return tokens + draw(st.lists(st.integers(0, 2), max_size=5)), items


def seen(prompt: tuple[list[int], list[Item]]) -> list[tuple[int, bytes, int]]:
    """What the model sees at each position: the token, or the item and the part of it."""
    tokens, items = prompt
    places = [(token, b"", 0) for token in tokens]
    for item in items:
        for position in range(item.offset, item.end):
            places[position] = (1, item.identifier, position - item.offset)
    return places


@given(prompts(), prompts(), st.booleans(), st.data(), st.integers(1, 5))
def test_names_agree_exactly_as_far_as_the_model_sees_the_same(
    left: tuple[list[int], list[Item]],
    right: tuple[list[int], list[Item]],
    only_others: bool,
    data: st.DataObject,
    width: int,
) -> None:
    if only_others:
        right = left[0], [item._replace(identifier=data.draw(identifiers)) for item in left[1]]
    names = [block_keys(ROOT, tokens, width, items) for tokens, items in (left, right)]
    both = list(zip(*(seen(prompt) for prompt in (left, right)), strict=False))
    common = next((at for at, (one, other) in enumerate(both) if one != other), len(both))
    agree = next(
        (at for at, (one, other) in enumerate(zip(*names, strict=False)) if one != other), min(map(len, names))
    )
    assert agree == common // width


@given(prompts(), st.integers(1, 5), st.integers(0, 12))
def test_a_chain_with_items_can_be_continued_anywhere(
    prompt: tuple[list[int], list[Item]], width: int, split: int
) -> None:
    tokens, items = prompt
    whole = block_keys(ROOT, tokens, width, items)
    split = min(split, len(whole))
    parent = whole[split - 1] if split else ROOT
    rest = tokens[split * width :]
    assert whole[:split] + block_keys(parent, rest, width, items, split * width) == whole
    assert block_keys(ROOT, tokens[: split * width], width, begun_items(items, split * width)) == whole[:split]


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        ([Item(CAT, 0, 4), Item(DOG, 4, 2)], ""),
        ([Item(b"short", 0, 4)], "items[0]: an identifier has 16 bytes, not 5"),
        ([Item(CAT, 0, 4), Item(DOG, 3, 2)], "items[1]: it has 2 tokens from 3 on, the one before ends at 4"),
        ([Item(CAT, 2, 0)], "items[0]: it has 0 tokens from 2 on, the one before ends at 0"),
        ([Item(CAT, 5, 4)], "the last item ends at token 9, the prompt has 8"),
    ],
)
def test_impossible_items_are_named(items: list[Item], fault: str) -> None:
    assert items_fault(items, 8) == fault


def test_no_picture_is_taken_for_another_of_its_size_and_place() -> None:
    """Two pictures take turns on two engines whose caches have the other one's blocks, lent or their own."""
    rng = random.Random(7)
    for trial in range(NUM_TRIALS):
        if trial % 20 == 0:
            pair = Pair(lender_budget=StepBudget(*[rng.choice([5, 64])] * 2))
        before, size, after = rng.randint(0, 5), rng.randint(1, 9), rng.randint(1, 6)
        tokens = (*[2] * before, *[1] * size, *[3] * after)
        for number in range(rng.randint(1, 3)):
            request_id = f"{trial}-{number}"
            items = [Item(rng.choice([CAT, DOG]), before, size)]
            if rng.random() < 0.3:
                pair.lender.serve(generate(f"own-{request_id}", tokens, 1, items=[Item(CAT, before, size)]))
            pair.submit(request_id, tokens, items=items)
            pair.run()
            pair.check_served(request_id, borrows=False)


def test_a_lender_computes_the_begun_part_of_a_picture() -> None:
    pair = Pair()
    tokens, items = (*[2] * 3, *[1] * 8, 3), [Item(CAT, 3, 8)]
    pair.submit("r", tokens, items=items)
    pair.run()
    pair.check_served("r")
    assert pair.tokens[0].account.moved_blocks == 2, "the second one ends within the picture"


def test_an_engine_without_media_refuses_items() -> None:
    engine = Engine(reads_media=False)
    engine.send(generate("r", (1, 2, 3), items=[Item(CAT, 0, 2)]))
    engine.send(lend("l", (1,) * 8, items=[Item(CAT, 0, 2)]))
    rejected, refused = engine.receive(Rejected, Refusal)
    assert (rejected.permanent, rejected.reason) == (True, "items: this worker's engine reads no media")
    assert refused.reason == "items: this worker's engine reads no media"
