"""Which model `auto` means: the cheapest that is fit and in time, by no more counting than that takes."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.models.config import ModelRule
from router.models.model_selection import (
    CountNeeded,
    ModelChoice,
    ModelCriteria,
    ModelOption,
    choose,
    governing_rule,
    needs_count,
)

SMALL = ModelOption("small", 1e-6, 2e-6, 0.4, (), 100, 50, counted=True, ttft_s=0.2)
LARGE = ModelOption("large", 4e-6, 8e-6, 0.9, ("code", "prose"), 90, 50, counted=True, ttft_s=0.5)
FAST = ModelOption("fast", 9e-6, 9e-6, 0.9, ("code",), 100, 50, counted=True, ttft_s=0.05)


def chosen(options: Sequence[ModelOption], rule: ModelRule | None = None, **criteria: object) -> ModelChoice:
    choice = choose(ModelCriteria(**criteria), rule, "r", options)  # type: ignore[arg-type]
    assert isinstance(choice, ModelChoice)
    return choice


@pytest.mark.parametrize(
    ("criteria", "rule", "name"),
    [
        ({}, None, "small"),
        ({"min_quality": 0.5}, None, "large"),
        ({"task": "code"}, None, "small"),
        ({"task": "code", "min_quality": 0.41}, None, "large"),
        ({"max_ttft_s": 0.1}, None, "fast"),
        ({"max_ttft_s": 0.01}, None, "fast"),
        ({}, ModelRule(models=("large", "fast")), "large"),
        ({}, ModelRule(models=("large", "fast"), max_ttft_ms=100), "fast"),
        ({"min_quality": 0.95}, None, ""),
        ({"min_quality": 0.5}, ModelRule(models=("small",)), ""),
    ],
)
def test_the_cheapest_that_is_fit_and_in_time(criteria: dict[str, object], rule: ModelRule | None, name: str) -> None:
    assert chosen([SMALL, LARGE, FAST], rule, **criteria).name == name


def test_the_words_name_the_rule_and_say_of_each_model_why_it_was_passed_over() -> None:
    broken = replace(LARGE, name="broken", tasks=(), fault="no decode worker")
    choice = chosen([SMALL, LARGE, FAST, broken], min_quality=0.5, max_ttft_s=0.4)
    assert choice.words == (
        "rule 'r': the cheapest that is fit at 0.00135; passed over: "
        "small (it has quality 0.4, below the 0.5 asked); "
        "large (first token predicted in 500 ms, the limit is 400 ms); broken (no decode worker)"
    )
    late = chosen([SMALL, LARGE], max_ttft_s=0.1)
    assert late.words == (
        "rule 'r': all that are fit are predicted to be late, and it is the fastest at 0.0002; passed over: "
        "large (first token predicted in 500 ms, the limit is 100 ms)"
    )
    none = chosen([LARGE, broken], task="poetry")
    assert none.name == ""
    assert none.words == (
        "rule 'r': no model is fit: large (it is for code, prose, not for 'poetry'); broken (no decode worker)"
    )


def test_a_dearer_model_is_not_counted() -> None:
    dear = replace(LARGE, counted=False, ttft_s=None)
    cheap = replace(SMALL, counted=False, ttft_s=None)
    assert choose(ModelCriteria(), None, "", [dear, cheap]) == CountNeeded("small")
    choice = chosen([dear, SMALL])
    assert choice.name == "small"
    assert [verdict.why for verdict in choice.verdicts] == ["estimated no cheaper", "the cheapest that is fit"]
    dearer_than_estimated = replace(SMALL, num_prompt_tokens=10_000)
    assert choose(ModelCriteria(), None, "", [dear, dearer_than_estimated]) == CountNeeded("large")


@pytest.mark.parametrize(
    ("criteria", "num_tokens", "number"),
    [
        ({}, 100, 3),
        ({}, 101, 4),
        ({}, 1000, 4),
        ({}, 1001, None),
        ({"task": "code"}, 5, 0),
        ({"min_quality": 0.5}, 5, 1),
        ({"min_quality": 0.5, "tenant": "a", "priority": 1}, 5, 1),
        ({"tenant": "a", "priority": 1}, 5, 2),
        ({"tenant": "a", "priority": 0}, 5, 3),
        ({"tenant": "b", "priority": 1}, 5, 3),
    ],
)
def test_the_first_rule_that_holds_governs(criteria: dict[str, object], num_tokens: int, number: int | None) -> None:
    rules = [
        ModelRule(tasks=("code",)),
        ModelRule(min_quality=0.5),
        ModelRule(tenants=("a",), min_priority=1),
        ModelRule(max_prompt_tokens=100),
        ModelRule(min_prompt_tokens=101, max_prompt_tokens=1000),
    ]
    asked = ModelCriteria(**criteria)  # type: ignore[arg-type]
    assert governing_rule(rules, asked, num_tokens) == number
    assert needs_count(rules, asked) == (number is None or number >= 3)


# ------------------------------------------------------------------ properties

TASKS = st.sampled_from(["code", "prose", "maths"])
PRICES = st.integers(0, 5).map(lambda price: price / 1e6)


@st.composite
def options(draw: st.DrawFn) -> list[ModelOption]:
    """As they are once counted."""
    return [
        ModelOption(
            name=f"m{number}",
            input_price=draw(PRICES),
            output_price=draw(PRICES),
            quality=draw(st.sampled_from([0.0, 0.3, 0.6, 1.0])),
            tasks=tuple(draw(st.lists(TASKS, max_size=2, unique=True))),
            num_prompt_tokens=draw(st.integers(1, 100)),
            num_output_tokens=draw(st.integers(1, 100)),
            counted=True,
            fault=draw(st.sampled_from(["", "", "", "no decode worker"])),
            ttft_s=draw(st.sampled_from([0.1, 0.2, 0.5, 1.0])),
        )
        for number in range(draw(st.integers(1, 6)))
    ]


WISHES = st.builds(
    ModelCriteria,
    task=st.one_of(st.just(""), TASKS),
    min_quality=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    max_ttft_s=st.sampled_from([math.inf, 0.05, 0.2, 0.5]),
)
RULES = st.one_of(
    st.none(),
    st.builds(
        ModelRule,
        models=st.lists(st.sampled_from([f"m{n}" for n in range(6)]), unique=True).map(tuple),
        max_ttft_ms=st.sampled_from([None, 50.0, 200.0]),
    ),
)


def is_fit(option: ModelOption, rule: ModelRule | None, criteria: ModelCriteria) -> bool:
    permitted = rule is None or not rule.models or option.name in rule.models
    good = option.quality >= criteria.min_quality and (
        not criteria.task or not option.tasks or criteria.task in option.tasks
    )
    return permitted and good and not option.fault


def limit_of(rule: ModelRule | None, criteria: ModelCriteria) -> float:
    return min(criteria.max_ttft_s, rule.max_ttft_ms / 1e3 if rule and rule.max_ttft_ms else math.inf)


def ttft_of(option: ModelOption) -> float:
    assert option.ttft_s is not None
    return option.ttft_s


@given(options(), RULES, WISHES)
def test_never_an_unfit_one_and_of_the_fit_the_cheapest_in_time_or_the_fastest(
    given_options: list[ModelOption], rule: ModelRule | None, criteria: ModelCriteria
) -> None:
    choice = choose(criteria, rule, "", given_options)
    assert isinstance(choice, ModelChoice)
    fit = [option for option in given_options if is_fit(option, rule, criteria)]
    assert [verdict.fit for verdict in choice.verdicts] == [option in fit for option in given_options]
    if not fit:
        assert choice.name == ""
        return
    (best,) = [option for option in fit if option.name == choice.name]
    in_time = [option for option in fit if ttft_of(option) <= limit_of(rule, criteria)]
    if in_time:
        assert best == min(in_time, key=lambda option: option.price)
    else:
        assert best == min(fit, key=lambda option: (ttft_of(option), option.price))


@given(options(), RULES, WISHES, st.data())
def test_a_model_that_becomes_cheaper_is_not_given_up_and_a_dearer_one_is_not_taken_up(
    given_options: list[ModelOption], rule: ModelRule | None, criteria: ModelCriteria, data: st.DataObject
) -> None:
    before = choose(criteria, rule, "", given_options)
    assert isinstance(before, ModelChoice)
    number = data.draw(st.integers(0, len(given_options) - 1))
    option = given_options[number]
    factor = data.draw(st.sampled_from([0.0, 0.5, 2.0]))
    changed = replace(option, input_price=option.input_price * factor, output_price=option.output_price * factor)
    after = choose(criteria, rule, "", [*given_options[:number], changed, *given_options[number + 1 :]])
    assert isinstance(after, ModelChoice)
    if factor < 1 and before.name == option.name:
        assert after.name == option.name
    if factor > 1 and before.name != option.name:
        assert after.name == before.name


@given(options(), RULES, WISHES, st.data())
def test_what_is_chosen_is_counted_and_no_dearer_than_what_the_rest_is_taken_for(
    counted: list[ModelOption], rule: ModelRule | None, criteria: ModelCriteria, data: st.DataObject
) -> None:
    """Estimates may be wrong either way; each model is counted once at most."""
    known = [
        replace(option, counted=False, ttft_s=None, num_prompt_tokens=data.draw(st.integers(1, 100)), fault="")
        for option in counted
    ]
    asked: list[str] = []
    while isinstance(outcome := choose(criteria, rule, "", known), CountNeeded):
        asked.append(outcome.name)
        known = [now if option.name == outcome.name else option for option, now in zip(known, counted, strict=True)]
    assert len(asked) == len(set(asked))
    fit_now = [option for option in known if is_fit(option, rule, criteria)]
    if not outcome.name:
        assert not fit_now
        return
    (best,) = [option for option in known if option.name == outcome.name]
    assert best.counted
    limit_s = limit_of(rule, criteria)
    if ttft_of(best) <= limit_s:
        alternatives = [option for option in fit_now if option.ttft_s is None or option.ttft_s <= limit_s]
        assert best.price == min(option.price for option in alternatives)
    else:
        assert all(option.counted for option in fit_now)
