"""Settings of the served models, and of the choice for a request that names `auto`."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cluster.config import Config, read_file
from engine.model.hub import ModelPath
from router.models.fleet_config import FleetConfig
from router.models.output.output_format import AUTO as AUTO_FORMAT

AUTO = "auto"
"""Model name of requests that leave the choice to the router."""

Share = Annotated[float, Field(ge=0, le=1)]


class ModelEntry(Config):
    """One served model."""

    path: ModelPath
    """Model directory, or a repository of the Hugging Face Hub as org/name[@revision]: config and tokenizer; the router
    neither reads nor fetches weights."""
    name: str = Field(default="", max_length=256)
    """Name for clients. Default: the directory's or the repository's name, without the owner."""
    input_price: NonNegativeFloat | None = None
    """Price of a million prompt tokens, in a unit of your own. Set both prices or neither."""
    output_price: NonNegativeFloat | None = None
    """Price of a million completion tokens."""
    quality: Share = 0.0
    """Quality between 0 and 1; requests may ask for a minimum."""
    tasks: tuple[str, ...] = ()
    """Tasks that the model is good at. Empty: any."""
    tool_parser: str = AUTO_FORMAT
    """Form of the model's tool calls, by vLLM's names: `hermes`, `llama3_json`, `mistral`, ... (`none`: calls stay
    text). `auto` goes by the model's chat template."""
    reasoning_parser: str = AUTO_FORMAT
    """Form of the model's reasoning, by vLLM's names: `qwen3`, `deepseek_r1`, `openai_gptoss`, ... (`none`: reasoning
    stays text). `auto` goes by the model's chat template."""
    preprocessor: str = ""
    """Address of the preprocessor, as host:port, that makes pictures, sounds and videos ready for the model; several
    are separated by commas. Empty: the model reads text only."""

    @model_validator(mode="after")
    def _both_prices(self) -> Self:
        if (self.input_price is None) != (self.output_price is None):
            raise ValueError("input_price and output_price are set together or not at all")
        return self

    @field_validator("preprocessor")
    @classmethod
    def _are_addresses(cls, value: str) -> str:
        for address in _addresses(value):
            host, _, port = address.rpartition(":")
            if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ValueError(f"{address!r} is not host:port")
        return value

    @property
    def preprocessors(self) -> tuple[str, ...]:
        """Addresses of the preprocessors."""
        return _addresses(self.preprocessor)


def _addresses(value: str) -> tuple[str, ...]:
    return tuple(address for part in value.split(",") if (address := part.strip()))


class ModelRule(Config):
    """Rule of model choice.

    The first rule whose conditions all hold names the models that a request for `auto` may use.

    An unset condition holds. Where no rule holds, any model may be used.
    """

    name: str = ""
    """Name in receipts. Default: its number, from 1."""
    min_prompt_tokens: NonNegativeInt = 0
    """Condition: the prompt has at least this number of tokens, counted by the first model of `models` that can read
    it."""
    max_prompt_tokens: PositiveInt | None = None
    """Condition: the prompt has at most this number of tokens."""
    tasks: tuple[str, ...] = ()
    """Condition: the request names one of these tasks."""
    min_quality: Share = 0.0
    """Condition: the request asks for at least this quality."""
    tenants: tuple[str, ...] = ()
    """Condition: the request belongs to one of these tenants."""
    min_priority: int | None = None
    """Condition: the request has at least this priority."""

    models: tuple[str, ...] = ()
    """Models that the request may use. Empty: all."""
    max_ttft_ms: PositiveFloat | None = None
    """Predicted milliseconds to the first token beyond which a model is passed over, unless every fit one is."""

    @property
    def counts_tokens(self) -> bool:
        return self.min_prompt_tokens > 0 or self.max_prompt_tokens is not None


class ModelsConfig(Config):
    """Settings of models in a router."""

    fleet: FleetConfig | None = None
    """Stock servers to serve by, `vllm serve` for the most part: a mapping, or the path of a YAML file with it."""
    models: tuple[ModelEntry, ...] = ()
    """Served models, each with its own name. Of two equally cheap ones `auto` takes the first."""
    model: ModelPath | None = Field(default=None, validate_default=True)
    """Model directory or repository where only one model is served; the same as one entry of `models` with a path."""
    default_model: str = ""
    """Model of requests that name none; may be `auto`. Default: the only model. With several, such requests are
    refused."""
    model_rules: tuple[ModelRule, ...] = ()
    """Rules for `auto`."""
    special_tokens_in_messages: bool = False
    """Whether the name of a special token in a message becomes that token, as in a raw prompt. Otherwise it is read as
    text, so that no text of a client can open a turn of another role."""
    clamp_max_tokens: bool = False
    """Whether a `max_tokens` beyond the context is lowered to what the prompt leaves. Otherwise such a request is
    refused. Set it for coding agents that ask every model for 32,000 tokens."""

    @field_validator("model")
    @classmethod
    def _one_way(cls, model: ModelPath | None, info: ValidationInfo) -> ModelPath | None:
        """Check that `model` and `models` are not both set; an error within `models` is reported there."""
        fleet, models = info.data.get("fleet"), info.data.get("models")
        if fleet is not None and not models:
            return model or fleet.model
        if models is not None and (model is None) == (not models):
            raise ValueError("set either model, for one, or models, for several")
        return model

    @field_validator("fleet", mode="before")
    @classmethod
    def _read_fleet(cls, fleet: Any) -> Any:
        return read_file(Path(fleet)) if isinstance(fleet, str | Path) else fleet

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        if self.model is None:
            return self.models
        return (ModelEntry(path=self.model, name=self.fleet.name if self.fleet is not None else ""),)
