"""Shell of the model choice: tokenises the prompt with the models that `model_selection.py` asks for."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import Forbidden, InvalidRequest, ServiceError, Unavailable
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival
from router.models.config import ModelRule, ModelsConfig
from router.models.media import ReadingContext, sources_of
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.models.model_selection import (
    CountNeeded,
    ModelChoice,
    ModelCriteria,
    ModelOption,
    Verdict,
    allowed,
    choose,
    governing_rule,
    needs_count,
    ttft_limit_s,
    unfit,
)
from router.models.prompt_reading import PreparedPrompt, encode, read
from router.models.prompts.prompts import prompt_kind
from router.validation import DEFAULT_MAX_TOKENS

MAX_COUNTED_MODELS = 8
"""Largest number of models whose tokenisers read the prompt of one request for "auto"."""
NO_WORKER = "no decode worker"
POLL_S, MOST_POLL_S = 0.02, 0.25
"""Seconds between looks for a decode worker that joins, growing, since thousands of requests may wait."""


@dataclass(frozen=True, slots=True)
class SelectedModel:
    """The model that serves a request, for good."""

    model: ModelRuntime
    reason: str
    """Reason in words."""
    reading: PreparedPrompt
    verdicts: tuple[Verdict, ...] = ()
    """Verdicts on all models, for requests that named `auto`."""


class ModelSelector:
    """Selector for requests that name `auto`."""

    def __init__(self, config: ModelsConfig, models: ModelRuntimes) -> None:
        self._config = config
        self._models = models

    async def choose(
        self,
        request: pb.GenerateRequest,
        context: ReadingContext,
        give_up_at: float,
        arrival: Arrival,
        predict: bool = False,
    ) -> SelectedModel:
        """Choose a model.

        Where only workers are missing, wait for them until `give_up_at`, of the monotonic clock.

        `predict`: predict the first token even without a limit to it. The caller must close the reading. Raises
        InvalidRequest or Unavailable with a reason for each model.
        """
        prompt_kind(request)
        first_token_s = request.max_ttft_ms / 1e3 if request.HasField("max_ttft_ms") else math.inf
        criteria = ModelCriteria(request.task, request.min_quality, request.tenant, request.priority, first_token_s)
        models = [model.for_request(context.request_id) for model in self._models]
        looking = _Selection(request, context, arrival, models, MAX_COUNTED_MODELS)
        chosen: SelectedModel | None = None
        try:
            chosen = await self._choose(criteria, looking, give_up_at, predict)
            return chosen
        finally:
            looking.close(chosen)

    async def _choose(
        self, criteria: ModelCriteria, looking: "_Selection", give_up_at: float, predict: bool
    ) -> SelectedModel:
        request = looking.request
        rule, rule_name = await self._rule(criteria, looking)
        _check_vocabulary(request, rule, looking.models)
        predict |= ttft_limit_s(criteria, rule) < math.inf
        poll_s = POLL_S
        while True:
            outcome = choose(criteria, rule, rule_name, [looking.option(model) for model in looking.models])
            if isinstance(outcome, CountNeeded):
                await looking.count(looking.named(outcome.name), predict)
            elif outcome.name:
                reading = looking.findings[outcome.name].reading
                assert reading is not None, "what is chosen is counted and has no fault"
                return SelectedModel(looking.named(outcome.name), outcome.words, reading, outcome.verdicts)
            elif any(verdict.why == NO_WORKER for verdict in outcome.verdicts) and time.monotonic() < give_up_at:
                await asyncio.sleep(poll_s)
                poll_s = min(MOST_POLL_S, 1.5 * poll_s)
            else:
                raise _refusal(outcome, criteria, rule, looking)

    async def _rule(self, criteria: ModelCriteria, looking: "_Selection") -> tuple[ModelRule | None, str]:
        """Return the governing rule and its name."""
        rules = self._config.model_rules
        num_tokens = 0
        if needs_count(rules, criteria):
            able = (model for model in looking.models if not model.fault(looking.request))
            if (reader := next(able, None)) is not None:
                num_tokens = len(await looking.prompt_of(reader))
        number = governing_rule(rules, criteria, num_tokens)
        return (None, "") if number is None else (rules[number], rules[number].name or str(number + 1))


def _check_vocabulary(request: pb.GenerateRequest, rule: ModelRule | None, models: Sequence[ModelRuntime]) -> None:
    able = [model for model in models if allowed(rule, model.name)]
    if request.token_ids and len({model.encoder.vocabulary for model in able}) > 1:
        names = ", ".join(model.name for model in able)
        raise InvalidRequest("token_ids", f"have different meanings in {names}: name a model, or send text")


@dataclass(frozen=True, slots=True)
class _Finding:
    """Result of one model's tokenisation."""

    reading: PreparedPrompt | None
    error: InvalidRequest | None
    ttft_s: float | None


