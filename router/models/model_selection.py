"""Choice of the model for a request that names `auto`: pure functions over a snapshot.

A rule names the allowed models. Of these the cheapest fit one wins, by the predicted price of this request. A fit model
whose first token is predicted too late is passed over; where all are late, the fastest wins. Where none is fit, the
error says why for each.

Each model has its own tokenizer, so a price is exact only after that model has tokenised the prompt, and estimated
before. `choose` asks for the model it would take next, so only the cheapest tokenise. The chosen one is then exact, and
no dearer than any fit one, exact or estimated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from router.models.config import ModelRule


@dataclass(frozen=True, slots=True)
class ModelCriteria:
    """Requirements of a request on any model."""

    task: str = ""
    min_quality: float = 0.0
    tenant: str = ""
    priority: int = 0
    max_ttft_s: float = math.inf


@dataclass(frozen=True, slots=True)
class ModelOption:
    """A served model, with what is known of the request there."""

    name: str
    input_price: float
    """Price of one prompt token; 0 where none is set."""
    output_price: float
    quality: float
    tasks: tuple[str, ...]
    """Tasks of the model. Empty: any."""
    num_prompt_tokens: int
    """Number of prompt tokens, estimated until `counted`."""
    num_output_tokens: int
    """Largest number of output tokens, of all choices."""
    counted: bool = False
    """Whether its tokenizer has read the prompt, and the request was fully checked."""
    fault: str = ""
    """Reason why it cannot serve the request; empty when none is known."""
    ttft_s: float | None = None
    """Predicted TTFT, its wait in the queue included; None before a prediction."""

    @property
    def price(self) -> float:
        """Price of the request if all allowed output is generated."""
        return self.num_prompt_tokens * self.input_price + self.num_output_tokens * self.output_price


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result for one option, in words."""

    option: ModelOption
    fit: bool
    why: str


@dataclass(frozen=True, slots=True)
class CountNeeded:
    """Demand for a tokenisation by this model, and a prediction of its first token where there is a limit."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Result of the choice; an empty `name` means that no model is fit."""

    name: str
    verdicts: tuple[Verdict, ...]
    """Verdicts on all options, in their order."""
    words: str
    """Reason for this model, or for none."""


def needs_count(rules: Sequence[ModelRule], criteria: ModelCriteria) -> bool:
    """Return whether the number of prompt tokens decides which rule governs."""
    for rule in rules:
        if _holds(rule, criteria):
            if rule.counts_tokens:
                return True
            break
    return False


def governing_rule(rules: Sequence[ModelRule], criteria: ModelCriteria, num_prompt_tokens: int) -> int | None:
    """Return the index of the first rule that holds.

    `num_prompt_tokens` matters only where `needs_count`.
    """
    for number, rule in enumerate(rules):
        longest = math.inf if rule.max_prompt_tokens is None else rule.max_prompt_tokens
        if _holds(rule, criteria) and rule.min_prompt_tokens <= num_prompt_tokens <= longest:
            return number
    return None


def _holds(rule: ModelRule, criteria: ModelCriteria) -> bool:
    """Return whether a rule's conditions hold, except those on the number of tokens."""
    return (
        (not rule.tasks or criteria.task in rule.tasks)
        and criteria.min_quality >= rule.min_quality
        and (not rule.tenants or criteria.tenant in rule.tenants)
        and (rule.min_priority is None or criteria.priority >= rule.min_priority)
    )


def unfit(name: str, quality: float, tasks: Sequence[str], criteria: ModelCriteria) -> tuple[str, str] | None:
    """Return the request's field that asks for more than the model has, and why; None when none does."""
    if quality < criteria.min_quality:
        return "min_quality", f"{name} has quality {quality:g}, below the {criteria.min_quality:g} asked"
    if criteria.task and tasks and criteria.task not in tasks:
        return "task", f"{name} is for {', '.join(tasks)}, not for {criteria.task!r}"
    return None


def ttft_limit_s(criteria: ModelCriteria, rule: ModelRule | None) -> float:
    """Return the smaller of the request's and the rule's limit."""
    if rule is None or rule.max_ttft_ms is None:
        return criteria.max_ttft_s
    return min(criteria.max_ttft_s, rule.max_ttft_ms / 1e3)


def allowed(rule: ModelRule | None, name: str) -> bool:
    return rule is None or not rule.models or name in rule.models


def choose(
    criteria: ModelCriteria, rule: ModelRule | None, rule_name: str, options: Sequence[ModelOption]
) -> ModelChoice | CountNeeded:
    """Choose a model.

    `options` are in the order of the configuration, which settles ties.

    Without a `rule` all are allowed.
    """
    limit_s = ttft_limit_s(criteria, rule)
    faults = {option.name: _fault(option, rule, criteria) for option in options}
    late: list[ModelOption] = []
    chosen: ModelOption | None = None
    for option in sorted(options, key=lambda option: option.price):  # a stable sort
        if faults[option.name]:
            continue
        if not option.counted or (option.ttft_s is None and limit_s < math.inf):
            return CountNeeded(option.name)
        if option.ttft_s is not None and option.ttft_s > limit_s:
            late.append(option)
            continue
        chosen = option
        break
    fastest = chosen is None and bool(late)
    if fastest:
        chosen = min(late, key=lambda option: (option.ttft_s, option.price))
    verdicts = tuple(
        Verdict(option, not faults[option.name], faults[option.name] or _why(option, chosen, late, fastest, limit_s))
        for option in options
    )
    return ModelChoice("" if chosen is None else chosen.name, verdicts, _words(rule_name, chosen, fastest, verdicts))


def _fault(option: ModelOption, rule: ModelRule | None, criteria: ModelCriteria) -> str:
    if not allowed(rule, option.name):
        return "not allowed by the rule"
    if (lack := unfit("it", option.quality, option.tasks, criteria)) is not None:
        return lack[1]
    return option.fault


def _why(
    option: ModelOption, chosen: ModelOption | None, late: Sequence[ModelOption], fastest: bool, limit_s: float
) -> str:
    assert chosen is not None, "who has no fault is looked at"
    if option is chosen and not fastest:
        return "the cheapest that is fit" if option.price else "the first that is fit and costs nothing"
    if option in late:
        assert option.ttft_s is not None
        reason = f"first token predicted in {option.ttft_s * 1e3:.4g} ms, the limit is {limit_s * 1e3:.4g} ms"
        return f"{reason}; the fastest that is fit" if option is chosen else reason
    return "no cheaper" if option.counted else "estimated no cheaper"


def _words(rule_name: str, chosen: ModelOption | None, fastest: bool, verdicts: Sequence[Verdict]) -> str:
    governs = f"rule {rule_name!r}:" if rule_name else "no rule holds:"
    others = [verdict for verdict in verdicts if verdict.option is not chosen]
    if chosen is None:
        return f"{governs} no model is fit: {_list(others)}"
    price = f" at {chosen.price:.6g}" if chosen.price else ""
    best = "all that are fit are predicted to be late, and it is the fastest" if fastest else "the cheapest that is fit"
    return f"{governs} {best}{price}" + (f"; passed over: {_list(others)}" if others else "")


def _list(verdicts: Sequence[Verdict]) -> str:
    return "; ".join(f"{verdict.option.name} ({verdict.why})" for verdict in verdicts)
