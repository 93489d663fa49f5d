"""Settings of which models a router serves, and of how one is chosen for a request that names `auto`."""

from pathlib import Path
from typing import Annotated, Self

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

from cluster.config import Config

AUTO = "auto"
"""What a request names to have its model chosen."""

Share = Annotated[float, Field(ge=0, le=1)]


class ModelEntry(Config):
    """One model served."""

    path: Path
    """The model directory: config and tokenizer; the weights are not read."""
    name: str = Field(default="", max_length=256)
    """What clients call it. Default: the directory's name."""
    input_price: NonNegativeFloat | None = None
    """For a million prompt tokens, in a unit of your own. Set both prices or neither."""
    output_price: NonNegativeFloat | None = None
    """For a million completion tokens."""
    quality: Share = 0.0
    """Requests may ask for one of at least so much."""
    tasks: tuple[str, ...] = ()
    """What it is good at. Empty: anything."""

    @model_validator(mode="after")
    def _both_prices(self) -> Self:
        if (self.input_price is None) != (self.output_price is None):
            raise ValueError("input_price and output_price are set together or not at all")
        return self


class ModelRule(Config):
    """The first rule whose conditions all hold says which models a request for `auto` may go to. Conditions left out
    hold; where no rule holds, it may go to any."""

    name: str = ""
    """In receipts. Default: its number, from 1."""
    min_prompt_tokens: NonNegativeInt = 0
    """Counted by the first model of `models` that can read the prompt."""
    max_prompt_tokens: PositiveInt | None = None
    tasks: tuple[str, ...] = ()
    """The request names one of these."""
    min_quality: Share = 0.0
    """The request asks for at least so much."""
    tenants: tuple[str, ...] = ()
    """It is of one of these."""
    min_priority: int | None = None

    models: tuple[str, ...] = ()
    """Those it may go to. Empty: all."""
    max_ttft_ms: PositiveFloat | None = None
    """A model whose first token is predicted to take longer is passed over, unless every fit one is."""

    @property
    def counts_tokens(self) -> bool:
        return self.min_prompt_tokens > 0 or self.max_prompt_tokens is not None


class ModelsConfig(Config):
    """Part of the router's."""

    models: tuple[ModelEntry, ...] = ()
    """Each with a name of its own. In order: of two equally cheap ones `auto` takes the first."""
    model: Path | None = Field(default=None, validate_default=True)
    """A model directory, where only one model is served; the same as one entry of `models` that has a path only."""
    default_model: str = ""
    """For requests that name none; may be `auto`. Default: the only one. With several, such requests are refused."""
    model_rules: tuple[ModelRule, ...] = ()
    """For `auto`."""
    max_counted_models: PositiveInt = 8
    """Tokenizers that may read one request for `auto`, the cheapest models' first."""

    @field_validator("model")
    @classmethod
    def _one_way(cls, model: Path | None, info: ValidationInfo) -> Path | None:
        """Of this field, so that the error names it. Where `models` is wrong itself, that is said."""
        if "models" in info.data and (model is None) == (not info.data["models"]):
            raise ValueError("set either model, for one, or models, for several")
        return model

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        return self.models if self.model is None else (ModelEntry(path=self.model),)