class _Selection:
    """Selection for one request, with one tokenizer after the other."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        context: ReadingContext,
        arrival: Arrival,
        models: Sequence[ModelRuntime],
        max_tokenizers: int,
    ) -> None:
        self.request = request
        self.models = models
        """Models, each bound to the files of one revision."""
        self._arrival = arrival
        self._context = context
        self._sources = sources_of(request)
        self.findings: dict[str, _Finding] = {}
        """Results by model."""
        self._max_tokenizers = max_tokenizers
        self._prompts: dict[bytes, list[int]] = {}
        """Prompts by tokenizer; models with equal tokenizers share one."""

    def named(self, name: str) -> ModelRuntime:
        return next(model for model in self.models if model.name == name)

    async def prompt_of(self, model: ModelRuntime) -> list[int]:
        """Return the prompt in a model's tokens.

        Raises InvalidRequest.
        """
        identity = self._identity(model)
        if identity not in self._prompts:
            tenant, deadline = self._arrival.tenant, self._context.deadline
            prompt = await encode(model, self.request, self._sources, tenant, deadline)
            self._prompts[identity] = prompt
            self._arrival.tokens_read += len(prompt)
        return self._prompts[identity]

    def _identity(self, model: ModelRuntime) -> bytes:
        """Return what models with equal tokens for the prompt share; placeholders of media are a model's own."""
        return model.name.encode() if self._sources else model.encoder.reading

    def close(self, chosen: SelectedModel | None) -> None:
        """Let go of the media that were read for other models than the chosen one."""
        for finding in self.findings.values():
            if finding.reading is not None and (chosen is None or finding.reading is not chosen.reading):
                finding.reading.close()

    async def count(self, model: ModelRuntime, predict: bool) -> None:
        """Tokenise and check the request with a model."""
        ttft_s = None
        try:
            prompt = await self.prompt_of(model)
            reading = await read(model, self.request, self._arrival, self._context, prompt)
        except InvalidRequest as error:
            self.findings[model.name] = _Finding(None, error, None)
            return
        try:
            if model.decode_workers():  # without one it is not chosen now, and looked at again when there is one
                ttft_s = self._hold(model, reading, predict)
        except InvalidRequest as error:
            reading.close()
            self.findings[model.name] = _Finding(None, error, None)
        else:
            self.findings[model.name] = _Finding(reading, None, ttft_s)

    def _hold(self, model: ModelRuntime, reading: PreparedPrompt, predict: bool) -> float | None:
        """Return the predicted TTFT.

        Raises InvalidRequest for a request that no worker of the model could hold.
        """
        sampling = reading.sampling
        chains = [reading.prompt] * sampling.n
        to_score = sampling.HasField("prompt_logprobs")
        demand, keys = model.needs(
            reading.prompt, sampling, self._context.cache_salt, chains, to_score, items=reading.items
        )
        if not predict:
            return None
        ttft_s = model.predicted_ttft_s(self.request.priority, demand, keys)
        return math.inf if ttft_s is None else ttft_s

    def option(self, model: ModelRuntime) -> ModelOption:
        finding = self.findings.get(model.name)
        if finding is not None and finding.reading is not None:
            num_prompt, sampling = len(finding.reading.prompt), finding.reading.sampling
            num_output = sampling.max_tokens * sampling.n
        else:
            num_prompt = model.encoder.estimate(self.request)
            num_output = self._most_output(model, num_prompt)
        return ModelOption(
            name=model.name,
            input_price=model.costs.input_price,
            output_price=model.costs.output_price,
            quality=model.entry.quality,
            tasks=model.entry.tasks,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            counted=finding is not None,
            fault=self._fault(model, finding),
            ttft_s=None if finding is None else finding.ttft_s,
        )

    def _fault(self, model: ModelRuntime, finding: _Finding | None) -> str:
        if not model.decode_workers():
            return NO_WORKER
        if finding is not None:
            return str(finding.error or "")
        if fault := model.fault(self.request):
            return fault
        if len(self._prompts) >= self._max_tokenizers and self._identity(model) not in self._prompts:
            return f"not looked at: {len(self._prompts)} tokenizers have read the prompt, the limit"
        return ""

    def _most_output(self, model: ModelRuntime, num_prompt: int) -> int:
        """Return the largest output, before the request is checked."""
        sampling = self.request.sampling
        left = max(1, model.model_dir.max_context_tokens - num_prompt)
        most = sampling.max_tokens if sampling.HasField("max_tokens") else min(DEFAULT_MAX_TOKENS, left)
        most = min(most, left) if model.clamps else most
        return max(1, most) * (max(1, sampling.n) if sampling.HasField("n") else 1)


def _refusal(choice: ModelChoice, criteria: ModelCriteria, rule: ModelRule | None, looking: _Selection) -> ServiceError:
    """Return the refusal, typed by what all allowed models have in common."""
    verdicts = [verdict for verdict in choice.verdicts if allowed(rule, verdict.option.name)]
    if not verdicts:
        return Forbidden("the rule that governs this request allows none of the models that its key may use", "model")
    if any(verdict.why == NO_WORKER for verdict in verdicts):
        return Unavailable(choice.words, "model")
    errors = [_error(verdict, criteria, looking) for verdict in verdicts]
    first = errors[0]
    if all((error.field, error.message) == (first.field, first.message) for error in errors):
        return first  # the fault is the request's
    same_field = all(error.field == first.field for error in errors)
    return InvalidRequest(first.field if same_field else "model", choice.words)


def _error(verdict: Verdict, criteria: ModelCriteria, looking: _Selection) -> InvalidRequest:
    """Return the error of a model that was not fit."""
    option = verdict.option
    if (lack := unfit(option.name, option.quality, option.tasks, criteria)) is not None:
        return InvalidRequest(*lack)
    finding = looking.findings.get(option.name)
    if finding is not None and finding.error is not None:
        return finding.error
    return InvalidRequest(prompt_kind(looking.request), verdict.why)
