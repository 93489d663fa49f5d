"""Settings of a fleet of stock servers: the file that `fleet` names."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cluster.config import Config
from cluster.network.kubernetes import ApiServerSettings
from cluster.network.urls import server_url
from engine.model.hub import ModelPath

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
    pods: PodsEntry | None = None
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
