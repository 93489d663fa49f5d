"""Configuration of a process: a frozen pydantic model, read from a YAML file and `key=value` overrides.

Each default is written once, in the model. An unknown key, a wrong type or a value out of range raises a StartError
that names the key.

Settings shared by processes of several roles.

Names of the worker roles.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, ValidationError

from cluster.errors import StartError
from protos import membership_pb2 as pb


class Config(BaseModel):
    """Base class of every configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validate `values`.

        Raises StartError naming the first invalid field.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first, *others = error.errors()
            place, reason = first["loc"], first["msg"].removeprefix("Value error, ")
            kinds = [other for other in others if other["loc"][:-1] == place[:-1] and not _is_key(other["loc"][-1])]
            if kinds and not _is_key(place[-1]):  # one value that is of none of several kinds
                place, reason = place[:-1], "; or: ".join([reason, *(other["msg"] for other in kinds)])
            field = ".".join(map(str, place)) or "config"
            if first["type"] == "extra_forbidden":
                reason = unknown_key(str(first["loc"][-1]), sorted(_model_at(cls, first["loc"][:-1]).model_fields))
            raise StartError(field, reason) from None

    @classmethod
    def from_command_line(cls, prog: str, arguments: Sequence[str] | None = None) -> Self:
        """Read the configuration of `python -m ROLE --config FILE --set key=value ...`."""
        parser = argparse.ArgumentParser(prog=prog, description=cls.__doc__)
        parser.add_argument("--config", type=Path, help="YAML file with the keys below; - reads standard input")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="setting that overrides the file; may be repeated",
        )
        parser.epilog = "keys: " + ", ".join(cls.model_fields)
        options = parser.parse_args(arguments)
        return cls.parse(read_file(options.config) | parse_overrides(options.set))


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Return what an error says of a key that is not among the `known` ones."""
    near = get_close_matches(key, known, n=1, cutoff=0.75)
    meant = f" did you mean {near[0]}?" if near else ""
    return f"unknown key;{meant} known are {', '.join(known)}"


def _is_key(part: int | str) -> bool:
    """Return whether a part of a location is a key or an index, and not pydantic's name of a kind of value."""
    return isinstance(part, int) or part.isidentifier()


def _model_at(model: type[BaseModel], place: Sequence[int | str]) -> type[BaseModel]:
    """Return the model class at `place`, a location as pydantic names it."""
    for part in place:
        if part in model.model_fields:
            kinds: list[Any] = [model.model_fields[str(part)].annotation]
            while kinds and not (inspect.isclass(kinds[0]) and issubclass(kinds[0], BaseModel)):
                kinds = [*kinds[1:], *get_args(kinds[0])]
            model = kinds[0] if kinds else model
    return model


def read_file(path: Path | None) -> dict[str, Any]:
    """Return the mapping in a YAML file, or an empty one without a file."""
    if path is None:
        return {}
    try:
        values = yaml.safe_load(sys.stdin.read() if str(path) == "-" else path.read_text())
    except OSError as error:
        raise StartError("config", f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise StartError("config", f"{path} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise StartError("config", f"{path} must hold a mapping of keys")
    return values


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` pairs.

    Values are YAML, so numbers and lists need no quoting. A value that begins with a flag is a text as it stands,
    although YAML might read a mapping or a comment in it.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise StartError("set", f"expected KEY=VALUE, got {pair!r}")
        values[key] = value if re.match("--?[A-Za-z]", value) else yaml.safe_load(value)
    return values


def to_overrides(config: Config) -> list[str]:
    """Return command-line arguments from which `from_command_line` builds an equal `config`.

    Secrets are left out, because any user of the machine can read a command line; pass `secrets_of(config)` as standard
    input.
    """
    arguments = ["--config", "-"] if secrets_of(config) else []
    for key, value in config.model_dump(mode="json", exclude_unset=True, exclude=_secret(config)).items():
        arguments += ["--set", f"{key}={json.dumps(value)}"]
    return arguments


def secrets_of(config: Config) -> str:
    """Return YAML with the secret settings, or an empty string when none is set."""
    secrets = config.model_dump(mode="json", exclude_unset=True, include=_secret(config))
    return json.dumps(secrets) if secrets else ""


def _secret(config: Config) -> set[str]:
    return {name for name, field in type(config).model_fields.items() if not field.repr}


class LogSettings(BaseModel):
    """Logging settings of every process."""

    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Lowest level that is logged, to standard error. The environment variable TANDEM_LOG overrides it. Libraries
    always log warnings."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines. json: one object per line, with ts, level, role, process, logger, message, and where known
    request_id, trace_id and exception."""


class TlsSettings(BaseModel):
    """TLS settings of every process.

    The first three are set together; all are PEM files.
    """

    tls_cert: Path | None = None
    """Certificate of this process, with the intermediate certificates up to `tls_ca`."""
    tls_key: Path | None = None
    """Private key of the certificate, not encrypted."""
    tls_ca: Path | None = None
    """Authorities that sign members of this cluster; use an authority of the cluster's own. With it every internal port
    speaks TLS and refuses processes without such a certificate."""
    tls_server_name: str = ""
    """Name that all members' certificates share, checked instead of the host name. Default: the host name."""


class MetricsSettings(TlsSettings):
    """Metrics settings of every process that has metrics."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for Prometheus at http://host:metrics_port/metrics; 0 lets the system choose. Unset: no metrics endpoint.
    With tls_ca it is https and requires a client certificate."""
    tls_metrics_ca: Path | None = None
    """Authorities of certificates that may scrape, instead of tls_ca, so that Prometheus need not be a member."""


class HostSettings(BaseModel):
    """Address of every process that listens."""

    host: str = "127.0.0.1"
    """Address to listen on."""


class ReachedSettings(HostSettings):
    """Settings of every process whose address others get."""

    advertise_host: str = ""
    """Host at which other processes reach this one, when it is not `host`."""


class DrainSettings(BaseModel):
    """Settings of every process that ends its work before it stops."""

    drain_s: NonNegativeFloat = 30.0
    """Seconds for which a stopping process lets its streams, loans and requests finish, before it ends them. A worker
    then hands its streams over to other workers, which may read its blocks for a while longer."""


class HealthSettings(BaseModel):
    """Health settings of every process that serves."""

    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for gRPC's health service alone, in clear text and without a key, for supervisors without a certificate. It
    reports only liveness and readiness. 0 lets the system choose. Unset: health is on the other ports only."""


class DiscoverySettings(BaseModel):
    """Discovery settings of every process that finds routers through Redis, or is found there."""

    redis_url: str = Field(default="", repr=False)
    """Redis URL, redis://host:6379/0 or rediss:// for TLS. Routers announce themselves there, workers find them, and
    tenants' quotas are counted there. Unset: workers join `routers`. The password may come from the environment
    variable TANDEM_REDIS_PASSWORD."""
    cluster_name: str = Field(default="tandem", min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")
    """Prefix of every Redis key; clusters that share a Redis need different names."""


Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
ON_WIRE: dict[Role, "pb.Role.ValueType"] = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}
