"""Settings of served models and fleets of stock servers, of the choice by `auto`, and counters of a model's cost."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

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
from cluster.network.kubernetes import ApiServerSettings, server_url
from engine.model.hub import ModelPath
from protos import inference_pb2 as pb
from router.models.output.output_format import AUTO as AUTO_FORMAT

Role = Literal["decode", "prefill", "both"]
Port = Field(ge=1, le=65535)
KINDS = "url", "dns", "file", "service", "pods"


class ServiceEntry(Config):
    """Kubernetes Service whose EndpointSlices list the servers."""

    name: str
    namespace: str = ""
    """Namespace of the Service. Default: the router's own."""
    port: int = Port
    """Port of each server, whatever the Service calls it."""


class PodsEntry(Config):
    """Kubernetes pods that are servers."""

    selector: str
    """Label selector, such as `app=vllm,tier in (chat)`."""
    namespace: str = ""
    """Namespace of the pods. Default: the router's own."""
    port: int = Port
    """Port of the server in each pod."""


class ServerEntry(Config):
    """One or several servers; exactly one of url, dns, file, service and pods."""

    url: str = ""
    """Address of one server, such as http://10.0.0.5:8000."""
    dns: str = ""
    """Host name and port; every address of the name is a server: the IPv4 addresses, or the IPv6 ones where it has no
    others. With https:// before it the servers speak TLS."""
    file: Path | None = None
    """File with a URL a line, or a YAML list of `{url, role}`, which is read again when it changes."""
    service: ServiceEntry | None = None
    """Kubernetes Service whose EndpointSlices list the servers: name, port, and namespace unless the router's own."""
    pods: PodsEntry | None = None
    """Kubernetes pods that are servers: selector, such as `app=vllm`, port, and namespace unless the router's own."""
    role: Role = "both"
    """decode: serves requests. prefill: only lends blocks, which needs TandemConnector. both: serves and lends."""
    https: bool = False
    """Whether servers of `service` and `pods` speak TLS. Their certificates must have their IP addresses."""
    kv_events_port: int | None = Field(default=5557, ge=1, le=65535)
    """Port at which each server publishes KV events (vLLM's `--kv-events-config`). Unset: the router assumes that a
    server caches what it was sent."""
    kv_replay_port: int | None = Field(default=5558, ge=1, le=65535)
    """Port of the `replay_endpoint` of KV events, from which lost events are asked again."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        return server_url(value) if value else value

    @field_validator("dns")
    @classmethod
    def _is_name(cls, value: str) -> str:
        return server_url(value) if value else value

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [kind for kind in KINDS if getattr(self, kind)]
        if len(kinds) != 1:
            given = " and ".join(kinds) or "none of them"
            raise ValueError(f"needs exactly one of {', '.join(KINDS)}, and has {given}")
        return self


class FleetConfig(Config):
    """Settings of a fleet of stock servers."""

    servers: tuple[ServerEntry, ...] = Field(min_length=1)
    """Servers, and places that list servers."""
    model: ModelPath | None = None
    """Directory or repository of the model's config, tokenizer and chat template. Default: what the first server that
    answers names as its model, if this host can read it."""
    name: str = Field(default="", max_length=256)
    """Name of the model for clients. Default: the name under which the first server serves it."""
    api_key_file: Path | None = None
    """File with the servers' API key."""
    ca_file: Path | None = None
    """Authorities of the certificates of servers at https:// URLs; unset: those of the system."""
    kubernetes: ApiServerSettings = ApiServerSettings()
    """API server that `service` and `pods` ask."""
    continue_approximately: bool = False
    """Whether a stream whose server died goes on where another server cannot continue it exactly: under a grammar, with
    penalties, with a seed. Otherwise it ends with ABORTED."""


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


class Costs:
    """Counters since the router started."""

    def __init__(self, entry: ModelEntry) -> None:
        self.prices = _prices(entry)
        """Prices of a million tokens; None where none are set."""
        self.num_requests = 0
        """Requests with at least one message."""
        self.input_tokens = 0
        self.output_tokens = 0

    @property
    def input_price(self) -> float:
        """Price of one prompt token; 0 where none is set."""
        return self.prices.input_per_million / 1e6 if self.prices else 0.0

    @property
    def output_price(self) -> float:
        return self.prices.output_per_million / 1e6 if self.prices else 0.0

    def used(self, input_tokens: int, output_tokens: int) -> None:
        """Count a request that is over."""
        self.num_requests += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens


def _prices(entry: ModelEntry) -> pb.Price | None:
    if entry.input_price is None or entry.output_price is None:
        return None
    return pb.Price(input_per_million=entry.input_price, output_per_million=entry.output_price)
